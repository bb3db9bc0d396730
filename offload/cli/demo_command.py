"""The command `demo`."""

import json
from functools import partial

from offload.cli import flags
from offload.cli.app import app
from offload.cli.console import Console, ModelNames
from offload.cli.libraries import Loading, libraries
from offload.cli.live_line import plural
from offload.cli.prompt_input import read_prompt
from offload.options import DemoOptions, ModelOptions, OutputOptions, TextOptions
from offload.sampling_options import Sampling
from offload.units import parse_size

_NEXT = """next: offload chat --demo, which answers questions about Python; or a model of your own:
      offload plan -m MODEL tells whether it fits, and how fast it will be
      this pair, for any command: -m {target} -d {draft}"""


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

    LoadOptions.of(model_options)  # what cannot be is refused before torch is imported
    size_bytes = parse_size(demo_options.size, "`size`")
    max_tokens = text_options.max_new_tokens or 0
    tree = model_options.tree
    rule = model_options.rule
    sizes_like = model_options.ram or demo_options.size
    with Console(output, sizes_like) as console, libraries(console):
        from offload.checkpoint.packaged import PROMPT, inflated_target
        from offload.cli import demo as packaged
        from offload.cli import demo_run as run
        from offload.engine.request import Request

        prompt = PROMPT if text_options.prompt is None else read_prompt(text_options.prompt, None)
        request = Request(prompt, sampling, max_tokens, raw=True)
        ram = packaged.budget(size_bytes, model_options.ram, tree, rule)
        link_limit = model_options.link_limit
        options = packaged.demo_options(ram, tree, rule=rule, link_limit=link_limit)
        packaged.check(request)
        with console.making_target() as landed:
            target = inflated_target(size_bytes, landed)
        draft = packaged.PAIR / "draft"
        with Loading(str(target), str(draft), options).open(console, request) as decoder:
            names = ModelNames(target.name, "of the package")
            console.open(names, decoder, decoder.tree_choice(sampling))
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
