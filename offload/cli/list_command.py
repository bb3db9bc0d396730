"""The command `list`: which models the hub's library has downloaded."""

import json
from typing import NamedTuple

from offload.cli import flags
from offload.cli.app import app
from offload.errors import UserError, reason
from offload.options import OutputOptions
from offload.units import format_bytes


class CachedModel(NamedTuple):
    """A model on this machine: what it is, or why its headers cannot be read."""

    name: str  # what -m takes
    num_bytes: int | None = None
    num_parameters: int | None = None
    refusal: str | None = None

    def row(self, width: int) -> str:
        """Return a line of the table; names are `width` wide."""
        if self.num_bytes is None or self.num_parameters is None:
            return f"{self.name:<{width}}  {self.refusal}"
        size = format_bytes(self.num_bytes, is_decimal=True)
        count = f"{self.num_parameters / 1e9:.3g} billion parameters"
        return f"{self.name:<{width}}  {size:>8}, {count}"


@flags.command(
    app,
    name="list",
    epilog="""Examples:

    offload list

    offload plan -m ORG/NAME    # before it is downloaded""",
)
def list_models(output: OutputOptions) -> None:
    """List the models that were downloaded from the hub, which -m takes by these names."""
    from offload.checkpoint.download import cached_models

    found = [_look(name) for name in cached_models()]
    if output.as_json:
        print(json.dumps([one._asdict() for one in found]))
    elif not found:
        print("no model was downloaded yet: generate, chat and serve do that with -m ORG/NAME")
    else:
        width = max(len(one.name) for one in found)
        print("\n".join(flags.as_flags(one.row(width)) for one in found))


def _look(name: str) -> CachedModel:
    from offload.checkpoint.download import in_cache
    from offload.checkpoint.hub import open_headers
    from offload.checkpoint.sizes import ModelFacts

    try:
        facts = ModelFacts.of(name, open_headers(in_cache(name)))
    except (UserError, OSError) as error:
        return CachedModel(name, refusal=f"does not run: {reason(error)}")
    return CachedModel(name, facts.num_bytes, facts.num_parameters)
