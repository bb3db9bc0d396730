#!/usr/bin/env bash
# The GELU of a number should not depend on how many other numbers stand in the tensor: f(x)[:n] and f(x[:n]) should be equal.
# Seen (torch 2.13.0, CPUs with AVX2 or AVX-512): gelu and softplus in float32 differ in the last bit for some of the first
# numbers once the tensor is shorter than a vector: what fills no whole vector is computed in another way.
# Why it matters: a row of a batch, or of a tree of guesses, has other bits than the same row alone; greedy texts may differ.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy
cat > "$work/run.py" <<'PY'
import torch
from torch.nn import functional

torch.set_num_threads(1)
torch.manual_seed(0)
numbers = 3 * torch.randn(4096)
found = {}
for name in ("gelu", "softplus", "relu"):
    function = getattr(functional, name)
    whole = function(numbers)
    found[name] = sum(
        int((function(numbers[lo : lo + size].clone()) != whole[lo : lo + size]).sum())
        for size in (1, 3, 7)
        for lo in range(0, 4096 - size, 16)
    )
print(torch.backends.cpu.get_cpu_capability(), "numbers that differ:", found)
assert found["relu"] == 0 and found["gelu"] > 0 and found["softplus"] > 0, found
PY
"$work/env/bin/python" "$work/run.py"
echo "as it was seen"
