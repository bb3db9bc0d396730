"""The command `demo`."""

import json
from dataclasses import replace
from functools import partial

from offload.cli import flags
from offload.cli.app import app
from offload.cli.console import Console
from offload.cli.libraries import libraries
from offload.cli.loading import Loading, making_target
from offload.cli.prompt_input import read_prompt
from offload.errors import require
from offload.options import DEMO_PAIR, DemoOptions, ModelOptions, OutputOptions, TextOptions
from offload.sampling_options import Sampling
from offload.units import parse_size, plural

_NEXT = """next: offload chat --demo, which answers questions about Python; or a model of your own:
      offload plan -m MODEL tells whether it fits, and how fast it will be
      this pair, for any command: -m {target} -d {draft}"""

_MOST_BYTES = 200 * 10**9  # more would need more layers than any model has


@flags.command(
    app,
    epilog="""Examples:

    offload demo

    offload demo --size 2GB --tree 64x16 -p "def main(argv):" --temp 0.6""",
)
def demo(
    text_options: TextOptions,
    demo_options: DemoOptions,
    model_options: ModelOptions,
    sampling: Sampling,
    output: OutputOptions,
) -> None:
    """See it work on a packaged model, here and now."""
    from offload.planning.load_options import LoadOptions

    # what cannot be is refused before torch is imported
    draft = str(DEMO_PAIR / "draft")
    named = LoadOptions.from_options(model_options, model=DEMO_PAIR / "target", draft=draft)
    size_bytes = parse_size(demo_options.size, "`size`")
    require(size_bytes <= _MOST_BYTES, "`size` must be at most 200GB", size_bytes, "try 2GB")
    max_tokens = text_options.max_new_tokens or 0
    require(max_tokens > 1, "two speeds need -n of 2 or more", max_tokens, "try -n 96")
    given = None if text_options.prompt is None else read_prompt(text_options.prompt, None)
    with Console(output, model_options.ram or demo_options.size) as console, libraries(console):
        from offload.checkpoint.packaged import PROMPT, inflated_target
        from offload.cli import demo_run as run
        from offload.cli import packaged
        from offload.engine.request import Request

        prompt = given or PROMPT
        request = Request(prompt, sampling, max_tokens, raw=True)
        options = packaged.demo_options(named, size_bytes)
        packaged.check(request)
        with making_target(console) as landed:
            target = inflated_target(size_bytes, landed)
        made = Loading(replace(options, model=target))
        with made.open(console, request) as decoder:
            num_prompt = len(decoder.encode(prompt, raw=True))
            console.say(f"--- the prompt, {plural(num_prompt, 'token')}")
            console.say(prompt.rstrip())
            show = partial(run.show_run, console, decoder, is_silent=output.as_json)
            result = run.compare(decoder, prompt, sampling, num_tree=max_tokens, show=show)
    if output.as_json:
        both = {"none": result.plain.as_dict(), "tree": result.tree.as_dict()}
        print(json.dumps({**both, "speedup": result.speedup, "num_identical": result.num_same}))
    console.say(run.comparison_lines(result))
    console.detail(run.proof_details(result))
    console.say(_NEXT.format(target=target, draft=draft))
