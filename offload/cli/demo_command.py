"""The command `demo`."""

import json
from functools import partial
from typing import TYPE_CHECKING

from offload.cli import flags
from offload.cli.app import app
from offload.cli.console import Console, ModelNames
from offload.cli.libraries import libraries
from offload.cli.progress import plural
from offload.cli.prompt_input import read_prompt
from offload.options import DemoOptions, ModelOptions, OutputOptions, TextOptions
from offload.units import Sampling, parse_size

if TYPE_CHECKING:
    from offload.engine.decoder import Decoder
    from offload.engine.generation import Run
    from offload.engine.sequence import PassFigures


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
        from offload.checkpoint.packaged import PROMPT, inflated_target
        from offload.cli import demo as packaged
        from offload.cli import demo_run as run
        from offload.engine.request import Request

        prompt = PROMPT if text.prompt is None else read_prompt(text.prompt, None)
        request = Request(prompt, sampling, max_tokens, raw=True)
        options = packaged.demo_options(
            packaged.budget(size_bytes, ram, tree, rule),
            tree,
            rule=rule,
            link_limit=load.link_limit,
        )
        packaged.check(request)
        landed = partial(console.bytes_landed, label="making the target")
        target = inflated_target(size_bytes, landed)
        with run.open_demo(target, options, console, request) as decoder:
            console.detail(f"target in {target}")
            console.open(
                ModelNames(target.name, "of the package"), decoder, decoder.tree_choice(sampling)
            )
            num_prompt = len(decoder.encode(prompt, raw=True))
            console.say(f"--- the prompt, {plural(num_prompt, 'token')}")
            console.say(prompt.rstrip())
            show = partial(_show, console, decoder, is_silent=output.as_json)
            limits = {"num_plain": min(16, max_tokens), "num_tree": max_tokens}
            result = run.compare(decoder, prompt, sampling, show=show, **limits)
    if output.as_json:
        both = {"none": result.plain.as_dict(), "tree": result.tree.as_dict()}
        print(json.dumps({**both, "speedup": result.speedup, "num_identical": result.num_same}))
    console.say(run.comparison_lines(result))
    console.detail(run.proof_details(result))


def _show(
    console: Console, decoder: "Decoder", heading: str, run: "Run", *, is_silent: bool
) -> None:
    """Print one run of the demo as it goes, and draw one of its passes."""
    from offload.cli.tree_lines import tree_lines, usual_pass

    console.say(f"--- {heading}")
    console.follow(run, decoder.plan, run.sequence.limits.max_new_tokens)
    passes: list[PassFigures] = []
    try:
        for piece in run:
            if not is_silent:
                console.text(piece)
            last = run.sequence.last_pass
            if last is not None and last not in passes[-1:]:
                passes.append(last)
    finally:
        if not is_silent:
            console.text("\n")
    tokenizer = decoder.tokenizer
    if (shown := usual_pass(passes)) is not None and tokenizer is not None:
        console.say(tree_lines(shown, lambda token: tokenizer.decode([token])))
    console.wait("comparing every token with the model alone")
