"""How bfloat16 lies without loss in 12 bits, or 11: sign and mantissa as they are, the exponent as far as from a top.

Nearly all weights of a tensor share fifteen exponents that follow one another, so a distance takes 4 bits and needs no
table; the largest distance marks an escape, whose exponent stands in a list. Where seven suffice, it takes 3 bits.

Weights lie in blocks of 1024, each of eight runs of 128. A plane of b bits has b x 128 bytes for a block: run r is in
the bytes of part r % b, b x (r // b) bits up, so that loads are of neighbours. A distance of 4 bits is one plane; of 3
bits, a plane of its 2 low bits and one of its high bit. Escapes are listed by chunks of 65536 weights: first the low
bytes of all places within a chunk, then the high bytes, then the exponents. No torch, which planning does without.
"""

BLOCK, RUN, CHUNK = 1024, 128, 65_536  # weights
