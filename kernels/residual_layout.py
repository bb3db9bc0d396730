"""The layout of bfloat16 weights beside a copy of 4 bits: what the copy does not say of each weight.

The low byte of a weight holds the last bit of its exponent, so numbers of one sign with the same
low byte lie four times apart. A level of the copy (`int4_blocks`) that is not at zero stands for
numbers of one sign, of which the largest is at most about three times the smallest: of these, a low
byte is that of one. So most weights are their low byte: the first number with it from the level's
lower bound on. A weight at level zero, one in eight, has 2 bits more: plus or minus the largest
number with its low byte that the level holds, 2 for a smaller one, 3 for one whose high byte is 0.
The smaller ones, a quarter, have 4 bits more: the sign, and how often 256 is taken off their bits
(1 to 7 times), or 7 where the other bits of the high byte are 0. All that this does not give back,
such as NaN and what its group has no level near, is listed by place with its high byte. Where all
of a group is about zero, level zero needs no symbols: all high bytes there are 0.

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
