"""The one grid of tree sizes: whoever chooses or compares trees looks at these.

A larger tree costs rows of a sweep, memory for them and draft passes, and yields ever less: which size pays is found by
what they cost, not by a bound of any caller. The grid ends where rows of Llama-2-70B are still free on an L40 (a pass
of 2,048 computes for 2.6 s, its link takes 4.7 s) and those of twice as many no longer are.
"""

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
