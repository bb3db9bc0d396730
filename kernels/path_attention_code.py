"""The instructions of attention along paths on a CPU: see `path_attention_cpu.py`.

A tile is some rows of the pass and the heads of one set; each row and head is a query. For a tile:

    scores[query] = queries[query] . keys          `score`, two queries and a block at a time
    scores -> weights, totals                      `soften`: caps, hidden positions, sinks, 2^x
    sums[query] = weights[query] . values          `gather`, two queries and a block at a time
    out[query] = sums[query] / totals[query]

Blocks of `BLOCK` positions before `base` are the same for all rows of a tile and are widened to
float32 once for all of them; behind it each row has columns of its own, which its walk lists. Names
are those of LLVM's values: an address is a pointer, a number is an index of 64 bits.
"""

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from offload.kernels.machine_code import EIGHT, Code, CompiledCode, compiled
from offload.kernels.path_attention import BLOCK, HEADER

# numbers of a key in one round; widths are padded to multiples of it
KEY_STEP = 2 * EIGHT
# numbers of a value whose sums stay in registers
VALUE_STEP = 4 * EIGHT
# where a call's tensors lie, 0 for what there is not, and then its sizes; strides are in numbers
FIELDS = (
    "query", "key", "value", "walk", "least", "chosen", "sink", "span", "out", "cap",
    "num_rows", "tile_rows", "num_heads", "set_heads", "sets", "width", "whole", "value_width",
    "value_whole", "key_group", "key_row", "value_group", "value_row", "walk_row", "chosen_row",
    "sink_step", "score_row",
)  # fmt: skip
# keys that two rows are multiplied by at once
_KEYS = 4
# below it a power of 2 counts as 0.0
_LEAST_POWER = -126.0
# terms of the series of 2^f for |f| <= 0.5: the rest is below half a rounding
_NUM_POWERS = 8
NAME = "attend"
# takes two queries, the first position of a block, and the number of its rows
_WorkOnPair = Callable[[Sequence[Any], Any, Any], None]


@cache
def code_for(dtype: torch.dtype) -> CompiledCode:
    """Return a function for such keys and values; its call has `FIELDS`, see `ParallelKernelCall`."""
    return compiled(_PathAttention(dtype).text(), {NAME: [ctypes.c_void_p] * 2})


class _PairRows(NamedTuple):
    """A function of two queries, and the rows that it is given: the queries, or their sums."""

    function: Any
    begin: Any
    step: Any  # numbers of a row


class _Tile(NamedTuple):
    """The rows of one tile, and its scratch memory in the room of its thread."""

    first_row: Any  # of the pass
    num_rows: Any
    num_queries: Any  # rows times heads of the set
    first_head: Any
    group: Any  # of keys and values
    query: Any  # address of the first query
    first: Any  # positions [first, end) before `base` that some row sees
    end: Any
    block: Any  # addresses in the room: a block of keys or values in float32
    scores: Any
    sums: Any  # of values
    totals: Any  # of weights


class _States(NamedTuple):
    """Keys or values of one group of heads."""

    begin: Any  # address
    row_step: Any  # from one row to the next
    width: Any  # of a row
    whole: Any  # of a row of the block, padded


class _PathAttention(Code):
    """The functions `widen`, `score`, `soften`, `gather` and, of these, `attend`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype, EIGHT)
        self._columns = self._int.as_pointer()
        self._single = self._ir.FloatType()
        self._floor = self._of_eight(self._eight, "llvm.floor.v8f32")
        self._to_integers = self._of_eight(self._words, "llvm.fptosi.sat.v8i32.v8f32")
        self._widen = self._write_widen()
        self._score = self._write_score()
        self._soften = self._write_soften()
        self._gather = self._write_gather()
        self._write_attend()

    def _of_eight(self, kind: Any, name: str) -> Any:
        """Return one of LLVM's functions of eight numbers."""
        return self._ir.Function(self._module, self._ir.FunctionType(kind, [self._eight]), name)

    def _write_widen(self) -> Any:
        """Write widen(to, from, row, first, columns, count, width, whole): rows to float32, with zeros
        behind; those of `columns`, or those from `first` on.
        """
        index = self._index
        kinds = [self._number, self._narrow, index, index, self._columns, index, index, index]
        function = self._begin("widen", kinds)
        to, source, row, first, columns, count, width, whole = function.args
        is_named = self._builder.icmp_unsigned("!=", columns, columns.type(None))
        whole_vectors = self._builder.and_(width, index(-EIGHT))

        named = self._builder.alloca(index)

        def widen(number: Any) -> None:
            self._builder.store(self._builder.add(first, number), named)
            with self._builder.if_then(is_named):
                column = self._builder.load(self._at(columns, number))
                self._builder.store(self._builder.sext(column, index), named)
            column = self._builder.load(named)
            begin = self._at(source, self._times(column, row))
            place = self._at(to, self._times(number, whole))

            def eight(at: Any) -> None:
                self._store(self._load_widened(self._at(begin, at)), self._at(place, at))

            def single(at: Any) -> None:
                self._builder.store(self._load_widened(self._at(begin, at), 1), self._at(place, at))

            def nothing(at: Any) -> None:
                self._builder.store(self._single(0.0), self._at(place, at))

            self._each(0, whole_vectors, EIGHT, eight)
            self._each(whole_vectors, width, 1, single)
            self._each(width, whole, 1, nothing)

        self._each(0, count, 1, widen)
        self._builder.ret_void()
        return function

    def _write_score(self) -> Any:
        """Write score(to, to, query, query, keys, count, whole): scores of two queries for `count`
        keys, and for up to three that lie behind them.
        """
        kinds = [*[self._number] * 5, *[self._index] * 2]
        function = self._begin("score", kinds)
        left, other, query, second, keys, count, whole = function.args

        def score(first: Any) -> None:
            rows = (self._times(self._add(first, key), whole) for key in range(_KEYS))
            places = [self._at(keys, row) for row in rows]

            def multiply(at: Any, sums: Sequence[Any]) -> list[Any]:
                for step in range(0, KEY_STEP, EIGHT):
                    here = self._add(at, step)
                    numbers = [self._load_eight(key, here) for key in places]
                    pair = [self._load_eight(row, here) for row in (query, second)]
                    sums = self._fma_all(pair, numbers, sums)
                return list(sums)

            nothing = [self._eight([0.0] * EIGHT)] * (2 * _KEYS)
            sums = self._loop(0, whole, KEY_STEP, nothing, multiply)
            self._store(self._horizontal_sums(sums[:_KEYS]), self._at(left, first))
            self._store(self._horizontal_sums(sums[_KEYS:]), self._at(other, first))

        self._each(0, count, _KEYS, score)
        self._builder.ret_void()
        return function

    def _load_eight(self, place: Any, number: Any) -> Any:
        return self._load(self._at(place, number), self._eight)

    def _horizontal_sums(self, registers: Sequence[Any]) -> Any:
        """Return four numbers: the sum of all lanes of each of four registers."""
        add = self._builder.fadd
        # first neighbours within each half, then pairs, then the two halves
        low, high = (
            add(
                self._shuffle(left, other, [0, 8, 2, 10, 4, 12, 6, 14]),
                self._shuffle(left, other, [1, 9, 3, 11, 5, 13, 7, 15]),
            )
            for left, other in (registers[:2], registers[2:])
        )
        four = add(
            self._shuffle(low, high, [0, 1, 8, 9, 4, 5, 12, 13]),
            self._shuffle(low, high, [2, 3, 10, 11, 6, 7, 14, 15]),
        )
        halves = (self._shuffle(four, four, order) for order in ([0, 1, 2, 3], [4, 5, 6, 7]))
        return add(*halves)

    def _write_soften(self) -> Any:
        """Write soften(scores, total, first, end, least, seen, chosen, sink, cap): leave weights where
        the scores of positions [first, end) are, and their sum; 0.0 for those that are not seen.
        """
        index = self._index
        bytes_ = self._ir.IntType(8).as_pointer()
        kinds = [*[self._number] * 2, *[index] * 4, bytes_, self._number, self._number]
        function = self._begin("soften", kinds)
        scores, total, first, end, least, seen, chosen, sink, cap = function.args
        builder = self._builder
        begin = self._at(scores, builder.neg(first))
        with builder.if_then(builder.icmp_unsigned("!=", cap, cap.type(None))):
            self._each(first, end, EIGHT, lambda position: self._soft_cap(begin, cap, position))
        self._each(first, least, 1, lambda position: self._hide(self._at(begin, position)))
        self._each(seen, end, 1, lambda position: self._hide(self._at(begin, position)))
        with builder.if_then(builder.icmp_unsigned("!=", chosen, chosen.type(None))):
            self._each(
                first, end, EIGHT, lambda position: self._hide_unchosen(begin, chosen, position)
            )

        def rise(position: Any, peaks: Sequence[Any]) -> list[Any]:
            return [self._elementwise_max(self._load_eight(begin, position), peaks[0])]

        (peak,) = self._loop(first, end, EIGHT, [self._eight([-math.inf] * EIGHT)], rise)
        has_sink = builder.icmp_unsigned("!=", sink, sink.type(None))
        sink_place = builder.alloca(self._single)
        builder.store(self._single(-math.inf), sink_place)
        with builder.if_then(has_sink):
            builder.store(builder.load(sink), sink_place)
        sink_8 = self._broadcast(builder.load(sink_place), self._eight)
        peak = self._elementwise_max(self._reduce_lanes(peak, self._elementwise_max), sink_8)

        def weigh(position: Any, sums: Sequence[Any]) -> list[Any]:
            place = self._at(begin, position)
            weight = self._exp2(builder.fsub(self._load(place, self._eight), peak))
            self._store(weight, place)
            return [builder.fadd(sums[0], weight)]

        (sums,) = self._loop(first, end, EIGHT, [self._eight([0.0] * EIGHT)], weigh)
        sum_8 = self._reduce_lanes(sums, builder.fadd)
        sum_8 = builder.fadd(sum_8, self._exp2(builder.fsub(sink_8, peak)))
        builder.store(builder.extract_element(sum_8, self._int(0)), total)
        builder.ret_void()
        return function

    def _hide(self, place: Any) -> None:
        """Set one score to -inf."""
        self._builder.store(self._single(-math.inf), place)

    def _hide_unchosen(self, begin: Any, chosen: Any, position: Any) -> None:
        """Set those of eight scores to -inf whose bytes in `chosen` are 0."""
        place = self._at(begin, position)
        kind = self._ir.VectorType(self._ir.IntType(8), EIGHT)
        byte_8 = self._load(self._at(chosen, position), kind, 1)
        is_chosen = self._builder.icmp_unsigned("!=", byte_8, kind([0] * EIGHT))
        score = self._load(place, self._eight)
        hidden = self._eight([-math.inf] * EIGHT)
        self._store(self._builder.select(is_chosen, score, hidden), place)

    def _elementwise_max(self, left: Any, other: Any) -> Any:
        """Return the larger numbers of two registers, and a NaN of the first."""
        return self._builder.select(self._builder.fcmp_unordered(">", left, other), left, other)

    def _reduce_lanes(self, numbers: Any, join: Callable[[Any, Any], Any]) -> Any:
        """Return `join` over all eight numbers, in every lane."""
        for distance in (4, 2, 1):
            order = [lane ^ distance for lane in range(EIGHT)]
            numbers = join(numbers, self._shuffle(numbers, numbers, order))
        return numbers

    def _soft_cap(self, begin: Any, cap: Any, position: Any) -> None:
        """Replace eight scores by cap * tanh(score / cap), as exponents of 2.

        Computed as tanh(x) = 1 - 2 / (e^2x + 1).
        """
        builder = self._builder
        place = self._at(begin, position)
        score = self._load(place, self._eight)
        inner, outer = (self._broadcast_at(cap, which, self._eight) for which in (0, 1))
        limit = self._eight([-_LEAST_POWER] * EIGHT)
        power = builder.fmul(score, inner)
        power = builder.select(builder.fcmp_ordered(">", power, limit), limit, power)
        unit, two = (self._eight([number] * EIGHT) for number in (1.0, 2.0))
        part = builder.fdiv(two, builder.fadd(self._exp2(power), unit))
        self._store(builder.fmul(builder.fsub(unit, part), outer), place)

    def _exp2(self, exponent: Any) -> Any:
        """Return 2^x for eight numbers of at most 126, and 0.0 where that is below 2^-126.

        2^whole is put together from its bits, 2^rest is a Taylor series, with |rest| <= 0.5.
        """
        builder = self._builder
        least = self._eight([_LEAST_POWER] * EIGHT)
        is_small = builder.fcmp_ordered("<", exponent, least)
        bounded = builder.select(is_small, least, exponent)
        whole = builder.call(self._floor, [builder.fadd(bounded, self._eight([0.5] * EIGHT))])
        rest = builder.fsub(bounded, whole)
        terms = [math.log(2) ** nth / math.factorial(nth) for nth in range(_NUM_POWERS)]
        power = self._eight([_single(terms[-1])] * EIGHT)
        for term in reversed(terms[:-1]):
            power = self._fma(power, rest, self._eight([_single(term)] * EIGHT))
        integers = builder.call(self._to_integers, [whole])
        biased = builder.add(integers, self._words([127] * EIGHT))
        bits = builder.shl(biased, self._words([23] * EIGHT))
        scaled = builder.fmul(power, builder.bitcast(bits, self._eight))
        return builder.select(is_small, self._eight([0.0] * EIGHT), scaled)

    def _write_gather(self) -> Any:
        """Write gather(weight, weight, sum, sum, values, count, whole): add `count` values to the sums of
        two rows, one after the other, each times its weight.
        """
        kinds = [*[self._number] * 5, *[self._index] * 2]
        function = self._begin("gather", kinds)
        weight, second, left, other, values, count, whole = function.args
        registers = range(0, VALUE_STEP, EIGHT)

        def gather(lo: Any) -> None:
            places = [
                self._at(row, self._add(lo, register))
                for row in (left, other)
                for register in registers
            ]

            def add(at: Any, sums: Sequence[Any]) -> list[Any]:
                begin = self._at(values, self._add(self._times(at, whole), lo))
                numbers = [self._load_eight(begin, register) for register in registers]
                pair = [self._broadcast_at(row, at, self._eight) for row in (weight, second)]
                return self._fma_all(pair, numbers, sums)

            begun = [self._load(place, self._eight) for place in places]
            sums = self._loop(0, count, 1, begun, add)
            for place, number in zip(places, sums, strict=True):
                self._store(number, place)

        self._each(0, whole, VALUE_STEP, gather)
        self._builder.ret_void()
        return function

    def _write_attend(self) -> None:
        """Write attend(call, room): compute tiles, those of one set after the other."""
        index = self._index
        numbers = index.as_pointer()
        function = self._begin(NAME, [numbers, self._number])
        call, room = function.args
        kinds = {
            "query": self._number,
            "key": self._narrow,
            "value": self._narrow,
            "walk": self._columns,
            "least": numbers,
            "chosen": self._ir.IntType(8).as_pointer(),
            "sink": self._number,
            "span": numbers,
            "out": self._number,
            "cap": self._number,
        }
        values = self._arguments(call, [kinds.get(name, index) for name in FIELDS])
        fields = dict(zip(FIELDS, values, strict=True))
        rounded_up = self._builder.add(fields["num_rows"], self._add(fields["tile_rows"], -1))
        num_tiles = self._builder.udiv(rounded_up, fields["tile_rows"])

        def attend(part: Any) -> None:
            nth_set = self._builder.udiv(part, num_tiles)
            nth_tile = self._builder.urem(part, num_tiles)
            self._compute_tile(fields, self._tile(fields, room, nth_set, nth_tile))

        self._share_parts(call, attend)
        self._builder.ret_void()

    def _tile(self, fields: Mapping[str, Any], room: Any, nth_set: Any, nth_tile: Any) -> _Tile:
        """Return a tile: its rows, and its scratch memory within `room`."""
        at, times = self._at, self._times
        first_row = times(nth_tile, fields["tile_rows"])
        left = self._builder.sub(fields["num_rows"], first_row)
        num_rows = self._min(fields["tile_rows"], left)
        num_queries = times(num_rows, fields["set_heads"])
        begin = self._builder.add(times(nth_set, fields["num_rows"]), first_row)
        scores = at(room, times(self._max(fields["whole"], fields["value_whole"]), BLOCK))
        sums = at(scores, times(num_queries, fields["score_row"]))
        return _Tile(
            first_row,
            num_rows,
            num_queries,
            first_head=times(nth_set, fields["set_heads"]),
            group=self._builder.udiv(nth_set, fields["sets"]),
            query=at(fields["query"], times(times(begin, fields["set_heads"]), fields["whole"])),
            first=self._builder.load(at(fields["span"], times(nth_tile, 2))),
            end=self._builder.load(at(fields["span"], self._add(times(nth_tile, 2), 1))),
            block=room,
            scores=scores,
            sums=sums,
            totals=at(sums, times(num_queries, fields["value_whole"])),
        )

    def _compute_tile(self, fields: Mapping[str, Any], tile: _Tile) -> None:
        """Compute one tile, see the module."""
        keys = self._states(fields, tile, "key", fields["width"], fields["whole"])
        values = self._states(fields, tile, "value", fields["value_width"], fields["value_whole"])
        scored = _PairRows(self._score, tile.query, fields["whole"])
        gathered = _PairRows(self._gather, tile.sums, fields["value_whole"])
        score = partial(self._on_pair, fields, tile, scored)
        gather = partial(self._on_pair, fields, tile, gathered)
        self._each_block(fields, tile, keys, score)
        self._each(0, tile.num_queries, 1, lambda query: self._soften_query(fields, tile, query))
        self._clear_sums(fields, tile)
        self._each_block(fields, tile, values, gather)
        self._each(0, tile.num_queries, 1, lambda query: self._write_mean(fields, tile, query))

    def _states(
        self, fields: Mapping[str, Any], tile: _Tile, name: str, width: Any, whole: Any
    ) -> _States:
        """Return the keys or values of the tile's group."""
        begin = self._times(tile.group, fields[f"{name}_group"])
        return _States(self._at(fields[name], begin), fields[f"{name}_row"], width, whole)

    def _on_pair(
        self,
        fields: Mapping[str, Any],
        tile: _Tile,
        rows: "_PairRows",
        pair: Sequence[Any],
        position: Any,
        count: Any,
    ) -> None:
        """Score two queries for `count` keys of the block, or gather as many values for them.

        The block begins at `position`.
        """
        column = self._builder.sub(position, tile.first)
        scores = self._addresses(tile.scores, fields["score_row"], pair)
        places = [self._at(row, column) for row in scores]
        begins = self._addresses(rows.begin, rows.step, pair)
        self._builder.call(rows.function, [*places, *begins, tile.block, count, rows.step])

    def _addresses(self, begin: Any, step: Any, pair: Sequence[Any]) -> list[Any]:
        """Return the addresses of two queries' numbers, `step` numbers for each query."""
        return [self._at(begin, self._times(query, step)) for query in pair]

    def _clear_sums(self, fields: Mapping[str, Any], tile: _Tile) -> None:
        def clear(number: Any) -> None:
            self._store(self._eight([0.0] * EIGHT), self._at(tile.sums, number))

        self._each(0, self._times(tile.num_queries, fields["value_whole"]), EIGHT, clear)

    def _each_block(
        self, fields: Mapping[str, Any], tile: _Tile, states: _States, work: _WorkOnPair
    ) -> None:
        """Widen blocks of keys or values, and do work with each and all queries that see it."""

        def shared(position: Any) -> None:
            count = self._index(BLOCK)
            self._widen_block(tile, states, position, self._columns(None), count)
            pairs = (self._index(0), tile.num_queries)
            self._each_pair(*pairs, lambda pair: work(pair, position, count))

        self._each(tile.first, tile.end, BLOCK, shared)
        self._each(
            0,
            tile.num_rows,
            1,
            lambda row: self._each_block_of_row(fields, tile, states, row, work),
        )

    def _each_block_of_row(
        self,
        fields: Mapping[str, Any],
        tile: _Tile,
        states: _States,
        row: Any,
        work: _WorkOnPair,
    ) -> None:
        """Do the same for blocks behind `base`, with the queries of one row of the tile."""
        builder = self._builder
        nth_row = builder.add(tile.first_row, row)
        base = self._walk_entry(fields, nth_row, 1)
        seen = self._walk_entry(fields, nth_row, 0)
        least = builder.load(self._at(fields["least"], nth_row))
        lo = self._times(row, fields["set_heads"])
        hi = builder.add(lo, fields["set_heads"])
        walk = self._at(fields["walk"], self._times(nth_row, fields["walk_row"]))

        def own_block(position: Any) -> None:
            count = self._min(self._index(BLOCK), builder.sub(seen, position))
            columns = self._at(walk, self._add(builder.sub(position, base), HEADER))
            self._widen_block(tile, states, self._index(0), columns, count)
            self._each_pair(lo, hi, lambda pair: work(pair, position, count))

        start = self._max(base, builder.and_(least, self._index(-BLOCK)))
        self._each(start, seen, BLOCK, own_block)

    def _widen_block(
        self, tile: _Tile, states: _States, first: Any, columns: Any, count: Any
    ) -> None:
        """Widen `count` rows of keys or values into the tile's block, see `_write_widen`."""
        begin, row_step, width, whole = states
        arguments = [tile.block, begin, row_step, first, columns, count, width, whole]
        self._builder.call(self._widen, arguments)

    def _each_pair(self, lo: Any, hi: Any, work: Callable[[Sequence[Any]], None]) -> None:
        """Do work with queries [lo, hi) in pairs; an odd last one is paired with itself."""
        last = self._add(hi, -1)
        self._each(lo, hi, 2, lambda query: work((query, self._min(self._add(query, 1), last))))

    def _soften_query(self, fields: Mapping[str, Any], tile: _Tile, query: Any) -> None:
        """Turn the scores of one query into weights, and note their total."""
        nth_row, nth_head = self._row_and_head(fields, tile, query)
        seen = self._walk_entry(fields, nth_row, 0)
        last = self._builder.and_(self._add(seen, EIGHT - 1), self._index(-EIGHT))
        scores = self._at(tile.scores, self._times(query, fields["score_row"]))
        least = self._builder.load(self._at(fields["least"], nth_row))
        chosen = self._at(fields["chosen"], self._times(nth_row, fields["chosen_row"]))
        sink = self._at(fields["sink"], self._times(nth_head, fields["sink_step"]))
        span = [tile.first, self._max(tile.end, last), least, seen]
        total = self._at(tile.totals, query)
        self._builder.call(self._soften, [scores, total, *span, chosen, sink, fields["cap"]])

    def _write_mean(self, fields: Mapping[str, Any], tile: _Tile, query: Any) -> None:
        """Write the weighted mean of values for one query to `out`."""
        nth_row, nth_head = self._row_and_head(fields, tile, query)
        nth_mean = self._builder.add(self._times(nth_row, fields["num_heads"]), nth_head)
        out = self._at(fields["out"], self._times(nth_mean, fields["value_whole"]))
        sums = self._at(tile.sums, self._times(query, fields["value_whole"]))
        total = self._broadcast_at(tile.totals, query, self._eight)

        def divide(column: Any) -> None:
            mean = self._builder.fdiv(self._load_eight(sums, column), total)
            self._store(mean, self._at(out, column))

        self._each(0, fields["value_whole"], EIGHT, divide)

    def _row_and_head(self, fields: Mapping[str, Any], tile: _Tile, query: Any) -> tuple[Any, Any]:
        """Return the row of the pass and the head of a query."""
        nth_row = self._builder.udiv(query, fields["set_heads"])
        nth_head = self._builder.urem(query, fields["set_heads"])
        return (
            self._builder.add(tile.first_row, nth_row),
            self._builder.add(tile.first_head, nth_head),
        )

    def _walk_entry(self, fields: Mapping[str, Any], row: Any, which: int) -> Any:
        """Return number `which` of a row's walk: 0 the positions that it sees, 1 `base`."""
        place = self._add(self._times(row, fields["walk_row"]), which)
        return self._builder.sext(self._builder.load(self._at(fields["walk"], place)), self._index)


def _single(number: float) -> float:
    """Return the nearest float32."""
    return float(np.float32(number))
