"""Makes the files of the top-level folder bench/ importable as `offload.bench.<file>`.

Why and how: see `offload.kernels`. The files lie beside this one in a wheel, and two folders up in
a checkout.
"""

from pathlib import Path as _Path

_checkout = _Path(__file__).resolve().parents[2]
if (_checkout / "pyproject.toml").is_file() and (_checkout / "bench").is_dir():
    __path__.append(str(_checkout / "bench"))
