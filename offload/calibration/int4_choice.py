"""Up to how many rows a draft's products with packed weights are faster here than what would run without them.

Not every processor has these products, or vector instructions for them. Invariant: what is wrong, or refuses, is not
used, and a number of rows counts only if all smaller ones did.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from offload.calibration.host_timer import host_seconds
from offload.calibration.kernel_comparison import Comparison, Timer, fight, verdicts
from offload.kernels.int4_product import int4_linear, int4_linear_reference, pack_int4
from offload.kernels.int8_product import Int8Weight, int8_linear, int8_linear_reference

NUM_ROWS = (1, 2, 4, 8, 16, 32)
_NUM_OUT, _NUM_IN, _GROUP = 1024, 2048, 128  # as bfloat16 more than most caches keep for one core
_TOLERANCE = 2e-2  # of half precision, relative to the largest product
Product = Callable[[Tensor], Tensor]


def int4_rows(
    dtype: torch.dtype, without: Callable[[Tensor], Product] | None = None, timer: Timer = host_seconds
) -> int:
    """Up to so many rows torch's product with 4-bit weights is right and faster; 0: it is not to be used.

    Args:
        without: from weights (N, K) of that type what would run in its place; plain products where it is not given.
    """
    random = torch.Generator().manual_seed(0)
    code_NK = torch.randint(0, 16, (_NUM_OUT, _NUM_IN), generator=random)
    zero_NG = torch.randint(6, 10, (_NUM_OUT, _NUM_IN // _GROUP), generator=random)
    scale_NG = (torch.rand(zero_NG.shape, generator=random) + 0.5).to(dtype)
    reference = partial(int4_linear_reference, code_NK=code_NK, scale_NG=scale_NG, zero_NG=zero_NG)
    weight_NK = reference(torch.eye(_NUM_IN)).t().to(dtype).contiguous()

    def product(x: Tensor) -> Tensor:
        return int4_linear(x, packed[0])

    packed = []
    try:
        packed.append(pack_int4(code_NK, scale_NG, zero_NG, dtype))
    except (RuntimeError, AttributeError):  # this torch has it for other processors only, or no longer
        return 0
    return _rows_won(product, reference, (without or _plain)(weight_NK), dtype, timer)


def int8_rows(
    dtype: torch.dtype, without: Callable[[Tensor], Product] | None = None, timer: Timer = host_seconds
) -> int:
    """The same of 8-bit weights with one scale a row."""
    random = torch.Generator().manual_seed(0)
    code_NK = torch.randint(-127, 128, (_NUM_OUT, _NUM_IN), generator=random).to(torch.int8)
    weight = Int8Weight(code_NK, (torch.rand(_NUM_OUT, generator=random) + 0.5).to(dtype))
    weight_NK = (code_NK.float() * weight.scale_N.float()[:, None]).to(dtype)
    product = partial(int8_linear, weight=weight, num_few=max(NUM_ROWS))
    reference = partial(int8_linear_reference, weight=weight)
    return _rows_won(product, reference, (without or _plain)(weight_NK), dtype, timer)


def _plain(weight_NK: Tensor) -> Product:
    return partial(torch.nn.functional.linear, weight=weight_NK)


def _rows_won(product: Product, reference: Product, rival: Product, dtype: torch.dtype, timer: Timer) -> int:
    won = 0
    for num_rows in NUM_ROWS:
        x = torch.randn(num_rows, _NUM_IN, generator=torch.Generator().manual_seed(num_rows)).to(dtype)

        def agrees(x: Tensor = x) -> bool:
            got, wanted = product(x).float(), reference(x).float()
            return bool(((got - wanted).abs() <= _TOLERANCE * wanted.abs().max()).all())

        outcome = fight(Comparison("packed", f"M {num_rows}", partial(product, x), partial(rival, x), agrees), timer)
        if not verdicts([outcome])["packed"].beats_rival:
            break
        won = num_rows
    return won
