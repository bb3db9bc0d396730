"""The layout of bfloat16 weights beside their copy of 4 bits: the bits that the copy leaves open.

A weight has a high byte (the sign and seven bits of the exponent) and a low byte (the exponent's
last bit and the mantissa). Low bytes are stored as they are; a high byte follows from the copy:

- Two numbers of one sign with the same low byte differ by a factor of 4 at least. A level of the
  copy (`int4_blocks`) other than zero stands for numbers of one sign, the largest at most about
  three times the smallest. So it holds one number with a given low byte: the first one from its
  lower bound on. Such a weight takes no further bits.
- A weight at level zero, one in eight, has a *near* symbol of 2 bits: plus or minus the largest
  number with its low byte that the level holds, 2 for a smaller one, 3 for a high byte of 0.
- A smaller one, a quarter of these, has a *far* symbol of 4 bits: the sign, and in three bits how
  many times 256 is subtracted from the largest one's bits (1 to 7 times, stored as 0 to 6), or 7
  where the seven bits of the exponent are 0.
- All others, such as NaN and weights far from every level of their group, are *escapes*: listed by
  place with their high byte. In a group whose numbers are all about zero every high byte is 0, and
  level zero has no symbols.

Weights lie in tiles of 64 rows and 256 columns, fewer at the edges; tile follows tile in a row of
tiles. The low bytes have the order of the matrix. Symbols of 2 and of 4 bits, from the lowest bit
on, and places, 256 x row + column, have the order of tiles, rows, columns; those of a tile begin
with a byte. Behind the low bytes lie all symbols of 2 bits, then of 4; then the low bytes of all
places within a tile, their high bytes, and the weights' high bytes. No torch, which planning does
without.
"""

TILE_ROWS = 64
TILE_COLUMNS = 256
FURTHER = 2  # symbols of 2 bits
NO_HIGH_BYTE = 3
NO_MAGNITUDE = 7  # of the lower three of 4 bits
STEP = 256
# a group with such a step or a smaller one holds zeros, and what is next to nothing
EMPTY_STEP = 2.0**-39


def num_tiles(num_rows: int, num_columns: int) -> int:
    """Return the tiles of a matrix."""
    return -(-num_rows // TILE_ROWS) * -(-num_columns // TILE_COLUMNS)
