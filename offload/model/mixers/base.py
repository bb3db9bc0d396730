"""The base of mixers: their place in a layer, their convolution, and how states advance.

A mixer carries information from earlier rows in a state. A library's mixer follows one chain of
tokens, so a module of ours replaces it in the layer: it has the same children and parameters under
the same names, and follows the trees of a pass (`PassCache.running`). Projections, norms and gates
that mix no rows stay the library's modules. Invariant: everything that a mixer does across rows
goes through `convolve` and `scan`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from offload.checkpoint.spec import RecurrentLayer
from offload.kernels.gated_delta import AFTER
from offload.memory.sizes import STEPPED_STATES_BYTES
from offload.model.invariant import in_whole_vectors
from offload.model.library import ACT2FN
from offload.model.linear import PLAIN, Products
from offload.model.parts import BatchPart, running_parts

RowInputs = dict[str, Tensor]  # (T, ...) each
Stepped = tuple[Tensor, Tensor]  # outputs of rows, and states after them


class Steps(NamedTuple):
    """The steps that rows take, ordered so that few states are alive, see `RowTree.slots`."""

    step_R3: Tensor
    num_slots: int
    is_kept: bool  # whether any step leaves its state in `AFTER`

    @classmethod
    def from_rows(cls, steps: Sequence[tuple[int, int, int]]) -> "Steps":
        """Return steps of rows, each with the slot of the state before it and its own."""
        targets = [target for _, _, target in steps]
        return cls(torch.tensor(steps), max([0, *targets]) + 1, AFTER in targets)


LEAST_CHUNK = 16  # rows: fewer are as fast one by one
CHUNK_FLOATS = 5 * 64  # numbers of each row and head, while a prompt is read in chunks of 64 rows


class Inputs(NamedTuple):
    """The inputs that rows bring to a recurrence."""

    rows: RowInputs
    fixed: RowInputs  # shared by all rows, no view of a weight

    @property
    def num_rows(self) -> int:
        return next(iter(self.rows.values())).shape[0]

    def part(self, some: slice | Tensor) -> "Inputs":
        """Return the inputs of some rows."""
        return self._replace(rows={name: row_T[some] for name, row_T in self.rows.items()})


class Recurrence(ABC):
    """The update rule of states. It has sizes but no weights, so `commit` needs none.

    A step uses the operations of the library's function for one token, with the rows of one level
    of a tree as its batch.

    Attributes:
        products: multiply outputs, see `Mixer`.
    """

    products: Products = PLAIN

    @abstractmethod
    def start(self, inputs: Inputs) -> Tensor:
        """Return the state before any row, (1, ...), in float32."""

    @abstractmethod
    def prepare(self, inputs: Inputs) -> RowInputs:
        """Return the inputs of `advance` and `read` for all rows, computed at once."""

    @abstractmethod
    def advance(self, state: Tensor, ready: RowInputs) -> Tensor:
        """Return new states (W, ...) of W rows, one from each given state, which is not changed."""

    @abstractmethod
    def read(self, state: Tensor, ready: RowInputs) -> Tensor:
        """Return the outputs (W, ...) of W rows from the states after them."""

    def run(self, state: Tensor, inputs: Inputs, *, is_exact: bool) -> Stepped:
        """Return outputs (T, ...) and the last state (1, ...) of a chain of T rows.

        `is_exact` asks for the arithmetic of single steps.
        """
        is_by_steps = is_exact or inputs.num_rows < LEAST_CHUNK
        return (self._by_steps if is_by_steps else self._together)(state, inputs)

    def _together(self, state: Tensor, inputs: Inputs) -> Stepped:
        """Run as `run` does, in the fastest way for many rows."""
        return self._by_steps(state, inputs)

    def _by_steps(self, state: Tensor, inputs: Inputs) -> Stepped:
        """Advance a state row by row, and read the outputs of some rows' states at once."""
        at_once = max(1, STEPPED_STATES_BYTES // state.nbytes)
        outs = list[Tensor]()
        for lo in range(0, inputs.num_rows, at_once):
            ready = self.prepare(inputs.part(slice(lo, lo + at_once)))
            states = list[Tensor]()
            for values in zip(*(row_T.split(1) for row_T in ready.values()), strict=True):
                state = self.advance(state, dict(zip(ready, values, strict=True)))
                states.append(state)
            outs.append(self.read(joined(states), ready))
        return joined(outs), state

    def walks(self, device: torch.device) -> bool:
        """Return True if `walk` is better than step after step."""
        return False

    def walk(self, state: Tensor, inputs: Inputs, steps: Steps) -> Stepped:
        """Return outputs (T, ...) of the rows that take a step, and the kept state."""
        raise NotImplementedError


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return the concatenation of tensors; a single one is returned itself."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


class Mixer(nn.Module, ABC):
    """A mixer that takes over the parameters of a library's.

    Attributes:
        REQUIRED, OPTIONAL: names of parameters by which the library's module is recognised.
        READ: names of children that are not called, since their parameters are read here.
        layer_idx: the number of its layer, by which caches store its states.
        products: do its own products, see `choose_products`.
    """

    REQUIRED: ClassVar[frozenset[str]]
    OPTIONAL: ClassVar[frozenset[str]] = frozenset()
    READ: ClassVar[frozenset[str]] = frozenset({"conv1d"})

    def __init__(self, source: nn.Module, _: Any, layer: int) -> None:
        super().__init__()
        for name, child in source.named_children():
            self.add_module(name, child)
        for name, parameter in source.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        self.layer_idx = layer
        self.products: Products = PLAIN
        self.train(source.training)

    if TYPE_CHECKING:
        # children and parameters are those of the replaced module
        def __getattr__(self, name: str) -> Any: ...

    @classmethod
    def fits(cls, shapes: dict[str, torch.Size]) -> bool:
        """Return True if a module with these parameters is of this kind."""
        return cls.REQUIRED <= shapes.keys() <= cls.REQUIRED | cls.OPTIONAL

    @abstractmethod
    def sizes(self) -> RecurrentLayer:
        """Return the numbers that caches and passes hold of this layer."""

    @abstractmethod
    def mix(self, hidden_1TD: Tensor) -> Tensor:
        """Return the outputs (1, T, D) of all rows of the pass."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        """Do what the library's module does; its caches and masks are not needed."""
        assert running_parts()[-1].rows.stop == hidden_states.shape[1], "all rows of the pass"
        return self.mix(hidden_states)

    def convolve(self, input_TC: Tensor, convolution: Any, activation: str | None = None) -> Tensor:
        """Return (T, C): each row's sum over the last inputs on its path, weighted by the taps."""
        weight_CR = convolution.weight[:, 0]
        outs = [
            _states_of(part).convolve(
                self.layer_idx, part.states, input_TC[part.rows], weight_CR, convolution.bias
            )
            for part in running_parts()
        ]
        out_TC = joined(outs)
        if activation is not None:
            out_TC = in_whole_vectors(_activation(activation), out_TC)
        return out_TC.to(input_TC.dtype)

    def scan(self, recurrence: Recurrence, inputs: Inputs) -> Tensor:
        """Return the outputs (T, ...) of all rows, each from its parent's state."""
        recurrence.products = self.products
        parts = running_parts()
        if len(parts) == 1:
            return _states_of(parts[0]).scan(self.layer_idx, parts[0].states, recurrence, inputs)
        return torch.cat(
            [
                _states_of(part).scan(
                    self.layer_idx, part.states, recurrence, inputs.part(part.rows)
                )
                for part in parts
            ]
        )

    def positions(self) -> Tensor:
        """Return the positions (T) of the rows, on the host."""
        return torch.cat([part.position_U[-len(part.token_T) :] for part in running_parts()])


class PairMixer(Mixer):
    """A mixer whose layer also expects attention weights in its output, and ignores them."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        """See `Mixer`."""
        return super().forward(hidden_states), None


@cache
def _activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return the library's activation of this name, cached for all layers and passes."""
    return ACT2FN[name]


def _states_of(part: BatchPart) -> Any:
    """Return a text's cache, a `RecurrentCache` if layers have states."""
    return part.cache


def num_of(config: Any, *names: str) -> int:
    """Return the first of these numbers that config.json has.

    Raises `KeyError` for none, and `ValueError` for one that counts nothing.
    """
    given = ((name, getattr(config, name, None)) for name in names)
    name, number = next((pair for pair in given if isinstance(pair[1], int)), (names[0], None))
    if number is None:
        raise KeyError(name)
    if number < 1:
        raise ValueError(f"{name} in config.json must be above 0, got {number}")
    return number


def require_multiple(many: str, num_many: int, few: str, num_few: int) -> None:
    """Raise `ValueError` if heads cannot be shared evenly among groups."""
    if num_many % num_few:
        requirement = f"{many} in config.json must be a multiple of {few}"
        raise ValueError(f"{requirement}, got {num_many} and {num_few}")
