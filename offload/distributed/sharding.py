"""Which rows of every matrix each rank has, where all ranks have a part of every layer. No torch.

Shards have whole rows of every matrix, so that each product is made in one place:

    q k v, gate up   a rank's own heads and features; their outputs stay where they are
    o, down          take the outputs of all ranks, gathered; each rank has some rows of the
                     result, which are gathered again

That is four gathers a layer. Families that cannot be cut by heads, or are to be cut among more
ranks than they have key/value heads, have every product gathered at once, and attention on every
rank, with small k and v whole. Either way each number is one row times one column on one rank: sums
are never split. The head also has embeddings, the model's head and the draft.

Invariant: every row of a matrix that is shared belongs to exactly one rank.
"""

import math
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from offload.checkpoint.checkpoint import Checkpoint, ModelFiles, compute_dtype_name
from offload.checkpoint.cuts import MatrixRows, Section, checkpoint_of, cut_rows, layer_tensors
from offload.checkpoint.sizes import config_sizes, head_dim, text_config
from offload.checkpoint.small_files import has_encoder
from offload.encoding.base import ENCODINGS, PLAIN_OF
from offload.errors import UserError
from offload.families.types import BY_HEADS

# rows that a share is a multiple of, if a rank has this many times that many
_STEP = 16
_MANY = 4
_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_FEED_FORWARD = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_EXPERTS = ("expert", "router", "mlp.gate.", "block_sparse_moe")


class ShardRole(Enum):
    """How a product's rows are used on other ranks."""

    OWN = 0  # they stay there
    JOINED = 1  # its input and its output are gathered
    GATHERED = 2  # its output is gathered


class ShardedMatrix(NamedTuple):
    """One matrix of every layer."""

    role: ShardRole
    rows_R: tuple[MatrixRows, ...]  # the rows of each rank


class Sharding(NamedTuple):
    """Which rows of every matrix each rank has; `matrices` by name within a layer."""

    matrices: dict[str, ShardedMatrix]

    @property
    def has_own_heads(self) -> bool:
        """Whether a rank computes attention, and keeps keys and values, for its own heads alone."""
        return any(matrix.role is ShardRole.OWN for matrix in self.matrices.values())

    @property
    def percentages(self) -> str:
        counts = [
            sum(rows.num for rows in matrix_rows)
            for matrix_rows in zip(*(m.rows_R for m in self.matrices.values()), strict=True)
        ]
        return ", ".join(f"{100 * count / sum(counts):.0f} %" for count in counts)

    def checkpoint_of(self, rank: int, checkpoint: Checkpoint) -> Checkpoint:
        """Return the part of the layers that a rank reads."""
        return cut_rows(
            checkpoint, {name: matrix.rows_R[rank] for name, matrix in self.matrices.items()}
        )

    def widths(self, name: str) -> list[int]:
        """Return the count of numbers that each rank has in a row of this matrix's output."""
        return [rows.num for rows in self.matrices[name].rows_R]

    def input_widths(self, name: str) -> list[int]:
        """Return `widths` for the gathered input of a joined matrix: values' heads, or features."""
        return self.widths(_FEED_FORWARD[1] if name in _FEED_FORWARD else _ATTENTION[0])


def share_layers(checkpoint: Checkpoint, fractions: Sequence[float]) -> Sharding:
    """Return shards of about these shares, which sum to 1. Raises `UserError` if there are none."""
    where = checkpoint.name
    shapes = layer_tensors(checkpoint)
    codings = [coding.name for coding in checkpoint.codings]
    # GGUF changes plain numbers, too: they are named if nothing else is coded
    if codings:
        coded = next((name for name in codings if name not in ENCODINGS), codings[0])
        raise UserError(
            f"{where}: layers cannot be shared, weights are stored as {coded}: run it as stages"
        )
    stems = {
        name.removesuffix(".weight"): sizes
        for name, sizes in shapes.items()
        if name.endswith(".weight") and "norm" not in name
    }
    matrices = {
        stem: sizes for stem, sizes in stems.items() if any(len(shape) > 1 for shape in sizes)
    }
    odd = next(
        (stem for stem, sizes in matrices.items() if len(sizes) > 1 or len(next(iter(sizes))) != 2),
        None,
    )
    odd = odd or next(
        (stem for stem in stems if any(word in f"{stem}." for word in _EXPERTS)), None
    )
    if has_encoder(checkpoint.config):
        obstacle = "it has an encoder: run it on one rank"
        raise UserError(f"{where}: layers cannot be shared, {obstacle}")
    if odd or not matrices:
        obstacle = f"{odd} cannot be cut by rows: run it on one rank, or as stages"
        raise UserError(f"{where}: layers cannot be shared, {obstacle}")
    rows = {stem: next(iter(sizes))[0] for stem, sizes in matrices.items()}
    if _has_heads(checkpoint, shapes) and len(fractions) <= config_sizes(checkpoint).get(
        "num_key_value_heads", 0
    ):
        return _by_heads(checkpoint, rows, fractions)
    shared = [stem for stem in rows if stem not in _ATTENTION[1:3]]
    return Sharding(
        {
            stem: ShardedMatrix(ShardRole.GATHERED, split_rows(rows[stem], fractions))
            for stem in shared
        }
    )


def split_rows(
    num_rows: int, fractions: Sequence[float], step: int = _STEP
) -> tuple[MatrixRows, ...]:
    """Split rows into whole steps, or single rows if few, about as the fractions say.

    Every rank has one at least. Raises `UserError` where there are fewer rows than ranks.
    """
    num_ranks = len(fractions)
    if num_rows < num_ranks:
        raise UserError(
            f"a matrix of {num_rows} rows cannot be shared by {num_ranks} ranks: take fewer ranks"
        )
    step = step if num_rows >= _MANY * step * num_ranks else 1
    num_steps = math.ceil(num_rows / step)
    ends = list[int]()
    before = 0.0
    for rank, fraction in enumerate(fractions):
        before += fraction
        least = (ends[-1] if ends else 0) + 1
        most = num_steps - (num_ranks - 1 - rank)
        ends.append(min(max(round(before * num_steps), least), most))
    ends[-1] = num_steps
    return tuple(
        MatrixRows(lo * step, min(hi * step, num_rows))
        for lo, hi in zip([0, *ends[:-1]], ends, strict=True)
    )


def _has_heads(checkpoint: Checkpoint, shapes: dict[str, set[tuple[int, ...]]]) -> bool:
    """Return True if heads and features can be computed separately, as in Llama."""
    sizes = config_sizes(checkpoint)
    num_heads = sizes.get("num_attention_heads", 0)
    num_groups = sizes.get("num_key_value_heads")
    width = head_dim(sizes)
    matrices = {
        name.removesuffix(".weight"): next(iter(shapes_of_name))
        for name, shapes_of_name in shapes.items()
        if name.endswith(".weight") and len(next(iter(shapes_of_name))) == 2
    }
    is_known = text_config(checkpoint).get("model_type") in BY_HEADS
    if not is_known or set(matrices) != {*_ATTENTION, *_FEED_FORWARD} or num_groups is None:
        return False
    expected = {"q": num_heads * width, "k": num_groups * width, "v": num_groups * width}
    of_heads = all(matrices[f"self_attn.{key}_proj"][0] == rows for key, rows in expected.items())
    biases = {f"{stem}.bias" for stem in matrices}
    others = [
        shape
        for name, shapes_of_name in shapes.items()
        if name not in biases
        for shape in shapes_of_name
        if len(shape) == 1
    ]
    return of_heads and all(shape in ((sizes["hidden_size"],), (width,)) for shape in others)


def _by_heads(checkpoint: Checkpoint, rows: dict[str, int], fractions: Sequence[float]) -> Sharding:
    """Split whole key/value heads with their query heads; features and results even them out."""
    sizes = config_sizes(checkpoint)
    groups_R = split_rows(sizes["num_key_value_heads"], fractions, 1)
    of_group = (
        sum(rows[stem] for stem in _ATTENTION[:3])
        * sizes["hidden_size"]
        / sizes["num_key_value_heads"]
    )
    others = (
        rows["self_attn.o_proj"] * rows["self_attn.q_proj"]
        + 3 * rows["mlp.up_proj"] * sizes["hidden_size"]
    )
    whole = others + of_group * sizes["num_key_value_heads"]
    left = [
        max(0.0, fraction * whole - of_group * groups.num)
        for fraction, groups in zip(fractions, groups_R, strict=True)
    ]
    finer = [fraction / sum(left) for fraction in left] if sum(left) else fractions
    matrices = {
        stem: ShardedMatrix(ShardRole.OWN, split_rows(rows[stem], finer))
        for stem in _FEED_FORWARD[:2]
    }
    for stem in _ATTENTION[:3]:
        each = rows[stem] // sizes["num_key_value_heads"]
        matrices[stem] = ShardedMatrix(
            ShardRole.OWN, tuple(MatrixRows(lo * each, hi * each) for lo, hi in groups_R)
        )
    for stem in (_ATTENTION[3], _FEED_FORWARD[2]):
        matrices[stem] = ShardedMatrix(ShardRole.JOINED, split_rows(rows[stem], finer))
    return Sharding(matrices)


class Gathers(NamedTuple):
    """The exchanges of ranks that share every layer; a cable carries both directions at once."""

    widths: Sequence[Sequence[int]]  # for each gather of a layer: numbers in a row, rank by rank
    num_layers: int
    width: int  # D, for the rows that the head broadcasts before the first layer
    item_bytes: int

    def sent_bytes(self, num_rows: int) -> tuple[int, ...]:
        """Return the bytes that each rank sends to all others in a pass, without headers.

        Parts are padded to the widest.
        """
        num_ranks = len(self.widths[0])
        parts = self.num_layers * sum(map(max, self.widths))
        numbers_R = [parts + self.width, *[parts] * (num_ranks - 1)]
        return tuple((num_ranks - 1) * num * num_rows * self.item_bytes for num in numbers_R)


def gathers_of(target: Checkpoint, sharding: Sharding, dtype: str) -> Gathers:
    """Return the exchanges of a pass over layers that are shared like this."""
    num_layers = config_sizes(target)["num_hidden_layers"]
    # for each gather of a layer, the numbers of a row that each rank has
    widths = list[Sequence[int]]()
    for name, matrix in sharding.matrices.items():
        widths += [sharding.input_widths(name)] if matrix.role is ShardRole.JOINED else []
        widths += [] if matrix.role is ShardRole.OWN else [sharding.widths(name)]
    return Gathers(widths, num_layers, *row_sizes(target, dtype))


def shard_files(files: ModelFiles, sharding: Sharding, rank: int) -> ModelFiles:
    """Return the files that a rank of shards reads; embeddings, head and draft are the head's."""
    shard = sharding.checkpoint_of(rank, files.target)
    if rank == 0:
        return files._replace(target=shard)
    return ModelFiles(checkpoint_of(shard, layers_alone(shard)))


def layers_alone(checkpoint: Checkpoint) -> Section:
    """Return the section of all layers, without embeddings and head."""
    return Section(
        0, config_sizes(checkpoint)["num_hidden_layers"], has_table=False, has_head=False
    )


def row_sizes(target: Checkpoint, dtype: str) -> tuple[int, int]:
    """Return D, and the bytes of a number."""
    name = compute_dtype_name(target, dtype)
    return config_sizes(target)["hidden_size"], PLAIN_OF[name].align_bytes
