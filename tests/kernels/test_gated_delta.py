"""Steps of the gated delta rule: numba against torch, to the bit, where it says that it agrees."""

import platform

import pytest
import torch

from offload.kernels import gated_delta
from offload.kernels.compiled import HAS_NUMBA
from offload.kernels.gated_delta import BASE, DeltaRows, agrees, walk_heads_compiled, walk_heads_reference

needs_numba = pytest.mark.skipif(not HAS_NUMBA, reason="needs numba")
STEPS = torch.tensor([[0, BASE, 0], [1, 0, 1], [2, BASE, 2], [3, 1, 1], [4, 0, 0]])


def rows_of(key_size: int, value_size: int) -> DeltaRows:
    generator = torch.Generator().manual_seed(5)
    shapes = ((5, 4, key_size), (5, 4, key_size), (5, 4, value_size), (5, 4), (5, 4))
    return DeltaRows(*(torch.randn(*shape, generator=generator) for shape in shapes))


@needs_numba
@pytest.mark.parametrize(("key_size", "value_size"), [(128, 128), (64, 64), (72, 128), (256, 128), (16, 12), (300, 64)])
def test_where_forms_agree_any_rows_have_the_same_bits(key_size: int, value_size: int) -> None:
    base, rows = torch.randn(4, key_size, value_size), rows_of(key_size, value_size)
    found = []
    for walk, num_held in ((walk_heads_reference, 4), (walk_heads_compiled, 4), (walk_heads_compiled, 1)):
        states, out = torch.empty(3, num_held, *base.shape[1:]), torch.full_like(rows.value_THV, torch.nan)
        for lo in range(0, 4, 2):
            walk(base, rows, STEPS, (lo, lo + 2), states, out)
        found.append((out, states[:, -1]))
    for one in found[1:]:
        assert agrees(key_size, value_size) == all(map(torch.equal, one, found[0]))
        assert all(torch.allclose(*both, rtol=1e-3, atol=1e-3) for both in zip(one, found[0], strict=True))


@needs_numba
@pytest.mark.skipif(platform.machine() != "x86_64", reason="how torch adds up differs elsewhere")
def test_they_agree_at_sizes_that_models_have() -> None:
    assert all(agrees(size, size) for size in (64, 128)) and not agrees(512, 128)


@needs_numba
def test_another_order_of_sums_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a torch that adds up from the other end."""
    walk = gated_delta.walk_heads_reference

    def other(base: torch.Tensor, rows: DeltaRows, *more: object) -> None:
        walk(base.flip(1), rows._replace(query_THK=rows.query_THK.flip(2), key_THK=rows.key_THK.flip(2)), *more)

    monkeypatch.setattr(gated_delta, "walk_heads_reference", other)
    assert not agrees.__wrapped__(64, 64)
