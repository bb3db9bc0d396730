"""The matrices of a model, and how rows are multiplied by them: chosen once, as a model is loaded.

A library's `nn.Linear` children are replaced by modules of our own with the same parameters, and
what a family multiplies otherwise (routers) is given its rows by a module around it. All of them
ask one `Products`: those of the library, wide ones where a processor lacks instructions
(`wide_products.py`), or such that a row's bits depend on no row beside it (`invariant.py`). A matrix
that is held as it is stored multiplies by itself (`StoredMatrix`).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn import functional

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
        """Run a module of the library that does nothing across rows, the first argument's."""
        return module(*args, **kwargs)

    def widen(self, rows: Tensor) -> Tensor:
        """Return the product of a gate, which a family widens to float32 before it does more."""
        return rows

    def during(self, num_rows: int) -> AbstractContextManager[Any]:
        """Return the context to enter around a pass of `num_rows` rows."""
        return nullcontext()


PLAIN = Products()


class StoredMatrix(Protocol):
    """A matrix (N, K) that is held as it is stored."""

    def matmul(self, rows: Tensor, products: Products, bias: Tensor | None) -> Tensor:
        """Return rows (..., K) times the transposed matrix, with the bias added."""


class Linear(nn.Linear):
    """The product with one matrix; its parameters are those of the module that it replaces.

    Attributes:
        products: how it is made.
        stored: the matrix where it is held otherwise than as `weight`, which is empty then.
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
    """A product that its family widens to float32 before it does more, see `families/types.py`."""

    def forward(self, input: Tensor) -> Tensor:
        """Return (..., N), in the type of the rows or in float32."""
        return self.products.widen(self.matmul(input))


class Around(nn.Module):
    """A module that stands for another one: it has its parameters and children, under their names.

    What is asked of it beside is the inner module's.
    """

    inner: nn.Module

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._parameters = inner._parameters
        self._buffers = inner._buffers
        self._non_persistent_buffers_set = inner._non_persistent_buffers_set
        self._modules = inner._modules
        # no child, which would have another name
        vars(self)["inner"] = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(vars(self)["inner"], name)


class ByRow(Around):
    """A module of the library that does nothing across rows, and multiplies by itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.products: Products = PLAIN

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the inner module's output for these rows."""
        return self.products.run_by_row(self.inner, *args, **kwargs)


def inner_of(module: nn.Module) -> nn.Module:
    """Return the library's module where one of ours stands around it, else the module itself."""
    return module.inner if isinstance(module, Around) else module


def replace_linears(model: nn.Module, gates: tuple[str, ...] = ()) -> None:
    """Replace every module that does what `nn.Linear` does and nothing else.

    `gates` are the names of those that the family widens to float32.
    """
    made = dict[nn.Module, Linear]()
    for name, module in [*model.named_modules(remove_duplicate=False)]:
        if is_plain_linear(module):
            kind = WidenedGate if name.endswith(gates) else Linear
            made.setdefault(module, kind(module))
            replace_child(model, name, made[module])


def is_plain_linear(module: nn.Module) -> bool:
    """Tell whether a module does what `nn.Linear` does; routers may be derived from it."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def replace_child(model: nn.Module, name: str, module: nn.Module) -> None:
    """Let another module stand under this name, with all its dots."""
    around, _, own_name = name.rpartition(".")
    model.get_submodule(around)._modules[own_name] = module


def wrap_by_row(model: nn.Module, *, has_sums: bool) -> None:
    """Put modules around what does nothing across rows and multiplies by itself.

    These are told by a matrix of their own that no `Linear` has, and routers by what they return.
    Where `has_sums`, a device adds up by the number of rows, and norms are among them.
    """
    wrapped: tuple[str, ...] = ()
    for name, module in [*model.named_modules()]:
        is_sum = has_sums and eps_of(module) is not None and not list(module.children())
        if name.startswith(wrapped) or not (is_sum or multiplies_by_row(module)):
            continue
        wrapped += (f"{name}.",)
        replace_child(model, name, ByRow(module))


def multiplies_by_row(module: nn.Module) -> bool:
    """Tell whether a module multiplies by a matrix of its own, and does nothing else of that kind."""
    # a stack of matrices is that of experts or of a recurrence
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
    """Tell whether a module is derived from the library's linear one and does more."""
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
    """Return the epsilon of a norm, None where a module has no such number."""
    numbers = (getattr(module, name) for name in _EPS_NAMES if hasattr(module, name))
    number = next(numbers, None)
    return number if isinstance(number, float) else None


def choose_products(model: nn.Module, products: Products) -> None:
    """Let all matrices of a model be multiplied so from now on."""
    for module in model.modules():
        if hasattr(module, "products"):
            setattr(module, "products", products)  # noqa: B010
