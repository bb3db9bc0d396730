"""Root-mean-square norms of a Hugging Face model, found by what they compute.

Families write the same norm in a few forms. A module's form is found on numbers: its own code and
the reference of a form must give the same bits, in half precision, where the forms round
differently.
"""

from collections.abc import Callable
from copy import copy
from inspect import signature

import torch
from torch import Tensor, nn

from offload.kernels.rms_norm import FORMS, NormForm, rms_norm_reference
from offload.model.linear import Around, eps_of, inner_of, replace_child

# `rms_norm_kernel` or its reference
Normalize = Callable[..., Tensor]
# width of the rows that try norms without a weight, which take any width
_WIDTH_WITHOUT_WEIGHT = 64
_NUM_ROWS = 16


def find_norms(model: nn.Module) -> list[tuple[nn.Module, NormForm]]:
    """Return a model's norms of known forms, with or without loaded weights."""
    norms = list[tuple[nn.Module, NormForm]]()
    form_of = dict[object, NormForm | None]()
    for module in map(inner_of, model.modules()):
        weight = getattr(module, "weight", None)
        is_other = set(dict(module.named_parameters())) - {"weight"} or list(module.children())
        if eps_of(module) is None or is_other or (weight is not None and weight.ndim != 1):
            continue
        kind = (type(module), None if weight is None else weight.shape[-1])
        if kind not in form_of:
            form_of[kind] = _form_of(module)
        form = form_of[kind]
        if form is not None:
            norms.append((module, form))
    return norms


class KernelNorm(Around):
    """A norm that a kernel computes; rows of another type than its weight are left to the library's."""

    def __init__(self, inner: nn.Module, form: NormForm, normalize: Normalize) -> None:
        super().__init__(inner)
        self._form = form
        self._normalize = normalize
        self._eps = eps_of(inner)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the rows, each divided by its root mean square."""
        weight = self._parameters.get("weight")
        if weight is not None and weight.dtype != rows.dtype:
            return self.inner(rows)
        return self._normalize(rows, weight, self._eps, self._form)


def set_norm_kernel(model: nn.Module, normalize: Normalize | None) -> None:
    """Make `normalize` compute every norm of a known form; None leaves the library's code."""
    if normalize is None:
        return
    names = {inner_of(module): name for name, module in model.named_modules()}
    for module, form in find_norms(model):
        # a kernel gives a row the same bits by itself
        replace_child(model, names[module], KernelNorm(module, form, normalize))


@torch.inference_mode()
def _form_of(module: nn.Module) -> NormForm | None:
    """Find the form on made-up rows and a made-up weight."""
    # what takes a gate beside its rows is another function wherever it is given one
    if len(signature(type(module).forward).parameters) != len(("self", "rows")):
        return None
    chance = torch.Generator().manual_seed(0)
    weight = getattr(module, "weight", None)
    width = _WIDTH_WITHOUT_WEIGHT if weight is None else weight.shape[-1]
    rows = torch.randn(_NUM_ROWS, width, generator=chance).bfloat16()
    weight_D = torch.randn(width, generator=chance).bfloat16()
    sample = copy(module)
    eps = eps_of(module)
    assert eps is not None, "a norm has one"
    made_up = None if weight is None else nn.Parameter(weight_D, requires_grad=False)
    sample._parameters = dict.fromkeys(module._parameters, made_up)
    try:
        wanted = type(module).forward(sample, rows)
    # a module of another kind that happens to have such a number
    except Exception:
        return None
    factor_D = None if weight is None else weight_D
    same = [
        form for form in FORMS if torch.equal(rms_norm_reference(rows, factor_D, eps, form), wanted)
    ]
    return same[0] if same else None
