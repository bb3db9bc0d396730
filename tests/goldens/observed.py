"""What a user meets of all options, observed from outside: help, settings, doors, refusals and plans.

Each function returns plain JSON. Nothing here names a module that holds options: what is observed stays comparable
when they move.
"""

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import typer
from shell import shell
from test_device_planner import CONFIGS

import offload
from offload.errors import UserError

GIB = 2**30
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
        todo += [(f"{name} {own}", one) for own, one in getattr(command, "commands", {}).items()]


def help_texts() -> dict[str, dict[str, str]]:
    """`{command: {names and metavar: what the brackets behind the help say}}`, hidden options included."""
    found = {}
    for name, command in commands():
        context = command.make_context(name, [], resilient_parsing=True)
        found[name] = {}
        for param in command.params:
            is_hidden = getattr(param, "hidden", False)
            param.hidden = False
            names, told = param.get_help_record(context) or (param.make_metavar(context), "")
            param.hidden = is_hidden
            bracket = re.search(r"\[([^\[\]]*)\]$", told)
            more = ["hidden"] if is_hidden else []
            more += ["several"] if param.multiple else []
            found[name][names] = "; ".join([bracket[1] if bracket else "", *more]).removeprefix("; ")
    return found


def settings(folder: Path) -> dict[str, list[str]]:
    """Keys of config.toml, for all commands and for each; variables are made of the first."""
    file = folder / "offload" / "config.toml"
    file.parent.mkdir(exist_ok=True)
    found = {}
    # An error's line has an end, and these lists are longer.
    with (
        patch.dict("os.environ", XDG_CONFIG_HOME=str(folder)),
        patch("offload.errors._MAX_CHARS", 9999),
        patch("offload.cli.flags._NUM_NAMED", 9999),
    ):
        for name in ("", *(name.removeprefix("offload ") for name, _ in commands() if name.count(" ") == 1)):
            file.write_text(f"[{name}]\nnonsense = 1" if name else "nonsense = 1")
            told = shell("plan").err.partition("or name one of ")[2].strip()
            found[name or "all"] = sorted(told.split(", "))
    file.unlink()
    return found


def http_schemas() -> dict[str, Any]:
    from offload.server.protocol import ChatBody, CompletionBody

    return {kind.__name__: undescribed(kind.model_json_schema()) for kind in (ChatBody, CompletionBody)}


def undescribed(schema: Any) -> Any:
    """A schema without what docstrings say."""
    if isinstance(schema, list):
        return [undescribed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: undescribed(one) for name, one in schema.items() if not (name == "description" and isinstance(one, str))
    }


def names_of_doors(folder: Path, model: Path) -> dict[str, Any]:
    """Names that the other doors take: a chat's `/set`, a file of prompts, Python."""
    from offload.cli.chat_commands import ChatCommands
    from offload.engine.decoder import Decoder

    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "x", "nonsense": 1}\n')
    batch = refusal("generate", "-m", model, "-f", prompts)
    with pytest.raises(UserError) as refused:
        list(ChatCommands(MagicMock(), MagicMock(), MagicMock()).obey("/set", "nonsense 1") or ())
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


def in_words(one: inspect.Parameter) -> str:
    return f"{one.kind.name} {one.name} = {told(one.default)}"


def by_name(parameter: str) -> str:
    """Only the order of positional ones is told."""
    return parameter if parameter.startswith("KEYWORD_ONLY") else ""


def told(value: object) -> str:
    return value.__name__ if callable(value) and hasattr(value, "__name__") else repr(value)


def between(text: str, begin: str, end: str) -> list[str]:
    behind = text.partition(begin)[2]
    return (behind.partition(end)[0] if end else behind).split(", ")


BAD: dict[str, tuple[object, ...]] = {
    name: tuple(name.split()[1:]) if name.startswith("generate") else tuple(name.split())
    for name in (
        "generate --temp -1", "generate --temp hot", "generate --temp nan", "generate --top-p 0.5",
        "generate --temp 1 --top-p 2", "generate --temp 1 --top-k -1", "generate --temp 1 --top-k 1.5",
        "generate --temp 1 --min-p 1.5", "generate --seed -1", "generate --repeat-penalty 0",
        "generate --presence-penalty 101", "generate --frequency-penalty nan", "generate --logit-bias 5",
        "generate --logit-bias 5:1 --logit-bias 5:2", "generate --logprobs 2", "generate --logprobs -2 --json",
        "generate -n -2", "generate --stop=", "generate --system Be. --raw", "generate --samples 0",
        "generate --samples 2", "generate --out x", "generate --parallel 0", "generate --parallel 999",
        "generate --ram lots", "generate --ram 0", "generate --gpu-mem much", "generate --device tpu",
        "generate --dtype int3", "generate --draft-dtype int3", "generate --experts some", "generate --context 0",
        "generate --tree oak", "generate --rule luck", "generate --lenience 0", "generate --threads 0",
        "generate --threads many", "generate --threads 9999", "generate --lookup-length 0:4",
        "generate --link-limit fast", "generate --ranks some", "generate --pipeline async",
        "generate --slow-layer -1", "generate --slow-layer 1", "generate --invariant --ranks shards",
        "generate --profile nowhere.json", "generate --datastore /nowhere", "generate --regex a --grammar nowhere",
        "generate --session /nowhere/kept", "generate -f nowhere.txt", "generate --nonsense",
        "chat -n 0", "chat --min-p 0.5", "plan --hardware l41", "plan --tokens-per-sweep 4", "plan --disk-speed fast",
        "plan --ranks lab.json --ram 1GiB", "serve --port 70000", "serve --host 0.0.0.0", "serve --max-body lots",
        "serve --queue 0", "serve --grace -1", "tune", "tune --text nowhere.txt -d self:int8 --temp -1",
    )
}  # fmt: skip
IN_PYTHON: list[dict[str, Any]] = [
    {"ram": "lots"}, {"ram": 0}, {"tree": 5}, {"tree": "oak"}, {"rule": 5}, {"lenience": "a"}, {"context": 1.5},
    {"parallel": 0}, {"threads": 0}, {"lookup": "yes"}, {"ngram": 5}, {"device": None}, {"device": "tpu"},
    {"gpu_memory": "much"}, {"link_limit": "fast"}, {"draft_dtype": "int3"}, {"experts": None},
]  # fmt: skip
IN_REQUESTS: list[dict[str, Any]] = [
    {"temperature": "a"}, {"temperature": -1}, {"top_p": 0}, {"top_k": "5"}, {"min_p": 2}, {"seed": -5},
    {"repeat_penalty": 0}, {"presence_penalty": 101}, {"logit_bias": {5: "x"}}, {"logit_bias": 5},
    {"max_new_tokens": -1}, {"max_new_tokens": "5"}, {"stop": 5}, {"stop": ""}, {"num_logprobs": -1},
    {"regex": 5}, {"regex": "a", "grammar": "b"}, {"json_schema": "{"},
]  # fmt: skip
IN_BODIES: list[dict[str, Any]] = [
    {"temperature": "hot"}, {"temperature": -1}, {"top_p": 0}, {"top_k": 1.5}, {"min_p": [1]}, {"seed": "x"},
    {"presence_penalty": 3}, {"repeat_penalty": 0}, {"logit_bias": {"x": 1}}, {"logit_bias": {"5": 101}},
    {"max_tokens": -1}, {"n": 0}, {"stop": [5]}, {"nonsense": 1}, {"messages": []}, {"offload": {"tree": 5}},
]  # fmt: skip
IN_LINES: list[dict[str, Any]] = [
    {"max_tokens": -1}, {"max_tokens": "9"}, {"temperature": "hot"}, {"top_p": 0.5}, {"min_p": 2}, {"seed": -1},
    {"logit_bias": {"x": 1}}, {"regex": ["a"]}, {"regex": "a", "json_schema": {}}, {"logprobs": -1},
    {"stop": {"a": 1}}, {"stop": [3]}, {"id": 1.5}, {"temperature": 1, "repeat_penalty": 0},
]  # fmt: skip
IN_CHAT = ("temperature hot", "temperature -1", "top-k 1.5", "min-p 2", "seed -1", "max-tokens 0", "max-tokens many")


def refusal(*arguments: object) -> str:
    outcome = shell(*arguments)
    assert outcome.code in (1, 2) and outcome.out == "", outcome
    return outcome.err.strip()


def error_lines(folder: Path, model: Path) -> dict[str, Any]:
    """What is said of bad values, in the form of each door."""
    return {
        "flags": dict(by_flag(model)),
        "variables": dict(by_variable(folder, model)),
        "load": {json.dumps(one): said(offload.load, model, **one) for one in IN_PYTHON},
        "Decoder.generate": {json.dumps(one): said(in_request, **one) for one in IN_REQUESTS},
        "HTTP": {json.dumps(one): said(in_body, one) for one in IN_BODIES},
        "a file of prompts": {json.dumps(one): in_line(folder, model, one) for one in IN_LINES},
        "/set": {one: said(in_chat, one) for one in IN_CHAT},
    }


def by_flag(model: Path) -> Iterator[tuple[str, str]]:
    for name in BAD:
        command, *arguments = name.split()
        text = ("-p", "x") if command == "generate" and "-f" not in arguments else ()
        yield name, refusal(command, "-m", model, *text, *arguments)


def by_variable(folder: Path, model: Path) -> Iterator[tuple[str, str]]:
    file = folder / "offload" / "config.toml"
    file.parent.mkdir(exist_ok=True)
    for variable, value in (("OFFLOAD_RAM", "lots"), ("OFFLOAD_TEMP", "-1"), ("OFFLOAD_MAX_TOKENS", "many")):
        with patch.dict("os.environ", {variable: value}):
            yield f"{variable}={value}", refusal("generate", "-m", model, "-p", "x")
    with patch.dict("os.environ", XDG_CONFIG_HOME=str(folder)):
        for line in ('ram = "lots"', "temp = -1", "min-p = 0.5", 'tree = "oak"', 'threads = "many"', "quiet = 3"):
            file.write_text(line)
            yield line, refusal("generate", "-m", model, "-p", "x").replace(str(file), "FILE")
    file.unlink()


def said(function: Any, *arguments: Any, **how: Any) -> str:
    with pytest.raises(Exception) as raised:
        function(*arguments, **how)
    assert type(raised.value).__name__ in ("UserError", "Refusal", "TypeError")
    return str(raised.value)


def in_request(**wishes: Any) -> None:
    from offload.engine.decoder import Decoder

    check = SimpleNamespace(start=lambda request, **_: request.check() or request.stops or ())
    Decoder.stream(check, "x", **wishes)  # type: ignore[arg-type]


def in_body(fields: dict[str, Any]) -> None:
    from offload.server import protocol as orders
    from offload.server.protocol import ChatBody, ServerSettings, parse

    body = parse(ChatBody, json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode())
    decoder = SimpleNamespace(encode=lambda *_, **__: [1, 2], room=lambda _: 50, plan=SimpleNamespace(context=64))
    engine = SimpleNamespace(decoder=decoder, most_requests=8, submit=lambda request, **_: request.check())
    orders.order_chat(engine, ServerSettings(model_id="model"), body)  # type: ignore[arg-type]


def in_line(folder: Path, model: Path, fields: dict[str, Any]) -> str:
    prompts = folder / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "x", **fields}) + "\n")
    return refusal("generate", "-m", model, "-f", prompts).replace(str(prompts), "FILE")


def in_chat(text: str) -> None:
    from offload.cli.chat_commands import ChatCommands
    from offload.sampling_options import Sampling

    chat = SimpleNamespace(sampling=Sampling(), max_new_tokens=None, stop=None)
    ChatCommands(chat, MagicMock(), MagicMock()).obey("/set", text)  # type: ignore[arg-type]


def plans(folder: Path) -> dict[str, Any]:
    """`plan --json` of Llama-2-70B and -7B on a dozen machines, floats to six digits."""
    models = []
    for name in ("Llama-2-70B", "Llama-2-7B"):
        (folder / name).mkdir()
        models.append(folder / name / "config.json")
        models[-1].write_text(json.dumps(CONFIGS[name]))
    host = {"memory_bytes_per_s": "60GB/s", "flops_per_s": 1e12, "ram_bytes": "64GiB", "disk_bytes_per_s": "3GB/s"}
    (folder / "host.json").write_text(json.dumps(host))
    found = {}
    for name, arguments in MACHINES.items():
        arguments = tuple(str(folder / one) if one == "host.json" else one for one in arguments)
        outcome = shell("plan", "-m", models[0], "-d", models[1], *arguments, *TREE, "--json")
        found[name] = shortened(json.loads(outcome.out)) if outcome.code == 0 else outcome.err.strip()
    return found


def shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: shortened(one) for name, one in value.items()}
    if isinstance(value, list):
        return [shortened(one) for one in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
