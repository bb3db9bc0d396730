"""Kernels without a GPU: whether the compiler accepts them, and whether their references do without Triton.

Each is tried in a process of its own, and needs no GPU where there is one.
"""

import json
import os
from pathlib import Path

import pytest
from marks import needs_triton
from shell import ROOT, run_python


def bare() -> dict[str, str]:
    """The environment without Triton's interpreter."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}


def test_references_need_no_triton() -> None:
    names = sorted(path.stem for path in (ROOT / "kernels").glob("*.py"))
    run_python(
        "-c",
        f"""
import sys
sys.modules["triton"] = None
import importlib, torch
for name in {names}:
    importlib.import_module(f"offload.kernels.{{name}}")
from offload.kernels.registry import REFERENCES
from offload.kernels.path_attention import ScoreTerms
from offload.model.path_attention import path_attention, path_rows
assert REFERENCES.keyed_gumbel(1, 2, 30).shape == (30,)
states = torch.randn(2, 3, 16)
rows = path_rows(0, torch.ones(3, 3).tril().bool(), path_attention)
assert path_attention(states, states, states, rows, ScoreTerms(1.0)).shape == (3, 2, 16)
""",
        environment=bare(),
    )


# Compute capabilities, and how much shared memory such a GPU grants a program (CUDA's programming guide).
SHARED_KIB = {"80": 163, "86": 99, "89": 99, "90": 227, "120": 99}


@needs_triton
@pytest.mark.parametrize(
    "capability",
    [pytest.param(capability, marks=pytest.mark.full) for capability in SHARED_KIB if capability != "86"] + ["86"],
)
def test_kernels_compile_for_a_gpu(capability: str, tmp_path: Path) -> None:
    """Each is compiled once for all sizes: one that is compiled again as the text grows would stall the decoder."""
    lines = run_python("tests/compile_kernels.py", capability, tmp_path, environment=bare()).splitlines()
    compiled = [json.loads(line) for line in lines]
    names = {row["kernel"] for row in compiled}
    expanding = {"_expand", "_expand_blocks", "_expand_tiles", "_fill_blocks", "expand_row_block"}
    products = {"_multiply_codes", "_sum_parts"}
    of_states = {"_attend", "_best_of_chunk", "_candidates", "_fill", "_gather", "_normalize"}
    assert names == of_states | expanding | products
    for row in compiled:
        assert row["shared_bytes"] <= SHARED_KIB[capability] << 10, f"more than such a GPU grants a program: {row}"
    attending = [row for row in compiled if row["kernel"] == "_attend"]
    assert all(row["has_tensor_cores"] for row in attending if not row["is_float32"])
    multiplying = [row for row in compiled if row["kernel"] in products]
    assert all(row["has_tensor_cores"] for row in multiplying if row["kernel"] == "_multiply_codes")
    assert not [row for row in multiplying if row["stack_bytes"]]
    spilling = [row for row in attending if row["stack_bytes"]]
    assert not [row for row in spilling if row["width"] <= 256], spilling
    again = [row for row in compiled if row["is_repeated"]]
    assert {row["kernel"] for row in again} == names
    assert not any(row["is_new"] for row in again), again
