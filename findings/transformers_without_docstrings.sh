#!/usr/bin/env bash
# Under `python -OO` (or PYTHONOPTIMIZE=2, as some images set it to save memory) docstrings are None, which libraries must bear:
# importing a model class should work as it does without.
# Seen (transformers 5.24.0, torch 2.13.0): `from transformers import LlamaForCausalLM` raises ValueError, "No `Args` or
# `Parameters` section is found in the docstring of `BaseModelOutputWithPast`", since a decorator reads that docstring at import.
# Why it matters: no model can be loaded in such an image, and the message speaks of a docstring that is there in the source.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.24.0
cat > "$work/run.py" <<'PY'
import sys

try:
    from transformers import LlamaForCausalLM

    seen = f"{LlamaForCausalLM.__name__} is there"
except ValueError as error:
    seen = f"ValueError: {error}"
print(f"optimize={sys.flags.optimize}: {seen[:120]}")
if sys.flags.optimize == 2 and "section is found in the docstring" not in seen:
    sys.exit("it is otherwise now")
if sys.flags.optimize == 0 and not seen.endswith("is there"):
    sys.exit("it fails without -OO as well")
PY
"$work/env/bin/python" "$work/run.py" 2> /dev/null
"$work/env/bin/python" -OO "$work/run.py" 2> "$work/log" || { cat "$work/log"; exit 1; }
echo "as it was seen"
