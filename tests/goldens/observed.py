"""What a user meets of all options, observed from outside: help, settings, doors, refusals and plans.

Each function returns plain JSON, and what is said of a bad value is one line. Nothing here names a module that holds
options: what is observed stays comparable when they move.
"""

import inspect
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import typer
from refusals import assert_refused
from shell import shell
from test_device_planner import CONFIGS

import offload
from offload.errors import UserError

KNOWN = ("l40", "rtx4090", "rtx3090", "a100-80gb", "h100", "h200")
MACHINES: dict[str, tuple[str, ...]] = {  # arguments of `offload plan`
    **{name: ("--hardware", name) for name in KNOWN},
    "l40 of 24 GiB": ("--hardware", "l40", "--gpu-mem", "24GiB", "--context", "2048"),
    "l40 and little RAM": ("--hardware", "l40", "--ram", "64GB"),
    "h100 in float32": ("--hardware", "h100", "--dtype", "float32", "--ram", "400GiB"),
    "rtx4090 for four": ("--hardware", "rtx4090", "--parallel", "4", "--context", "1024"),
    "l40 with a small draft": ("--hardware", "l40", "--draft-dtype", "int4", "--rule", "sequoia"),
    "a host alone": ("--hardware", "host.json", "--ram", "48GiB", "--disk-speed", "3GB"),
}
TREE = ("--tree", "64x16", "--tokens-per-sweep", "5.5")


def commands() -> Iterator[tuple[str, Any]]:
    """Every command by its whole name."""
    from offload.commands import app, every_command

    every_command()  # which registers them
    todo = [("offload", typer.main.get_command(app))]
    while todo:
        name, command = todo.pop()
        yield name, command
        todo += [(f"{name} {own_name}", command_) for own_name, command_ in getattr(command, "commands", {}).items()]


def help_texts() -> dict[str, dict[str, str]]:
    """`{command: {names and metavar: what the brackets behind the help say}}`, hidden options included."""
    results = {}
    for name, command in commands():
        context = command.make_context(name, [], resilient_parsing=True)
        results[name] = {}
        for param in command.params:
            is_hidden = getattr(param, "hidden", False)
            param.hidden = False
            names, help_text = param.get_help_record(context) or (param.make_metavar(context), "")
            param.hidden = is_hidden
            bracket = re.search(r"\[([^\[\]]*)\]$", help_text)
            extra = ["hidden"] if is_hidden else []
            extra += ["several"] if param.multiple else []
            results[name][names] = "; ".join([bracket[1] if bracket else "", *extra]).removeprefix("; ")
    return results


def settings(folder: Path) -> dict[str, list[str]]:
    """Keys of config.toml, for all commands and for each; variables are made of the first."""
    file = folder / "offload" / "config.toml"
    file.parent.mkdir(exist_ok=True)
    results = {}
    # An error's line has an end, and these lists are longer.
    with (
        patch.dict("os.environ", XDG_CONFIG_HOME=str(folder)),
        patch("offload.errors._MAX_CHARS", 9999),
        patch("offload.cli.defaults._NUM_NAMED", 9999),
    ):
        for name in ("", *(name.removeprefix("offload ") for name, _ in commands() if name.count(" ") == 1)):
            file.write_text(f"[{name}]\nnonsense = 1" if name else "nonsense = 1")
            text = shell("plan").err.partition("or name one of ")[2].strip()
            results[name or "all"] = sorted(text.split(", "))
    file.unlink()
    return results


def http_schemas() -> dict[str, Any]:
    from offload.server.openai.bodies import ChatBody, CompletionBody

    return {kind.__name__: undescribed(kind.model_json_schema()) for kind in (ChatBody, CompletionBody)}


def undescribed(schema: Any) -> Any:
    """A schema without what docstrings say."""
    if isinstance(schema, list):
        return [undescribed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: undescribed(value)
        for name, value in schema.items()
        if not (name == "description" and isinstance(value, str))
    }


def names_of_doors(folder: Path, model: Path) -> dict[str, Any]:
    """Names that the other doors take: a chat's `/set`, a file of prompts, Python."""
    from offload.cli.slash_commands import SlashCommands
    from offload.engine.decoder import Decoder

    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "x", "nonsense": 1}\n')
    batch = refusal("generate", "-m", model, "-f", prompts)
    with pytest.raises(UserError) as refused:
        list(SlashCommands(MagicMock(), MagicMock()).obey("/set", "nonsense 1") or ())
    with pytest.raises(TypeError) as unknown:
        Decoder.stream(SimpleNamespace(start=None), "x", nonsense=1)  # type: ignore[arg-type, call-arg]
    return {
        "/set": between(str(refused.value), "knows ", ", got"),
        "a file of prompts": sorted(between(batch, "one of ", ", got")),
        "Decoder.generate": sorted(between(str(unknown.value), "only ", "")),
        "load": sorted(map(in_words, parameters(offload.load)), key=by_name),
    }


def parameters(function: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def in_words(parameter: inspect.Parameter) -> str:
    return f"{parameter.kind.name} {parameter.name} = {spelled(parameter.default)}"


def by_name(parameter: str) -> str:
    """Only the order of positional ones is told."""
    return parameter if parameter.startswith("KEYWORD_ONLY") else ""


def spelled(value: object) -> str:
    return value.__name__ if callable(value) and hasattr(value, "__name__") else repr(value)


def between(text: str, begin: str, end: str) -> list[str]:
    behind = text.partition(begin)[2]
    return (behind.partition(end)[0] if end else behind).split(", ")


def refusal(*arguments: object) -> str:
    """What a command line is told, in one line on standard error and nothing else."""
    outcome = shell(*arguments)
    assert_refused(outcome)
    return outcome.err.strip()


def said_at(door: str, asked: str, folder: Path, model: Path) -> str:
    """What is said of a bad value, in the form of the door."""
    at_doors: dict[str, Any] = {
        "flags": by_flags,
        "variables": by_variable,
        "config.toml": by_file,
        "a file of prompts": in_line,
        "load": lambda asked, *_: said(in_load, in_python(asked)),
        "Decoder.generate": lambda asked, *_: said(in_request, in_python(asked)),
        "HTTP": lambda asked, *_: said(in_body, json.loads(asked)),
        "/set": lambda asked, *_: said(in_chat, asked),
    }
    return at_doors[door](asked, folder, model)


def by_flags(line: str, folder: Path, model: Path) -> str:
    """A model is named, and a prompt, where the line names neither."""
    command, *arguments = shlex.split(line.replace("MODEL", str(model)).replace("FOLDER", str(folder)))
    of_models = ("generate", "chat", "plan", "serve", "tune")
    named = () if command not in of_models or "-m" in arguments else ("-m", model)
    text = ("-p", "x") if command == "generate" and not {"-f", "-p"} & {*arguments} else ()
    with patch("offload.checkpoint.packaged.inflate", None):  # no target of a demo is made in vain
        return refusal(command, *named, *text, *arguments)


def by_variable(line: str, folder: Path, model: Path) -> str:
    variable, value = line.split("=")
    with patch.dict("os.environ", {variable: value}):
        return refusal("generate", "-m", model, "-p", "x")


def by_file(line: str, folder: Path, model: Path) -> str:
    file = folder / "offload" / "config.toml"
    file.parent.mkdir()
    file.write_text(line)
    with patch.dict("os.environ", XDG_CONFIG_HOME=str(folder)):
        return refusal("generate", "-m", model, "-p", "x").replace(str(file), "FILE")


def said(function: Any, asked: Any) -> str:
    with pytest.raises(Exception) as raised:
        function(asked)
    assert type(raised.value).__name__ in ("UserError", "Refusal", "TypeError")
    return str(raised.value)


def in_python(asked: str) -> dict[str, Any]:
    """Keyword arguments; keys that are numbers are ids of tokens."""
    keyed = json.loads(asked, object_pairs_hook=lambda pairs: {int(k) if k.isdigit() else k: v for k, v in pairs})
    return dict(keyed)


def in_load(options: dict[str, Any]) -> None:
    """Before the model is looked for: one of the hub would be downloaded, hundreds of gigabytes perhaps."""
    looked_for = AssertionError("a model is looked for although nothing could be done with it")
    with patch("offload.checkpoint.open.open_headers", side_effect=looked_for):
        offload.load("some/model", "some/draft", **options)


def in_request(wishes: dict[str, Any]) -> None:
    from offload.engine.decoder import Decoder

    check = SimpleNamespace(start=lambda request: request.check() or request.stops or ())
    Decoder.stream(check, "x", **wishes)  # type: ignore[arg-type]


def in_body(fields: dict[str, Any]) -> None:
    from offload.server.core.body import parse
    from offload.server.core.routes import submit
    from offload.server.openai.bodies import ChatBody
    from offload.server.settings import ServerSettings

    body = parse(ChatBody, json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode())
    engine = SimpleNamespace(
        most_requests=8, prepare=lambda request: request.check() or request, submit=lambda *_: None
    )
    submit(engine, ServerSettings(model_id="model"), body)  # type: ignore[arg-type]


def in_line(asked: str, folder: Path, model: Path) -> str:
    prompts = folder / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "x", **json.loads(asked)}) + "\n")
    return refusal("generate", "-m", model, "-f", prompts).replace(str(prompts), "FILE")


def in_chat(text: str) -> None:
    from offload.cli.slash_commands import SlashCommands
    from offload.sampling_options import Sampling

    chat = SimpleNamespace(sampling=Sampling(), max_new_tokens=None, stop=None)
    SlashCommands(chat, MagicMock()).obey("/set", text)  # type: ignore[arg-type]


def plans(folder: Path) -> dict[str, Any]:
    """`plan --json` of Llama-2-70B and -7B on a dozen machines, floats to six digits."""
    models = []
    for name in ("Llama-2-70B", "Llama-2-7B"):
        (folder / name).mkdir()
        models.append(folder / name / "config.json")
        models[-1].write_text(json.dumps(CONFIGS[name]))
    host = {"memory_bytes_per_s": "60GB/s", "flops_per_s": 1e12, "ram_bytes": "64GiB", "disk_bytes_per_s": "3GB/s"}
    (folder / "host.json").write_text(json.dumps(host))
    results = {}
    for name, arguments in MACHINES.items():
        arguments = tuple(str(folder / argument) if argument == "host.json" else argument for argument in arguments)
        outcome = shell("plan", "-m", models[0], "-d", models[1], *arguments, *TREE, "--json")
        results[name] = shortened(json.loads(outcome.out)) if outcome.code == 0 else outcome.err.strip()
    return results


def shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: shortened(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [shortened(entry) for entry in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
