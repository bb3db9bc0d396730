"""What is wrong with a request, told before libraries are imported that take seconds: no torch here.

Options are checked by themselves, folders by their headers. Invariant: nothing is fetched, and no weight is read.
"""

import os
from pathlib import Path
from typing import Any

from offload.checkpoint.hub import open_headers
from offload.checkpoint.safetensors import is_hub_id
from offload.config import DTYPES, drafting_of, parse_size, require
from offload.memory.planner import require_positions
from offload.planning.profile import parse_profile
from offload.tree.spec import TreeSpec, tree_to_fill


def check_options(
    has_draft: bool,
    tree: str,
    rule: str,
    *,
    ram: str | int | None = None,
    dtype: str = "auto",
    context: int | None = None,
    threads: int | None = None,
    profile: str | os.PathLike[str] | None = None,
) -> TreeSpec:
    """The tree that is wanted, and nothing wrong that shows before a model is looked for. Raises `UserError`."""
    drafting_of(rule)
    wish = tree_to_fill(tree, rule, has_draft=has_draft)
    if ram is not None:
        parse_size(ram, "`ram`")
    require(dtype in DTYPES, f"`dtype` must be one of {', '.join(DTYPES)}", repr(dtype), "try `dtype` auto")
    if context is not None:
        require_positions(context)
    require(threads is None or threads >= 1, "`threads` must be 1 or more", threads, "leave it out to have it measured")
    if profile is not None and str(profile) != "none":
        parse_profile(Path(profile))
    return wish


def check(model: str, draft: str | None, tree: str, rule: str, **options: Any) -> None:
    """Refuse options, and folders that hold no model that could be read; hub ids are let pass. Raises `UserError`."""
    check_options(draft is not None, tree, rule, **options)
    for name in (model, draft):
        if name is not None and (os.path.isdir(os.path.expanduser(name)) or not is_hub_id(name)):
            open_headers(name)
