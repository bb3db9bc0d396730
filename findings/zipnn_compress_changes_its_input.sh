#!/usr/bin/env bash
# A lossless compressor reads what it compresses and leaves it alone; `bytes` cannot change in Python at all.
# Seen (zipnn 0.5.4): `ZipNN.compress` turns the bits of its input where they lie and leaves them so. A tensor in bfloat16 or float32
# holds other numbers afterwards (-1.0 is infinite), compressed a second time it comes back wrong, and so do `bytes`. One in
# float16, or one that is not contiguous and so is copied first, stays. What was compressed the first time comes back right.
# Why it matters: who packs the weights of a model that goes on running, or writes them twice, has garbage and no error.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy zipnn==0.5.4
cat > "$work/run.py" <<'PY'
import sys

import torch
from zipnn import ZipNN


def compressed(data, **form):
    """Return whether the input is as it was, and whether the first and the second time bring it back."""
    is_tensor = isinstance(data, torch.Tensor)
    before = data.clone() if is_tensor else bytes(bytearray(data))
    same = torch.equal if is_tensor else lambda left, right: bytes(left) == bytes(right)
    first, second = (ZipNN(**form).compress(data) for _ in range(2))
    back = [same(ZipNN(**form).decompress(packed), before) for packed in (first, second)]
    return (same(data, before), *back)


numbers = torch.linspace(-1, 1, 1 << 20)
seen = {str(dtype): compressed(numbers.to(dtype), input_format="torch") for dtype in (torch.bfloat16, torch.float32, torch.float16)}
seen["not contiguous"] = compressed(numbers.bfloat16().view(1024, 1024).t(), input_format="torch")
seen["bytes"] = compressed(numbers.bfloat16().view(torch.uint8).numpy().tobytes(), bytearray_dtype="bfloat16")
for kind, row in seen.items():
    print(f"{kind}: input as before, first time right, second time right: {row}")
changed, left_alone = (False, True, False), (True, True, True)
wanted = {
    "torch.bfloat16": changed,
    "torch.float32": changed,
    "torch.float16": left_alone,
    "not contiguous": left_alone,
    "bytes": changed,
}
sys.exit(seen != wanted)
PY
"$work/env/bin/python" "$work/run.py"
echo "as seen before"
