"""The command `demo`."""

import json
from functools import partial
from typing import TYPE_CHECKING

from offload.cli import flags
from offload.cli.app import app
from offload.cli.console import Console, ModelNames
from offload.cli.libraries import libraries
from offload.cli.prompt_input import read_prompt
from offload.memory.plan import MemoryPlan
from offload.options import DemoOptions, ModelOptions, OutputOptions, TextOptions
from offload.units import Sampling, parse_size

if TYPE_CHECKING:
    from offload.engine.generation import Run


@flags.command(
    app,
    epilog="""Examples:

    offload demo

    offload demo --size 2GB --tree 64x16 -p "def main(argv):" --temp 0.6""",
)
def demo(
    text: TextOptions,
    made: DemoOptions,
    load: ModelOptions,
    sampling: Sampling,
    output: OutputOptions,
) -> None:
    """See it work on a packaged model, here and now."""
    size_bytes = parse_size(made.size, "`size`")
    ram, tree, rule = load.ram, load.tree, load.rule
    max_tokens = text.max_new_tokens or 0
    shown = Console(
        is_quiet=output.quiet or output.as_json,
        is_verbose=output.verbose,
        sizes_like=ram or made.size,
    )
    with shown as console, libraries(console):
        from offload.cli import demo as run
        from offload.engine.request import Request

        request = Request(
            run.PROMPT if text.prompt is None else read_prompt(text.prompt, None),
            sampling,
            max_tokens,
            raw=True,
        )
        options = run.demo_options(
            run.budget(size_bytes, ram, tree, rule), tree, rule=rule, link_limit=load.link_limit
        )
        run.check(request)
        target = run.inflated_target(
            size_bytes, partial(console.bytes_landed, label="making the target")
        )
        with run.open_demo(target, options, console, request) as decoder:
            console.detail(f"target in {target}")
            console.open(
                ModelNames(target.name, "of the package"), decoder, decoder.tree_choice(sampling)
            )
            show = partial(_show, console, decoder.plan, is_silent=output.as_json)
            limits = {"num_plain": min(16, max_tokens), "num_tree": max_tokens}
            result = run.compare(decoder, str(request.prompt), sampling, show=show, **limits)
    if output.as_json:
        both = {"none": result.plain.as_dict(), "tree": result.tree.as_dict()}
        print(json.dumps({**both, "speedup": result.speedup, "num_identical": result.num_same}))
    console.say(run.comparison_lines(result))


def _show(console: Console, plan: MemoryPlan, heading: str, run: "Run", *, is_silent: bool) -> None:
    """Print one run of the demo as it goes."""
    console.say(f"--- {heading}")
    console.follow(run, plan, run.sequence.limits.max_new_tokens)
    try:
        for piece in run:
            if not is_silent:
                console.text(piece)
    finally:
        if not is_silent:
            console.text("\n")
    console.wait("proving every token")
