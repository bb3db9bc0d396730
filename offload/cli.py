"""The command line: flags become calls of the Python interface, errors become one line and an exit code.

Text goes to stdout as it is accepted, everything else to stderr. torch is imported only by commands that compute.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from offload.bench.suite import app as bench
from offload.config import RULES, Sampling, format_bytes, parse_size
from offload.errors import ReadError, UserError
from offload.screen import (
    Screen,
    choice_lines,
    closing_lines,
    comparison_lines,
    kernel_line,
    outlook_lines,
    plan_line,
    profile_lines,
)

EXIT_FAILED, EXIT_USER_ERROR, EXIT_INTERRUPTED = 1, 2, 130
_NO_DEVICE_MEMORY = (
    "device memory ran out, more was needed than planned: lower --context or take a smaller --tree; "
    "where other programs use the card, lower --gpu-mem"
)

app = typer.Typer(
    help="Decode with models that do not fit into memory: one sweep over the weights, many tokens.",
    epilog="Start here: offload demo",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")

Model = Annotated[str, typer.Option("--model", "-m", metavar="MODEL", help="folder or hub id of the target")]
Draft = Annotated[
    str | None, typer.Option("--draft", "-d", metavar="MODEL", help="small model with the same vocabulary")
]
Ram = Annotated[str | None, typer.Option(metavar="SIZE", help="memory budget, such as 8GiB; default: what is free")]
DeviceName = Annotated[str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N")]
GpuMem = Annotated[str | None, typer.Option(metavar="SIZE", help="device memory budget, such as 24GiB")]
Context = Annotated[
    int | None, typer.Option(metavar="N", help="positions for prompt and new tokens; default: at most 4096")
]
Dtype = Annotated[str, typer.Option(metavar="TYPE", help="auto, bfloat16, float16 or float32")]
Tree = Annotated[
    str, typer.Option(metavar="TREE", help="auto, none, NxD (N nodes, D deep), grown:NxD, chain:L or sequences:KxL")
]
RuleName = Annotated[str, typer.Option("--rule", metavar="RULE", help=f"of acceptance: {', '.join(RULES)}")]
Json = Annotated[bool, typer.Option("--json", help="one JSON object on stdout and nothing else")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="nothing on stderr but errors")]
Threads = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="compute threads; default: the fastest, measured at start")
]
ProfileFile = Annotated[
    str | None,
    typer.Option("--profile", metavar="FILE", help="of offload tune, or none; default: the one that fits this run"),
]
LinkLimit = Annotated[
    str | None, typer.Option(metavar="SIZE", help="slow the stream down to this per second", hidden=True)
]
Temp = Annotated[float, typer.Option("--temp", "--temperature", metavar="T", help="0 is greedy")]
TopP = Annotated[float, typer.Option(metavar="P", help="keep the likeliest tokens that sum to this")]
TopK = Annotated[int, typer.Option(metavar="K", help="keep so many of the likeliest tokens; 0 keeps all")]
Seed = Annotated[
    int, typer.Option(metavar="N", help="same seed, same text; with the rules match and topk for any tree")
]
NumTokens = Annotated[int, typer.Option("-n", "--max-tokens", metavar="N", min=0, help="at most so many new tokens")]


@app.command(
    epilog="""Examples:

    offload generate -m Llama-3.1-70B -d Llama-3.2-1B --ram 32GiB -p "Once upon a time"

    cat notes.txt | offload generate -m big -d small --temp 0.6 --seed 7 --tree grown:128x20

    offload generate -m big -d small -f prompt.txt --json > result.json"""
)
def generate(
    model: Model,
    draft: Draft = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="the prompt; '-' reads standard input")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", metavar="FILE", help="read the prompt from a UTF-8 file")
    ] = None,
    max_tokens: NumTokens = 128,
    temp: Temp = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = 0,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="end before this string; may be given several times")
    ] = None,
    device: DeviceName = "auto",
    gpu_mem: GpuMem = None,
    ram: Ram = None,
    context: Context = None,
    dtype: Dtype = "auto",
    tree: Tree = "auto",
    rule: RuleName = "match",
    threads: Threads = None,
    profile: ProfileFile = None,
    link_limit: LinkLimit = None,
    raw: Annotated[bool, typer.Option("--raw", help="no chat template")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write text with a model larger than memory."""
    text, sampling = _read_prompt(prompt, file), Sampling(temperature=temp, top_p=top_p, top_k=top_k, seed=seed)
    from offload.loading import load
    from offload.request import Request

    request = Request(text, sampling, max_tokens, stop, raw)

    with Screen(is_quiet=quiet or as_json) as screen:
        options = {
            "device": device,
            "gpu_memory": gpu_mem,
            "ram": ram,
            "context": context,
            "dtype": dtype,
            "tree": tree,
            "rule": rule,
            "request": request,
            "profile": profile,
            "link_limit": link_limit,
        }
        hooks: dict[str, Callable[..., None]] = {"on_bytes": screen.bytes_landed, "on_layer": screen.layer_done}
        with load(model, draft, threads=threads, **options, **hooks) as decoder:  # type: ignore[arg-type]
            run = decoder.run(text, sampling, max_new_tokens=max_tokens, stop=stop, raw=raw)
            tree_lines = [choice_lines(run.tree_choice)] if draft else []
            kernel_lines = [kernel_line(decoder.duels)] if decoder.duels else []
            for line in (*decoder.notes, plan_line(decoder.plan, decoder.num_threads), *kernel_lines, *tree_lines):
                screen.say(line)
            screen.expect_sweep(len(decoder.plan.layer_bytes), "reading the prompt")
            _write_run(run, screen, as_json=as_json)


@app.command(
    epilog="""Examples:

    offload plan -m Llama-3.1-70B -d Llama-3.2-1B --ram 32GiB

    offload plan -m big --context 16384 --json

    offload plan -m 70b/config.json -d 7b/config.json --hardware l40 --tree 768x22 --tokens-per-sweep 12.2"""
)
def plan(
    model: Model,
    draft: Draft = None,
    device: DeviceName = "auto",
    gpu_mem: GpuMem = None,
    ram: Ram = None,
    context: Context = None,
    dtype: Dtype = "auto",
    tree: Tree = "auto",
    rule: RuleName = "match",
    hardware: Annotated[
        str | None, typer.Option(metavar="NAME", help="another machine: l40, rtx4090, ..., h200 or FILE.json")
    ] = None,
    tokens_per_sweep: Annotated[
        float | None, typer.Option(metavar="G", help="what the named tree yields; default: from the profile")
    ] = None,
    profile: ProfileFile = None,
    as_json: Json = False,
) -> None:
    """Will it fit, and how fast will it be? Reads headers only, of a folder, a hub id or a config.json."""
    from offload.outlook import Wish, look_ahead

    wish = Wish(ram, gpu_mem, context, dtype, tree, rule, hardware, profile, tokens_per_sweep, device)
    outlook = look_ahead(model, draft, wish)
    print(json.dumps(outlook.as_dict()) if as_json else outlook_lines(outlook))


@app.command(
    epilog="""Examples:

    offload tune -m Llama-3.1-70B -d Llama-3.2-1B --ram 32GiB --text book.txt --text mails.txt

    offload tune -m big -d small --text code.py --temp 0.6 --top-p 0.9 --tokens 4096 --json"""
)
def tune(
    model: Model,
    draft: Annotated[str, typer.Option("--draft", "-d", metavar="MODEL", help="small model with the same vocabulary")],
    text: Annotated[list[Path], typer.Option(metavar="FILE", help="UTF-8, of the kind to be decoded; several times")],
    temp: Temp = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    rule: RuleName = "match",
    seed: Seed = 0,
    tokens: Annotated[int, typer.Option(metavar="N", min=1, help="positions to trace")] = 2048,
    teacher_forced: Annotated[bool, typer.Option("--teacher-forced", help="trace the text itself, quicker")] = False,
    tree: Annotated[
        str | None, typer.Option(metavar="NxD", help="largest tree to time; default: what fits, up to 512x24")
    ] = None,
    device: DeviceName = "auto",
    gpu_mem: GpuMem = None,
    ram: Ram = None,
    dtype: Dtype = "auto",
    threads: Threads = None,
    link_limit: LinkLimit = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure a pair of models on this machine, so that --tree auto chooses by what is true here."""
    from offload.profile import format_json
    from offload.tune import tune as measure

    sampling = Sampling(temperature=temp, top_p=top_p, top_k=top_k, seed=seed)
    with Screen(is_quiet=quiet or as_json) as screen:
        tuned = measure(
            model,
            draft,
            text,
            sampling,
            num_tokens=tokens,
            is_teacher_forced=teacher_forced,
            progress=screen.count,
            tree=tree,
            rule=rule,
            device=device,
            gpu_memory=gpu_mem,
            ram=ram,
            dtype=dtype,
            threads=threads,
            link_limit=link_limit,
        )
    if as_json:
        print(format_json(tuned.profile.as_dict()))
        return
    print(profile_lines(tuned.profile, tuned.candidates))
    print(f"saved in {tuned.path}")


@app.command(
    epilog="""Examples:

    offload demo

    offload demo --size 2GB --tree 64x16 -p "def main(argv):" --temp 0.6"""
)
def demo(
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="Python code to go on with")
    ] = None,
    max_tokens: NumTokens = 96,
    size: Annotated[str, typer.Option(metavar="SIZE", help="how large to make the target")] = "1GB",
    ram: Annotated[
        str | None, typer.Option(metavar="SIZE", help="memory budget; default: a quarter of the size")
    ] = None,
    tree: Tree = "grown:128x20",
    rule: RuleName = "match",
    temp: Temp = 0.0,
    seed: Seed = 0,
    link_limit: LinkLimit = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """See it work on a packaged model, here and now."""
    from offload import demo as run
    from offload.request import Request

    size_bytes, sampling = parse_size(size, "--size"), Sampling(temperature=temp, seed=seed)
    request = Request(prompt or run.PROMPT, sampling, max_tokens, raw=True)
    run.check(request, tree, rule, ram=ram, link_limit=link_limit)
    with Screen(is_quiet=quiet or as_json) as screen:
        target = run.inflated_target(size_bytes, partial(screen.bytes_landed, label="making the target"))
        options = {"rule": rule, "request": request, "link_limit": link_limit}
        with run.open_demo(target, ram or size_bytes // 4, tree, screen, **options) as decoder:
            screen.say(
                f"target of {format_bytes(size_bytes)} in {target}, {format_bytes(decoder.plan.ram_bytes)} allowed"
            )
            screen.say(plan_line(decoder.plan, decoder.num_threads))
            show = partial(_show, screen, is_silent=as_json, num_layers=len(decoder.plan.layer_bytes))
            limits = {"num_plain": min(8, max_tokens), "num_tree": max_tokens}
            result = run.compare(decoder, str(request.prompt), sampling, show=show, **limits)
    if as_json:
        print(json.dumps({"none": result.plain.as_dict(), "tree": result.tree.as_dict(), "speedup": result.speedup}))
    screen.say(comparison_lines(result.plain.stats, result.tree.stats, result.num_exact, result.num_near))


def _show(screen: Screen, heading: str, pieces: Iterator[str], *, is_silent: bool, num_layers: int) -> None:
    """Print one run of the demo as it goes."""
    screen.say(f"--- {heading}")
    screen.expect_sweep(num_layers, "reading the prompt")
    for piece in pieces:
        screen.clear()
        if not is_silent:
            print(piece, end="", flush=True)
    if not is_silent:
        print()


def main() -> None:
    """Entry point of the `offload` command."""
    command = typer.main.get_command(app)
    try:
        # Not command.main(), which has its own idea of what a closed pipe and Ctrl-C mean.
        with command.make_context("offload", sys.argv[1:] or ["--help"]) as context:
            command.invoke(context)
        sys.stdout.flush()
        sys.exit(0)
    except typer.Exit as finished:
        sys.exit(finished.exit_code)
    except UserError as error:
        _fail(str(error), EXIT_USER_ERROR)
    except ReadError as error:
        _fail(str(error), EXIT_FAILED)
    except KeyboardInterrupt:
        _fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        _leave_closed_pipe()
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's, and torch may not be loaded
            _fail(_NO_DEVICE_MEMORY, EXIT_FAILED)
        if not hasattr(error, "format_message"):  # what the option parser raises carries its line in this method
            raise
        _fail(f"{error.format_message()} (see offload --help)", EXIT_USER_ERROR)


def _write_run(run: Any, screen: Screen, *, as_json: bool) -> None:
    """Print pieces as they come; whatever ends the run, what was accepted is printed and accounted for."""
    failure: BaseException | None = None
    num_shown = 0
    try:
        for piece in run:
            screen.clear()
            if not as_json:
                num_shown += len(piece)  # before the writing, because Ctrl-C strikes right after it
                sys.stdout.write(piece)
                sys.stdout.flush()
    except (KeyboardInterrupt, ReadError, UserError) as error:
        failure = error
    result = run.result()
    print(json.dumps(result.as_dict()) if as_json else result.text[num_shown:], flush=True)
    screen.say(closing_lines(result.stats, result.plan.ram_bytes))
    if failure is not None:
        raise failure


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise UserError("-p and -f exclude each other: give one of them")
    if prompt not in (None, "-"):
        name, raw = "-p", os.fsencode(str(prompt))
    elif file is None and sys.stdin.isatty():
        raise UserError("no prompt: give -p TEXT, -f FILE or pipe text into standard input")
    else:
        name = str(file) if file else "standard input"
        raw = _read_bytes(file, name)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"the prompt must be UTF-8, {name} is not at byte {error.start}: convert it first") from None
    if not text:
        raise UserError(f"the prompt is empty, {name} holds nothing: give some text")
    return text


def _read_bytes(file: Path | None, name: str) -> bytes:
    try:
        return file.read_bytes() if file else sys.stdin.buffer.read()
    except OSError as error:
        raise UserError(f"cannot read the prompt from {name} ({error.strerror}): check the path") from None


def _fail(message: str, code: int) -> NoReturn:
    """One line; what it quotes from a stranger's file must not steer the terminal."""
    line = "".join(char if char.isprintable() else "?" for char in " ".join(message.split()))
    print(f"offload: {line}", file=sys.stderr)
    sys.exit(code)


def _leave_closed_pipe() -> NoReturn:
    """Whoever read our text has seen enough; the interpreter must not try to flush the rest at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)


if __name__ == "__main__":
    main()
