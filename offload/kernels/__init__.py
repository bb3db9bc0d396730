"""Gives the files of the top-level folder kernels/ their import path, `offload.kernels.<file>`.

That folder cannot be a package itself: Hugging Face has one of that name, and `import transformers`
would find ours. A wheel carries the files right here; in a checkout they lie two folders up, and
that folder joins the search path.
Invariant: a file beside this one is found first.
"""

from pathlib import Path as _Path

_checkout = _Path(__file__).resolve().parents[2]
if (_checkout / "pyproject.toml").is_file() and (_checkout / "kernels").is_dir():
    __path__.append(str(_checkout / "kernels"))
