"""Source files that the packaged pair was not trained on: the standard library's own, split by a hash of their paths.

The pair was trained on the other files of a Python 3.11; how well is in LOG.md.
"""

import hashlib
import sysconfig
from pathlib import Path

_HELD_OUT_PERCENT = 3


def held_out_files() -> list[Path]:
    """Of this interpreter, in the order of their paths."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if not {"site-packages", "lib2to3", "idlelib"} & set(path.parts))
    return [path for path in files if _is_held_out(path.relative_to(root))]


def read_source(path: Path) -> str:
    """A few test files are deliberately not UTF-8: what does not decode is dropped."""
    return path.read_text(encoding="utf-8", errors="ignore")


def _is_held_out(relative: Path) -> bool:
    return hashlib.sha256(str(relative).encode()).digest()[0] * 100 < _HELD_OUT_PERCENT * 256
