"""The chat page, and the headers under which a browser runs its one script.

Invariant: the bytes that are sent are those that were hashed, and the page has one style and one
script, without an address.
"""

import base64
import hashlib
import re
from pathlib import Path
from typing import NamedTuple

from offload.declaration import Option, options_at
from offload.sampling_options import Sampling

_FILE = Path(__file__).with_name("page.html")
_PLACE = "      <!-- options of drawing -->"


class Page(NamedTuple):
    """What is answered at `/`."""

    body: bytes  # HTML in UTF-8
    headers: dict[str, str]


def read_page(path: Path = _FILE) -> Page:
    """Return the page with the headers under which a browser runs its one script.

    Hashes need no state between answers, and a page changed by accident does not run in part.
    Raises `ValueError` for a page of several scripts or styles.
    """
    text = path.read_text(encoding="utf-8")  # lines end in \n then, which is what a browser hashes
    fields = map(_field, options_at("page", Sampling).values())
    text = text.replace(_PLACE, "\n".join(fields))
    script, style = (f"'sha256-{_hash_of(text, tag)}'" for tag in ("script", "style"))
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    )
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Page(text.encode(), headers)


def _field(option: Option) -> str:
    """Return a field of the settings for an option of drawing."""
    low, high = option.page
    step = "1" if option.kind is int else "any"
    absent = "as the model suggests" if "suggested" in option.doors else "a new one each time"
    label = option.at("chat").capitalize()
    bounds = f'min="{low}" max="{high}" step="{step}"'
    return f'      <label>{label}<input id="{option.at("http")}" type="number" {bounds} placeholder="{absent}"></label>'


def _hash_of(text: str, tag: str) -> str:
    """Return the SHA-256 in base64 of the only element of that name, without attributes."""
    bodies = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    num = text.count(f"<{tag}")
    if len(bodies) != 1 or num != 1:
        raise ValueError(f"the page must have one <{tag}> without attributes, found {num}")
    return base64.b64encode(hashlib.sha256(bodies[0].encode()).digest()).decode()
