#!/usr/bin/env bash
# torch turns the sign of `x.conj()` (and of `x.conj().imag`) only when the numbers are read: the tensor is the old memory with a
# bit that says so. What is saved should be the tensor's numbers.
# Seen (safetensors 0.8.0, huggingface_hub 2.4.0, torch 2.13.0): `save_file`, `save` and `save_torch_state_dict` write the memory
# and forget the bit, so `x.conj()` is loaded as x and a negated view as its opposite. `torch.save` keeps them. Tensors that are no
# plain memory in other ways (sparse, strided, shared) are refused with a reason.
# Why it matters: rotary tables are kept as complex numbers (`freqs_cis`), and their conjugate turns keys back; a cache of them,
# or a checkpoint with such a buffer, comes back turned the wrong way.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check torch==2.13.0 safetensors==0.8.0 huggingface_hub==2.4.0 numpy
cat > "$work/run.py" <<'PY'
import sys

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load, load_file, save, save_file

folder = sys.argv[1]
turns = torch.polar(torch.ones(4), torch.arange(4.0))
tensors = {"turns": turns, "back": torch.polar(torch.ones(4), torch.arange(4.0)).conj()}
tensors["negative"] = torch._neg_view(torch.arange(4.0))


def by_torch():
    torch.save(tensors, f"{folder}/all.pt")
    return torch.load(f"{folder}/all.pt")


def by_file():
    save_file(tensors, f"{folder}/all.safetensors")
    return load_file(f"{folder}/all.safetensors")


def by_hub():
    save_torch_state_dict(dict(tensors), folder)
    return load_file(f"{folder}/model.safetensors")


seen = {}
for way in (by_torch, by_file, lambda: load(save(tensors)), by_hub):
    back = way()
    seen[way.__name__] = {name: torch.equal(tensor.resolve_conj().resolve_neg(), back[name].resolve_conj()) for name, tensor in tensors.items()}
    print(way.__name__, seen[way.__name__])
kept, lost = dict.fromkeys(tensors, True), {"turns": True, "back": False, "negative": False}
assert seen == {"by_torch": kept, "by_file": lost, "<lambda>": lost, "by_hub": lost}, seen
assert torch.equal(by_file()["back"], turns)
PY
"$work/env/bin/python" "$work/run.py" "$work"
echo "as it was seen"
