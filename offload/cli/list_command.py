"""The command `list`: which models the hub's library has downloaded."""

from typing import Any

from offload.cli import flags
from offload.cli.app import app
from offload.cli.terminal import print_result
from offload.errors import UserError, reason
from offload.options import OutputOptions
from offload.units import format_bytes


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

    models = [_described(name) for name in cached_models()]
    lines = ["no model was downloaded yet: generate, chat and serve do that with -m ORG/NAME"]
    if models:
        width = max(len(row["name"]) for row in models)
        lines = [_row(row, width) for row in models]
    print_result("\n".join(lines), models, as_json=output.as_json)


def _described(name: str) -> dict[str, Any]:
    """Return the facts of a model, as `--json` has them, or why its headers cannot be read."""
    from offload.checkpoint.download import in_cache
    from offload.checkpoint.open import open_headers
    from offload.checkpoint.sizes import ModelFacts

    row: dict[str, Any] = {"name": name, "num_bytes": None, "num_parameters": None}
    try:
        facts = ModelFacts.from_checkpoint(name, open_headers(in_cache(name)))
    except (UserError, OSError) as error:
        return {**row, "refusal": f"does not run: {reason(error)}"}
    sizes = {"num_bytes": facts.num_bytes, "num_parameters": facts.num_parameters}
    return {**row, **sizes, "refusal": None}


def _row(row: dict[str, Any], width: int) -> str:
    summary = row["refusal"]
    if summary is None:
        size = format_bytes(row["num_bytes"], is_decimal=True)
        summary = f"{size:>8}, {row['num_parameters'] / 1e9:.3g} billion parameters"
    return f"{row['name']:<{width}}  {summary}"
