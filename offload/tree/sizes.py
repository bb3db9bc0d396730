"""The one grid of tree sizes: whoever chooses or compares trees looks at these.

A larger tree costs rows of a sweep, memory for them and draft passes, and yields ever less: which size pays is found by
what they cost, not by a bound. The last size is where the best machine of `planning.hardware` has no free rows left: a
pass of 2,048 rows over Llama-2-70B computes for 2.6 s on an L40, whose link takes 4.7 s, and the tree of the next size
yields 4 % more tokens, for which its draft passes take longer.
"""

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
