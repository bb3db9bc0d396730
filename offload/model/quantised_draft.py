"""Matrices of a resident model at 4 or 8 bits, and their products with rows.

Few rows use integer products, which read only the quantised words: at 4 bits our own if the
processor has the instructions (`kernels/int4_products.py`), else torch's; on a GPU at 4 bits
`kernels/multiply_int4.py`. Our own are made at once for matrices that multiply the same rows. For
many rows a matrix is expanded into a shared scratch buffer for a normal product. A trial on the
largest matrix finds the number of rows from which that is faster on a CPU, if there is any: with
products of bytes and without those of tiles there is none. Rounding is to the nearest. Invariant: a
layer that was taken over keeps nothing of its slab.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.held import FEW_ROWS, is_held, is_shared
from offload.checkpoint.layout import Stack, TensorPart
from offload.encoding.residuals import group_of, padded_rows
from offload.errors import require
from offload.kernels.int4_blocks import (
    WordLayout,
    encode_int4,
    expand_int4,
    int4_product,
    layout_for,
    least_step,
)
from offload.kernels.int4_products import Int4RowsProduct, instructions
from offload.kernels.multiply_int4 import can_multiply
from offload.model.expanded import ExpandedWeights
from offload.model.linear import Linear, Products, inner_of
from offload.model.parameters import ParameterPlace
from offload.model.thread_team import compute_with_torch
from offload.timer import timed

_MOST_8_BITS = 127
_CHUNK_NUMBERS = 1 << 20  # rounded at once
_CACHED_ROWS = 256
_COLUMNS_OF_INT8 = 16  # that torch's product takes at once
_TRIED_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_NUM_TIMES = 3
_NUM_MORE_TIMES = 20
_MORE_S = 0.1
# whose sums a thread keeps on its stack
_ROWS_AT_ONCE = 256
_ANY_ROWS = 1 << 30
# with more, what siblings' results take matters beside what they save
_MOST_SIBLING_ROWS = 64
# no `id` of an object
_PADDING = 0
Scratch = Callable[[int], Tensor]
# `multiply_int4_kernel`, or a function with the same result
MultiplyInt4 = Callable[[Tensor, Tensor, Tensor, WordLayout], Tensor]


class Int4(NamedTuple):
    """Codes of 4 bits, and scale and offset of every group of columns."""

    word_NK: Tensor
    scale: Tensor  # (G, N, 2), in the type that is computed in, where that is done
    layout: WordLayout
    num_rows: int
    bits: int = 4

    @property
    def shape(self) -> tuple[int, int]:
        """Return (N, K), as it was."""
        return self.num_rows, 2 * self.word_NK.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.word_NK.nbytes + self.scale.nbytes

    @property
    def has_product(self) -> bool:
        """Return True if few rows need no scratch."""
        return self.layout.has_product or self.has_own_product

    @property
    def has_own_product(self) -> bool:
        """Return True if the product is `Int4RowsProduct`, and others may be made with it."""
        return self.word_NK.device.type == "cpu" and instructions() is not None

    def product(self, row_MK: Tensor) -> Tensor:
        """Return rows times the transposed matrix, (M, N), for few rows."""
        if not self.has_own_product:
            return int4_product(row_MK, self.word_NK, self.scale)[:, : self.num_rows]
        product = Int4RowsProduct([(self.word_NK, self.scale)], self.layout)
        products = [compute_with_torch(product(rows)) for rows in row_MK.split(_ROWS_AT_ONCE)]
        out_MN = products[0] if len(products) == 1 else torch.cat(products)
        return out_MN[:, : self.num_rows]

    def expanded(self, row_MK: Tensor, scratch: Scratch) -> Tensor:
        """Return the product for many rows; `scratch` gives this many numbers of room."""
        num_rows = len(self.word_NK)
        num_columns = self.shape[1]
        out_KN = scratch(num_rows * num_columns).view(num_columns, num_rows)
        expand_int4(self.word_NK, self.scale, self.layout, out_KN)
        return row_MK @ out_KN[:, : self.num_rows]


class Int8(NamedTuple):
    """Whole numbers of 8 bits, and a scale for each row; see `Int4`."""

    word_NK: Tensor
    scale: Tensor  # (N,)
    bits: int = 8

    @property
    def shape(self) -> tuple[int, int]:
        return self.word_NK.shape[0], self.word_NK.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.word_NK.nbytes + self.scale.nbytes

    @property
    def has_product(self) -> bool:
        # with other widths torch 2.13 reads behind the end of rows in bfloat16
        is_whole = self.shape[1] % _COLUMNS_OF_INT8 == 0
        return self.word_NK.device.type == "cpu" and is_whole

    def product(self, row_MK: Tensor) -> Tensor:
        """See `Int4`."""
        return torch._weight_int8pack_mm(row_MK, self.word_NK, self.scale)

    def expanded(self, row_MK: Tensor, scratch: Scratch) -> Tensor:
        """See `Int4`; the scales wait for the products."""
        # what a CPU expands stays in its cache
        at_once = _CACHED_ROWS if self.word_NK.device.type == "cpu" else len(self.word_NK)
        parts = self.word_NK.split(at_once)
        weights = (scratch(part.numel()).view(part.shape).copy_(part) for part in parts)
        return torch.cat([functional.linear(row_MK, weight) for weight in weights], 1).mul_(
            self.scale
        )


def int8(weight_NK: Tensor) -> Int8:
    """Round to the nearest of 255 levels on both sides of zero, up to the largest of each row."""
    word_NK = torch.empty_like(weight_NK, dtype=torch.int8)
    scale_N = weight_NK.new_empty(len(weight_NK))
    at_once = max(1, _CHUNK_NUMBERS // weight_NK.shape[1])
    least = least_step(weight_NK.dtype)
    parts = (whole.split(at_once) for whole in (weight_NK, word_NK, scale_N))
    for weight, word, scale in zip(*parts, strict=True):
        # faster than `aminmax`
        scale.copy_((weight.abs().amax(1).float() / _MOST_8_BITS).clamp_(min=least))
        step_NK = weight.to(torch.float32, copy=True).div_(scale[:, None].float()).round_()
        word.copy_(step_NK.clamp_(-_MOST_8_BITS, _MOST_8_BITS))
    return Int8(word_NK, scale_N)


def matrix_of(weight_NK: Tensor, bits: int) -> Int4 | Int8:
    """Return a matrix at 8 bits, or at 4 where groups of columns divide it.

    These are rounded to the nearest of 16 levels between the extremes of each group.
    """
    group = group_of(weight_NK.shape[1])
    if bits == 8 or group is None:
        return int8(weight_NK)
    layout = layout_for(weight_NK.device)
    words = encode_int4(weight_NK, group, layout)
    return Int4(words.word_NK, words.scale_GN2, layout, len(weight_NK))


class _Siblings:
    """Matrices of a model that multiply the same rows, one after the other; it never changes."""

    def __init__(self, matrices: Sequence[Int4]) -> None:
        self._matrices = matrices
        weights = [(matrix.word_NK, matrix.scale) for matrix in matrices]
        self._product = Int4RowsProduct(weights, matrices[0].layout)
        self._keys = list[int]()
        self._widths = list[int]()
        for matrix in matrices:
            num_padded = len(matrix.word_NK) - matrix.num_rows
            self._keys += [id(matrix), _PADDING] if num_padded else [id(matrix)]
            self._widths += [matrix.num_rows, num_padded] if num_padded else [matrix.num_rows]

    def with_matrix(self, matrix: Int4) -> "_Siblings":
        """Return these and one more, or these alone if it is known or has another form."""
        forms = {
            (each.layout, len(each.scale), each.scale.dtype) for each in (matrix, self._matrices[0])
        }
        is_known = any(matrix is sibling for sibling in self._matrices)
        return self if len(forms) > 1 or is_known else _Siblings([*self._matrices, matrix])

    def without(self, keys: Collection[int]) -> "_Siblings":
        """Return the first one, and of the others all but those of these `id`s."""
        first, *others = self._matrices
        return _Siblings([first, *(matrix for matrix in others if id(matrix) not in keys)])

    def products(self, rows: Tensor) -> dict[int, Tensor]:
        """Return rows (..., K) times each matrix transposed, (..., N), by the matrix's `id`."""
        out_MN = compute_with_torch(self._product(rows.reshape(-1, rows.shape[-1])))
        out = out_MN.view(rows.shape[:-1] + out_MN.shape[1:])
        products = dict(zip(self._keys, out.split_with_sizes(self._widths, -1), strict=True))
        products.pop(_PADDING, None)
        return products


class SiblingProducts:
    """Products with few rows, made at once for all matrices that multiply the same rows.

    Queries, keys and values of an attention do, and two matrices of a feed-forward. Which ones is
    seen, not read from names: those that are asked for one after the other with the same tensor.
    No module may change that tensor in between, and no library's does: it could not be trained.
    One thread at a time asks; a pass that was interrupted leaves nothing half-changed.
    """

    def __init__(self) -> None:
        self._siblings = dict[int, _Siblings]()
        self._rows: Tensor | None = None
        self._first = 0
        self._waiting = dict[int, Tensor]()

    def take(self, matrix: Int4 | Int8, rows: Tensor) -> Tensor | None:
        """Return a product (..., N) that was made with a sibling's, once; None if there is none."""
        return self._waiting.pop(id(matrix), None) if rows is self._rows else None

    def product(self, matrix: Int4, rows: Tensor) -> Tensor:
        """Return rows (..., K) times the transposed matrix, (..., N), with its siblings' or alone."""
        key = id(matrix)
        first = self._siblings.get(self._first)
        if first is not None and rows is self._rows and key != self._first:
            self._siblings[self._first] = first.with_matrix(matrix)
            return self._siblings_of(matrix).products(rows)[key]
        if first is not None and self._waiting:
            # what was not asked for is no sibling
            self._siblings[self._first] = first.without(self._waiting)
        products = self._siblings_of(matrix).products(rows)
        product = products.pop(key)
        self._waiting = products
        self._rows = rows
        self._first = key
        return product

    def _siblings_of(self, matrix: Int4) -> _Siblings:
        siblings = self._siblings.get(id(matrix))
        if siblings is None:
            siblings = self._siblings[id(matrix)] = _Siblings([matrix])
        return siblings


def shared_copies(checkpoint: Checkpoint, stacks: Mapping[str, Stack]) -> dict[str, TensorPart]:
    """Return the matrices of a draft's layer whose copy its target keeps. Raises `UserError`."""
    shared = {
        name: parts
        for name, (_, parts) in stacks.items()
        if any(is_shared(part.entry, checkpoint.held) for part in parts)
    }
    for name, parts in shared.items():
        needed = f"{checkpoint.name}: `draft` self:int4 needs {name} in one tensor"
        require(len(parts) == 1, needed, len(parts), "name a small draft of the family")
    return {name: parts[0] for name, parts in shared.items()}


def require_copies(checkpoint: Checkpoint, are_here: Iterable[bool]) -> None:
    """Raise `UserError` where a target has only some of the copies, as a stage has."""
    num_missing = sum(not is_here for is_here in are_here)
    needed = f"{checkpoint.name}: `draft` self:int4 needs the copies of all layers here"
    require(not num_missing, needed, f"{num_missing} are elsewhere", "name a small draft")


class _HeldMatrix(NamedTuple):
    """A matrix in the place of a module's own; see `StoredMatrix`."""

    held: "HeldWeights"
    matrix: Int4 | Int8

    def matmul(self, rows: Tensor, products: Products, bias: Tensor | None) -> Tensor:
        """See `StoredMatrix`: a draft's rows may have other bits beside others."""
        return self.held.multiply(self.matrix, rows, bias)


def _least_s(work: Callable[[], object], num_times: int, most_s: float = inf) -> float:
    """Return the least of some runs' seconds; none begins once they took `most_s` together."""
    timed(work)  # a first call is not like the others
    seconds = [timed(work)]
    while len(seconds) < num_times and sum(seconds) < most_s:
        seconds.append(timed(work))
    return min(seconds)


class HeldWeights:
    """The matrices of a model's layers at 4 or 8 bits."""

    def __init__(self, bits: int) -> None:
        self._bits = bits
        self._scratch_B = torch.empty(0, dtype=torch.uint8)
        self._matrices = list[Int4 | Int8]()
        self._most_rows = {4: FEW_ROWS, 8: FEW_ROWS}  # that are multiplied without a scratch
        self._kernel: MultiplyInt4 | None = None
        self._siblings = SiblingProducts()
        self._most_at_once = 0  # rows that siblings multiply

    @property
    def num_bytes(self) -> int:
        return sum(matrix.num_bytes for matrix in self._matrices) + self._scratch_B.nbytes

    def set_kernel(self, kernel: MultiplyInt4 | None) -> None:
        """Set the kernel for few rows on the matrices' device; None expands them instead."""
        self._kernel = kernel

    def for_kernel(self) -> list[Int4]:
        """Return the matrices that a kernel can multiply with."""
        held = (matrix for matrix in self._matrices if isinstance(matrix, Int4))
        return [matrix for matrix in held if can_multiply(1, matrix.scale.dtype)]

    def take(self, linear: Linear) -> None:
        """Make a module multiply with a matrix that is held here, and drop its own weight."""
        self._hold(linear, matrix_of(linear.weight.detach(), self._bits))

    def _hold(self, linear: Linear, matrix: Int4 | Int8) -> None:
        self._matrices.append(matrix)
        empty = torch.empty(matrix.shape, dtype=linear.weight.dtype, device="meta")
        linear._parameters["weight"] = nn.Parameter(empty, requires_grad=False)
        linear.stored = _HeldMatrix(self, matrix)

    def share(self, linear: nn.Module, companions: Mapping[str, Tensor], num_rows: int) -> None:
        """Make a module multiply with the copy from which the target's weights are expanded."""
        assert isinstance(linear, Linear), "others are not copied"
        word_BKH = companions["word"]
        is_on_cpu = word_BKH.device.type == "cpu"
        has_product = is_on_cpu and layout_for(word_BKH.device).has_product
        layout = WordLayout(2 * word_BKH.shape[2], has_product)
        word_NK = word_BKH.view(-1, word_BKH.shape[1] // 2)
        # scales of another type than the target's are the draft's own
        scale_GN2 = companions["scale"].to(linear.weight.dtype).contiguous()
        self._hold(linear, Int4(word_NK, scale_GN2, layout, num_rows))

    def _take_matrix(self, name: str, linear: Linear) -> None:
        if is_held(name, tuple(linear.weight.shape)):
            self.take(linear)

    def take_layer(
        self, layer: nn.Module, places: Collection[ParameterPlace], expanded: ExpandedWeights
    ) -> None:
        """Hold all matrices of a bound layer, and copies of all else, so that its slab can go."""
        for name, around in layer.named_modules():
            module = inner_of(around)
            expanded.release(module)
            if isinstance(module, Linear) and module.stored is None:
                self._take_matrix(f"{name}.weight", module)
            for place in places:
                parameter = place.table[place.key]
                if place.module is module and parameter is not None and not parameter.is_meta:
                    place.table[place.key] = parameter.clone()
        expanded.settle()

    def settle(self) -> None:
        """Try out how many rows are few, once all matrices are here."""
        for matrix in self._matrices:  # nothing may be allocated while passes are recorded
            self._room(matrix.scale, padded_rows(matrix.shape[0]) * matrix.shape[1])
        for bits in (4, 8):
            of_width = [matrix for matrix in self._matrices if matrix.bits == bits]
            if of_width:
                largest = max(of_width, key=lambda matrix: matrix.num_bytes)
                self._most_rows[bits] = (
                    self._rows_without_scratch(largest) if largest.has_product else 0
                )
        of_siblings = (matrix for matrix in self._matrices if isinstance(matrix, Int4))
        if all(matrix.has_own_product for matrix in of_siblings):
            self._most_at_once = min(self._most_rows[4], _MOST_SIBLING_ROWS)

    def multiply(self, matrix: Int4 | Int8, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Return rows @ matrix^T, by the way that is fastest for this number of rows."""
        out = self._siblings.take(matrix, rows)
        if out is None:
            out = self._product(matrix, rows)
        return out if bias is None else out + bias

    def _product(self, matrix: Int4 | Int8, rows: Tensor) -> Tensor:
        num_rows = rows.numel() // rows.shape[-1]
        is_at_once = self._kernel is None and num_rows <= self._most_at_once
        if is_at_once and isinstance(matrix, Int4):
            return self._siblings.product(matrix, rows)
        row_MK = rows.reshape(num_rows, rows.shape[-1])
        is_for_it = can_multiply(num_rows, row_MK.dtype)
        if self._kernel is not None and isinstance(matrix, Int4) and is_for_it:
            arguments = (row_MK, matrix.word_NK, matrix.scale, matrix.layout)
            out_MN = self._kernel(*arguments)[:, : matrix.num_rows]
        elif num_rows <= self._most_rows[matrix.bits] and matrix.has_product:
            out_MN = matrix.product(row_MK)
        else:
            out_MN = matrix.expanded(row_MK, partial(self._room, row_MK))
        return out_MN.view(*rows.shape[:-1], matrix.shape[0])

    def _room(self, like: Tensor, count: int) -> Tensor:
        num_bytes = count * like.element_size()
        if len(self._scratch_B) < num_bytes:
            self._scratch_B = torch.empty(num_bytes, dtype=torch.uint8, device=like.device)
        return self._scratch_B[:num_bytes].view(like.dtype)

    def _rows_without_scratch(self, matrix: Int4 | Int8) -> int:
        """Return the most rows that the product without a scratch is faster with."""
        most = 0
        expanding_s = 0.0
        scale = matrix.scale
        few: Callable[[Tensor], object] = matrix.product
        if isinstance(matrix, Int4) and matrix.has_own_product:
            few = _Siblings([matrix]).products
        for num_rows in _TRIED_ROWS:
            row_MK = torch.zeros(num_rows, matrix.shape[1], dtype=scale.dtype, device=scale.device)
            expanded = partial(matrix.expanded, row_MK, partial(self._room, row_MK))
            multiply = few if num_rows <= _MOST_SIBLING_ROWS else matrix.product
            ways = (partial(multiply, row_MK), expanded)
            product_s, expanded_s = (_least_s(way, _NUM_TIMES) for way in ways)
            if product_s > expanded_s:
                # All of a few short runs may be cut into on a busy machine, and passes over these
                # rows would be many times slower for good.
                again = (_least_s(way, _NUM_MORE_TIMES, _MORE_S) for way in ways)
                product_s, expanded_s = map(min, (product_s, expanded_s), again)
            if product_s > expanded_s:
                return most
            most = num_rows
            # that of a few rows is nearly all expanding
            expanding_s = expanding_s or expanded_s
        # with more rows expanding matters less and less
        return _ANY_ROWS if product_s < expanded_s - expanding_s else most
