"""The command line: flags become calls of the Python interface, errors become one line and an exit code.

Text goes to stdout as it is accepted, everything else to stderr. torch is imported only by commands that compute.
"""

import json
import os
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from offload import __version__
from offload.bench.suite import app as bench
from offload.cli import flags, output
from offload.cli.console import Console, Names, error_line, profile_lines
from offload.cli.libraries import libraries
from offload.cli.live_line import fitted
from offload.cli.own_defaults import OwnDefaults, own_defaults
from offload.cli.prompt_input import read_prompt
from offload.cli.sampling_choice import choose_sampling, own_sampling
from offload.cli.session_file import found_session
from offload.config import Sampling, parse_size
from offload.errors import ReadError, UserError
from offload.memory.plan import MemoryPlan

if TYPE_CHECKING:
    from offload.engine.generation import Run

EXIT_FAILED, EXIT_USER_ERROR, EXIT_INTERRUPTED = 1, 2, 130
_NO_DEVICE_MEMORY = (
    "device memory ran out, more was needed than planned: lower --context or take a smaller --tree; "
    "where other programs use the GPU, lower --gpu-mem"
)

app = typer.Typer(
    help="Decode with models that do not fit into memory: one sweep over the weights, many tokens.",
    epilog="Start here: offload demo",
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench", short_help="Measure, every figure beside its ceiling.")


def _say_version(is_asked: bool) -> None:
    if is_asked:
        print(f"offload {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="say it and exit")
    ] = False,
) -> None:
    pass


@app.command(
    epilog="""Examples:

    offload generate -m Llama-3.1-70B -d Llama-3.2-1B --ram 32GiB -p "Once upon a time"

    cat notes.txt | offload generate -m big -d small --temp 0.6 --seed 7 --tree dynamic:128x20

    offload generate -m big -d small -f prompt.txt --json > result.json"""
)
def generate(
    model: flags.Model,
    draft: flags.Draft = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="the prompt; '-' reads standard input")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", metavar="FILE", help="read the prompt from a UTF-8 file")
    ] = None,
    max_tokens: flags.NumTokens = 128,
    temp: flags.OwnTemp = None,
    top_p: flags.OwnTopP = None,
    top_k: flags.OwnTopK = None,
    greedy: flags.Greedy = False,
    seed: flags.Seed = 0,
    stop: flags.Stop = None,
    session: flags.Session = None,
    device: flags.Device = "auto",
    gpu_mem: flags.GpuMem = None,
    ram: flags.Ram = None,
    context: flags.Context = None,
    dtype: flags.Dtype = "auto",
    tree: flags.Tree = "auto",
    rule: flags.RuleName = "match",
    threads: flags.Threads = None,
    profile: flags.ProfileFile = None,
    invariant: flags.Invariant = None,
    link_limit: flags.LinkLimit = None,
    raw: Annotated[bool, typer.Option("--raw", help="no chat template")] = False,
    as_json: flags.Json = False,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
) -> None:
    """Write text with a model larger than memory."""
    found, own = found_session(session), own_sampling(temp, top_p, top_k, seed, is_greedy=greedy)
    text = read_prompt(prompt, file, is_needed=found is None)
    from offload.planning.options import LoadOptions, check_models

    options = LoadOptions(
        device=device, gpu_memory=gpu_mem, ram=ram, dtype=dtype, context=context, tree=tree, rule=rule,
        threads=threads, profile=profile, link_limit=link_limit, invariant=invariant,
    )  # fmt: skip
    check_models(model, draft, options)
    with Console(is_quiet=quiet or as_json, is_verbose=verbose, sizes_like=ram) as console:
        sampling, note = choose_sampling(model, own, seed, console.wait)
        with libraries(console):
            from offload.cli.text_run import write_text
            from offload.engine.request import Request

            request = Request(text or None, sampling, max_tokens, stop, raw, found)
            write_text(model, draft, options, console, request, note=note, session=session, as_json=as_json)


@app.command(
    short_help="Chat with a model larger than memory.",
    epilog="""Examples:

    offload chat -m Llama-3.1-70B-Instruct -d Llama-3.2-1B-Instruct --ram 32GiB

    offload chat -m big -d small --system "Answer in one sentence." --temp 0.7

    offload chat -m big -d small --session talk.session

    offload chat -m big -d small --quiet < questions.txt""",
)
def chat(
    model: flags.Model,
    draft: flags.Draft = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="what the model is told before the first question")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("-n", "--max-tokens", metavar="N", min=1, help="of one answer; default: what has room"),
    ] = None,
    temp: flags.OwnTemp = None,
    top_p: flags.OwnTopP = None,
    top_k: flags.OwnTopK = None,
    greedy: flags.Greedy = False,
    seed: flags.Seed = 0,
    stop: flags.Stop = None,
    session: flags.Session = None,
    device: flags.Device = "auto",
    gpu_mem: flags.GpuMem = None,
    ram: flags.Ram = None,
    context: flags.Context = None,
    dtype: flags.Dtype = "auto",
    tree: flags.Tree = "auto",
    rule: flags.RuleName = "match",
    threads: flags.Threads = None,
    profile: flags.ProfileFile = None,
    invariant: flags.Invariant = None,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
) -> None:
    """Chat with a model larger than memory; every line is a question, and only what is new is read."""
    own = own_sampling(temp, top_p, top_k, seed, is_greedy=greedy)
    found_session(session)
    from offload.planning.options import LoadOptions, check_models

    options = LoadOptions(
        device=device, gpu_memory=gpu_mem, ram=ram, dtype=dtype, context=context, tree=tree, rule=rule,
        threads=threads, profile=profile, invariant=invariant,
    )  # fmt: skip
    check_models(model, draft, options)
    with Console(is_quiet=quiet, is_verbose=verbose, sizes_like=ram) as console:
        sampling, note = choose_sampling(model, own, seed, console.wait)
        with libraries(console):
            from offload.cli.repl import ChatOptions, converse

            wishes = ChatOptions(sampling, note, system, max_tokens, stop, session)
            converse(model, draft, options, console, wishes)


@app.command(
    short_help="Will it fit, and how fast will it be?",
    epilog="""Examples:

    offload plan -m Llama-3.1-70B -d Llama-3.2-1B

    offload plan -m 70b/config.json -d 7b/config.json --ram 32GiB --disk-speed 3GB

    offload plan -m 70b/config.json -d 7b/config.json --hardware l40 --tree 768x22 --tokens-per-sweep 12.2""",
)
def plan(
    model: flags.Model,
    draft: flags.Draft = None,
    device: flags.Device = "auto",
    gpu_mem: flags.GpuMem = None,
    ram: flags.Ram = None,
    context: flags.Context = None,
    dtype: flags.Dtype = "auto",
    tree: flags.Tree = "auto",
    rule: flags.RuleName = "match",
    hardware: Annotated[
        str | None, typer.Option(metavar="NAME", help="another machine: l40, rtx4090, ..., h200 or FILE.json")
    ] = None,
    disk_speed: Annotated[
        str | None, typer.Option(metavar="SIZE", help="of the disk per second, such as 3GB; default: measured")
    ] = None,
    tokens_per_sweep: Annotated[
        float | None, typer.Option(metavar="G", help="what the named tree yields; default: from the profile")
    ] = None,
    profile: flags.ProfileFile = None,
    as_json: flags.Json = False,
    verbose: flags.Verbose = False,
) -> None:
    """Will it fit, and how fast will it be? Reads headers only, of a folder, a hub id or a config.json."""
    from offload.calibration.estimate import estimate
    from offload.cli.plan_lines import answer_lines
    from offload.model.headers import is_built
    from offload.planning.options import LoadOptions

    options = LoadOptions(
        device=device, gpu_memory=gpu_mem, ram=ram, dtype=dtype, context=context, tree=tree, rule=rule,
        profile=profile,
    )  # fmt: skip
    with Console(is_quiet=as_json, sizes_like=ram) as console, ExitStack() as resources:
        if any(is_built(name) for name in (model, draft) if name):
            resources.enter_context(libraries(console))
        console.wait("reading headers")  # the hub may be asked
        found = estimate(
            model, draft, options, hardware=hardware, disk_speed=disk_speed, tokens_per_sweep=tokens_per_sweep
        )
    lines = "" if as_json else answer_lines(found, is_verbose=verbose, is_decimal=console.is_decimal)
    print(flags.as_flags(json.dumps(found.as_dict())) if as_json else fitted(flags.as_flags(lines), sys.stdout))


@app.command(
    short_help="Measure a pair of models on this machine.",
    epilog="""Examples:

    offload tune -m Llama-3.1-70B -d Llama-3.2-1B --ram 32GiB --text book.txt --text mails.txt

    offload tune -m big -d small --text code.py --temp 0.6 --top-p 0.9 --tokens 4096 --json""",
)
def tune(
    model: flags.Model,
    draft: Annotated[str, typer.Option("--draft", "-d", metavar="MODEL", help="small model with the same vocabulary")],
    text: Annotated[list[Path], typer.Option(metavar="FILE", help="UTF-8, of the kind to be decoded; several times")],
    temp: flags.Temp = 0.0,
    top_p: flags.TopP = 1.0,
    top_k: flags.TopK = 0,
    rule: flags.RuleName = "match",
    seed: flags.Seed = 0,
    tokens: Annotated[int, typer.Option(metavar="N", min=1, help="positions to trace")] = 2048,
    teacher_forced: Annotated[bool, typer.Option("--teacher-forced", help="trace the text itself, quicker")] = False,
    tree: Annotated[
        str | None, typer.Option(metavar="NxD", help="largest tree to time; default: what fits, up to 512x24")
    ] = None,
    device: flags.Device = "auto",
    gpu_mem: flags.GpuMem = None,
    ram: flags.Ram = None,
    dtype: flags.Dtype = "auto",
    threads: flags.Threads = None,
    link_limit: flags.LinkLimit = None,
    as_json: flags.Json = False,
    quiet: flags.Quiet = False,
) -> None:
    """Measure a pair of models on this machine, so that --tree auto chooses by what is true here."""
    sampling = Sampling(temperature=temp, top_p=top_p, top_k=top_k, seed=seed)
    from offload.planning.options import LoadOptions, check_models

    options = LoadOptions(
        device=device, gpu_memory=gpu_mem, ram=ram, dtype=dtype, tree=tree or "auto", rule=rule,
        threads=threads, link_limit=link_limit,
    )  # fmt: skip
    check_models(model, draft, options)
    with Console(is_quiet=quiet or as_json, sizes_like=ram) as console, libraries(console):
        from offload.planning.profile import format_json
        from offload.tuning.tune import tune as measure

        tuned = measure(
            model, draft, text, sampling, options,
            num_tokens=tokens, is_teacher_forced=teacher_forced, hooks=console.hooks,
        )  # fmt: skip
    table = f"{profile_lines(tuned.profile, tuned.choice.candidates)}\nsaved in {tuned.path}"
    print(format_json(tuned.profile.as_dict()) if as_json else fitted(table, sys.stdout))


@app.command(
    epilog="""Examples:

    offload demo

    offload demo --size 2GB --tree 64x16 -p "def main(argv):" --temp 0.6"""
)
def demo(
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="Python code to go on with")
    ] = None,
    max_tokens: flags.NumTokens = 96,
    size: Annotated[str, typer.Option(metavar="SIZE", help="how large to make the target")] = "1GB",
    ram: Annotated[
        str | None, typer.Option(metavar="SIZE", help="memory budget; default: a quarter of the size, if that works")
    ] = None,
    tree: flags.Tree = "dynamic:128x20",
    rule: flags.RuleName = "match",
    temp: flags.Temp = 0.0,
    seed: flags.Seed = 0,
    link_limit: flags.LinkLimit = None,
    as_json: flags.Json = False,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
) -> None:
    """See it work on a packaged model, here and now."""
    size_bytes, sampling = parse_size(size, "--size"), Sampling(temperature=temp, seed=seed)
    shown = Console(is_quiet=quiet or as_json, is_verbose=verbose, sizes_like=ram or size)
    with shown as console, libraries(console):
        from offload.cli import demo as run
        from offload.engine.request import Request

        request = Request(run.PROMPT if prompt is None else read_prompt(prompt, None), sampling, max_tokens, raw=True)
        options = run.demo_options(run.budget(size_bytes, ram, tree, rule), tree, rule=rule, link_limit=link_limit)
        run.check(request)
        target = run.inflated_target(size_bytes, partial(console.bytes_landed, label="making the target"))
        with run.open_demo(target, options, console, request) as decoder:
            console.detail(f"target in {target}")
            console.open(Names(target.name, "of the package"), decoder, decoder.tree_choice(sampling))
            show = partial(_show, console, decoder.plan, is_silent=as_json)
            limits = {"num_plain": min(16, max_tokens), "num_tree": max_tokens}
            result = run.compare(decoder, str(request.prompt), sampling, show=show, **limits)
    if as_json:
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


def main() -> None:
    """Run the command that `sys.argv` names, and leave by `sys.exit`."""
    given, own = sys.argv[1:] or ["--help"], OwnDefaults({}, {}, {})
    try:
        command: Any = typer.main.get_command(app)
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the live line tells what is under way
        if "_OFFLOAD_COMPLETE" in os.environ:
            command.main(prog_name="offload")
        if not {"-h", "--help", "--version"} & {*given}:
            own = own_defaults({name: one for name, one in command.commands.items() if name != "bench"})
        # Not command.main(), which has its own idea of what a closed pipe and Ctrl-C mean.
        with command.make_context("offload", given, default_map=own.by_command) as context:
            command.invoke(context)
        sys.stdout.flush()
        sys.exit(0)
    except typer.Exit as finished:
        sys.exit(finished.exit_code)
    except UserError as error:
        _fail(own.blame(flags.as_flags(str(error)), given), EXIT_USER_ERROR)
    except ReadError as error:
        _fail(str(error), EXIT_FAILED)
    except KeyboardInterrupt:
        _fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        output.leave(0)
    except OSError as error:
        if not output.is_stuck():
            raise
        print(error_line(f"cannot write to standard output ({error.strerror})"), file=sys.stderr)
        output.leave(EXIT_FAILED)
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's, and torch may not be loaded
            _fail(_NO_DEVICE_MEMORY, EXIT_FAILED)
        if not hasattr(error, "format_message"):  # what the option parser raises carries its line in this method
            raise
        misread = getattr(error, "ctx", None)  # of the command whose options were not understood
        command_path = misread.command_path if misread else "offload"
        _fail(own.blame(f"{error.format_message()} (see {command_path} --help)", given), EXIT_USER_ERROR)


def _fail(message: str, code: int) -> NoReturn:
    print(fitted(error_line(message), sys.stderr), file=sys.stderr)
    sys.exit(code)
