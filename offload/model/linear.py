"""The products with a model's matrices, chosen once when a model is loaded.

Modules of ours replace a library's `nn.Linear` children, with the same parameters, and modules
around routers and the like give them their rows. All of them use one `Products`: the library's,
wide ones if a processor lacks instructions (`wide_products.py`), or batch-invariant ones
(`invariant.py`). A quantised matrix does its own product (`StoredMatrix`).
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn import functional

from offload.memory.sizes import INNER_ROWS

_MATRIX_DIMENSIONS = 2
_EPS_NAMES = ("variance_epsilon", "eps")


class Products:
    """Products as the library makes them.

    Attributes:
        is_invariant: a row's bits depend on no row beside it.
    """

    is_invariant = False

    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return rows (..., K) times the transposed weight (N, K), as `functional.linear`."""
        return functional.linear(rows, weight, bias)

    def multiply(self, product: Callable[..., Tensor], left: Tensor, right: Tensor) -> Tensor:
        """Return the result of `product` (`torch.matmul` or the like) for both factors."""
        return product(left, right)

    def run_by_row(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run a module of the library that mixes no rows of its first argument."""
        return module(*args, **kwargs)

    def widen(self, rows: Tensor) -> Tensor:
        """Return the product of a gate that its family widens to float32."""
        return rows

    def during(self, num_rows: int) -> AbstractContextManager[Any]:
        """Return the context to enter around a pass of `num_rows` rows."""
        return nullcontext()


PLAIN = Products()


class StoredMatrix(Protocol):
    """A matrix (N, K) in its stored form."""

    def matmul(self, rows: Tensor, products: Products, bias: Tensor | None) -> Tensor:
        """Return rows (..., K) times the transposed matrix, plus the bias."""


class Linear(nn.Linear):
    """The product with one matrix; it has the parameters of the module that it replaces.

    Attributes:
        products: compute it.
        stored: the matrix in its stored form, if any; `weight` is empty then.
    """

    def __init__(self, replaced: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features = replaced.in_features
        self.out_features = replaced.out_features
        self.weight = replaced.weight
        self.register_parameter("bias", replaced.bias)
        self.products: Products = PLAIN
        self.stored: StoredMatrix | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Return (..., N)."""
        return self.matmul(input)

    def matmul(self, rows: Tensor) -> Tensor:
        """Return rows (..., K) times the transposed matrix (N, K), and the bias."""
        parameters = self._parameters
        if self.stored is not None:
            return self.stored.matmul(rows, self.products, parameters["bias"])
        weight = parameters["weight"]
        assert weight is not None, "a product has a matrix"
        return self.products.linear(rows, weight, parameters["bias"])


class WidenedGate(Linear):
    """A product that its family widens to float32, see `families/types.py`."""

    def forward(self, input: Tensor) -> Tensor:
        """Return (..., N), in the type of the rows or in float32."""
        return self.products.widen(self.matmul(input))


class Around(nn.Module):
    """A module around another one, with its parameters and children under their names.

    Any other attribute is the inner module's.
    """

    inner: nn.Module

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._parameters = inner._parameters
        self._buffers = inner._buffers
        self._non_persistent_buffers_set = inner._non_persistent_buffers_set
        self._modules = inner._modules
        # not a child, which would change parameters' names
        vars(self)["inner"] = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(vars(self)["inner"], name)


class ByRow(Around):
    """A module of the library that mixes no rows, and does its own product."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.products: Products = PLAIN

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the inner module's output for these rows."""
        return self.products.run_by_row(self.inner, *args, **kwargs)


def inner_of(module: nn.Module) -> nn.Module:
    """Return the library's module inside one of ours, or the module itself."""
    return module.inner if isinstance(module, Around) else module


def replace_linears(model: nn.Module, gates: tuple[str, ...] = ()) -> None:
    """Replace every plain `nn.Linear` of a model by `Linear`.

    `gates` are the names of those that the family widens to float32.
    """
    made = dict[nn.Module, Linear]()
    for name, module in [*model.named_modules(remove_duplicate=False)]:
        if is_plain_linear(module):
            kind = WidenedGate if name.endswith(gates) else Linear
            made.setdefault(module, kind(module))
            replace_child(model, name, made[module])


def is_plain_linear(module: nn.Module) -> bool:
    """Return True if a module's forward is `nn.Linear`'s own; routers may be derived from it."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def replace_child(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the module of this dotted name."""
    around, _, own_name = name.rpartition(".")
    model.get_submodule(around)._modules[own_name] = module


def wrap_by_row(model: nn.Module, *, has_sums: bool) -> None:
    """Put modules around those that mix no rows and do their own product.

    They are told by a matrix that no `Linear` has, and routers by their output. With `has_sums`, a
    device sums in an order that depends on the number of rows, and norms are included.
    """
    wrapped: tuple[str, ...] = ()
    for name, module in [*model.named_modules()]:
        is_sum = has_sums and eps_of(module) is not None and not list(module.children())
        if name.startswith(wrapped) or not (is_sum or multiplies_by_row(module)):
            continue
        wrapped += (f"{name}.",)
        replace_child(model, name, ByRow(module))


def multiplies_by_row(module: nn.Module) -> bool:
    """Return True if a module's only product is with a matrix of its own."""
    # a stack of matrices belongs to experts or a recurrence
    is_stack = any(
        tensor is not None and tensor.ndim > _MATRIX_DIMENSIONS
        for tensor in module._parameters.values()
    )
    others = (nn.Linear, nn.Embedding, nn.Conv1d)
    has_others = any(
        isinstance(inner, others) and not _is_router(inner) for inner in module.modules()
    )
    return bool(own_matrices(module)) and not is_stack and not has_others


def _is_router(module: nn.Module) -> bool:
    """Return True if a module derives from the library's linear one and does more."""
    return isinstance(module, nn.Linear) and not isinstance(module, Linear)


def own_matrices(module: nn.Module) -> list[Tensor]:
    """Return the matrices among a module's own parameters."""
    parameters = module._parameters.values()
    return [
        parameter
        for parameter in parameters
        if parameter is not None and parameter.ndim == _MATRIX_DIMENSIONS
    ]


def eps_of(module: nn.Module) -> float | None:
    """Return the epsilon of a norm, None if a module has none."""
    numbers = (getattr(module, name) for name in _EPS_NAMES if hasattr(module, name))
    number = next(numbers, None)
    return number if isinstance(number, float) else None


def choose_products(model: nn.Module, products: Products) -> None:
    """Multiply by all matrices of a model with these products from now on."""
    for module in model.modules():
        if hasattr(module, "products"):
            setattr(module, "products", products)  # noqa: B010


_MATRICES = ("gate_proj", "up_proj", "gate_up_proj")


class InParts(Around):
    """A feed-forward that takes wide passes in parts.

    Between its matrices it would hold three times its width for each of a prompt's thousands of
    rows, memory that a plan would have to keep free in every pass. So rows pass in parts, as many
    as one product has at most on a CPU. Invariant: a row's result is that of all rows at once, as
    far as products give a row the same bits whatever rows are beside it.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the output of the inner feed-forward."""
        num_rows = hidden_states.shape[-2]
        if num_rows <= INNER_ROWS:
            return self.inner(hidden_states)
        first = self.inner(hidden_states[..., :INNER_ROWS, :])
        out = first.new_empty(hidden_states.shape)
        out[..., :INNER_ROWS, :] = first
        for lo in range(INNER_ROWS, num_rows, INNER_ROWS):
            some_rows = slice(lo, lo + INNER_ROWS)
            out[..., some_rows, :] = self.inner(hidden_states[..., some_rows, :])
        return out


def take_rows_in_parts(layers: Iterable[nn.Module]) -> None:
    """Replace the plain feed-forwards of these layers by `InParts`."""
    for layer in layers:
        if is_plain(layer):
            inner: Any = layer.mlp
            replace_child(layer, "mlp", InParts(inner))


def is_plain(layer: nn.Module) -> bool:
    """Return True if a feed-forward consists of matrices alone, and takes nothing but rows."""
    inner = getattr(layer, "mlp", None)
    if not isinstance(inner, nn.Module):
        return False
    children = dict(inner.named_children())
    has_matrices = "down_proj" in children and any(name in children for name in _MATRICES)
    others = [child for child in children.values() if not isinstance(child, Linear)]
    is_bare = not any(True for child in others for _ in child.parameters())
    return has_matrices and is_bare and len(signature(inner.forward).parameters) == 1
