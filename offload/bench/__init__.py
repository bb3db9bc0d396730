"""Gives the files of the top-level folder bench/ their import path, `offload.bench.<file>`.

The reason and the way are those of `offload.kernels`: beside this file in a wheel, two folders up
in a checkout.
"""

from pathlib import Path as _Path

_checkout = _Path(__file__).resolve().parents[2]
if (_checkout / "pyproject.toml").is_file() and (_checkout / "bench").is_dir():
    __path__.append(str(_checkout / "bench"))
