"""The options of the program, each declared once; those of drawing are in `config.Sampling`.

A command takes records of them, and of each record the options that name the command. `docs/flags.md`
lists them all, and is made of what stands here. Nothing is imported that takes time.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from offload.declaration import option, unset
from offload.errors import require
from offload.units import DTYPES, EXPERTS, RULES, Sampling

# A table: what an option is, who takes it, what is said of it.
# fmt: off

CHAT_PAIR = Path(__file__).parent / "chat_pair"
PathLike = str | os.PathLike[str]
_WRITE = ("generate", "chat")
_RUN = (*_WRITE, "serve")
_LOAD = (*_RUN, "plan", "tune")
_ALL = (*_LOAD, "demo", "pack", "unpack", "verify", "build", "append", "info")


@dataclass(frozen=True)
class ModelChoice:
    """Which models."""

    model: PathLike = option(
        "--model", "-m", default="", kind=str, is_required=True, metavar="MODEL", commands=_LOAD,
        help="folder, GGUF file or hub id of the target",
        differs={one: {"is_required": False} for one in ("chat", "serve")},  # `demo` brings one
        doc="the target: folder or hub id, [quantised](quantised.md) or not, or a [GGUF "
        "file](gguf.md)",
    )
    draft: PathLike | None = option(
        "--draft", "-d", kind=str, metavar="MODEL", commands=_LOAD,
        help="small model with the same vocabulary; self:int4, self:int8: a copy",
        differs={"tune": {"is_required": True, "help": "small model, or self:int4, self:int8"}},
        doc="a small model with the same vocabulary; `self:int4`, `self:int8`: the target "
        "itself, [rounded while it is read](drafts.md), as its own draft; of one process",
    )

    @property
    def given(self) -> tuple[str, str | None]:
        """Both, as text."""
        return str(self.model), None if self.draft is None else str(self.draft)


@dataclass(frozen=True)
class TalkingModels(ModelChoice):
    """Which models a conversation is with."""

    demo: bool = option(
        "--demo", default=False, commands=("chat", "serve"), is_setting=False,
        help="the packaged pair, made larger than its memory: it answers questions about Python",
    )

    @property
    def given(self) -> tuple[str, str | None]:
        """Return both, as text; the packaged pair where it is asked for. Raises `UserError`."""
        named = [str(one) for one in (self.model, self.draft) if one]
        if self.demo:
            rule = "`demo` brings its own models"
            require(not named, rule, " and ".join(named), "leave out `model` and `draft`, or `demo`")
            return str(CHAT_PAIR / "target"), str(CHAT_PAIR / "draft")
        require(bool(self.model), "`model` says what is to run", "none", "`demo` takes the packaged one")
        return super().given


@dataclass(frozen=True)
class ModelOptions:
    """How models are loaded, and how the target's tokens are guessed."""

    ram: str | int | None = option(
        "--ram", metavar="SIZE", is_per_rank=True, commands=(*_LOAD, "demo"),
        help="memory budget, such as 8GiB, or one per rank; default: 3/4 of what is free",
        differs={"demo": {
            "help": "memory budget; default: a quarter of the size, if that works",
            "is_per_rank": False,
        }},
        doc="budget for resident layers, slots, embeddings, head, keys and values, activations "
        "and the draft; the Python process with its imported libraries (about 0.35 GiB) "
        "comes on top; default: three quarters of what is free, and a GiB less at least",
    )
    tree: str = option(
        "--tree", default="auto", metavar="TREE", commands=(*_LOAD, "demo"),
        help="auto, none, NxD (N nodes, D deep), dynamic:NxD, chain:L, chain:auto (L as guesses "
        "fare), sequences:KxL",
        differs={
            "tune": {
                "default": None, "metavar": "NxD",
                "help": "largest tree to time; default: what fits, up to 512x24",
            },
            "demo": {"default": "dynamic:128x20"},
        },
        doc="`auto`: the most tokens per second; `NxD`: static, N nodes, at most D deep; "
        "`dynamic:NxD`: the same bounds, shaped anew in every step (`grown:NxD` is its older"
        " spelling); `chain:L`; [`chain:auto`](trees-and-rules.md#chains): a chain as long "
        "as guesses come true, without a draft as long as they reach; `sequences:KxL`; "
        "`none`; of `tune` the largest one to time",
    )
    rule: str = option(
        "--rule", default="match", metavar="RULE", commands=(*_LOAD, "demo"),
        help=f"of acceptance: {', '.join(RULES)}",
        doc=f"what is accepted: {', '.join(f'`{rule}`' for rule in RULES)}; see "
        "[trees and rules](trees-and-rules.md)",
    )
    _: KW_ONLY
    config: PathLike | None = option(
        "--config", kind=str, metavar="MODEL", commands=_LOAD,
        help="folder or hub id of what a GGUF target was made from; docs/gguf.md",
        doc="folder or hub id of what a GGUF target was made from: [its config and "
        "tokenizer](gguf.md#config-and-tokenizer)",
    )
    device: str = option(
        "--device", default="auto", metavar="DEVICE", commands=_LOAD,
        help="auto, cpu, cuda or cuda:N",
        doc="`auto` takes a CUDA device where there is one; `cpu`, `cuda`, `cuda:N`",
    )
    gpu_memory: str | int | None = option(
        "--gpu-mem", metavar="SIZE", commands=_LOAD, help="device memory budget, such as 24GiB",
    )
    context: int | None = option(
        "--context", metavar="N", commands=(*_RUN, "plan"),
        help="positions for prompt and new tokens; default: at most 4096",
        doc="positions to make room for, prompt and new tokens; a smaller one leaves more memory"
        " to layers",
    )
    dtype: str = option(
        "--dtype", default="auto", metavar="TYPE", commands=_LOAD,
        help=f"{', '.join(DTYPES[:-1])} or {DTYPES[-1]}",
        doc="to compute in; `auto` is the checkpoint's own",
    )
    draft_dtype: str | None = option(
        "--draft-dtype", metavar="TYPE", commands=_LOAD,
        help="int8 or int4: hold the draft in fewer bits; default: as stored",
        doc="`int8` or `int4`: hold the draft in [fewer bits](drafts.md) than it is stored in: "
        "memory for layers, same text",
    )
    experts: str = option(
        "--experts", default=EXPERTS[0], metavar="HOW", commands=_LOAD,
        help="experts of a mixture: demand (those that a pass needs), layers (all of them), auto",
        doc="of a mixture of experts [how they come](experts.md): `demand`: those that a pass "
        "needs, `layers`: all with their layers; `auto` takes what headers say is quicker",
    )
    lenience: float = option(
        "--lenience", default=1.0, metavar="L", commands=_RUN,
        help="below 1 NOT EXACT: more guesses pass, no token at over 1/L times its chance",
        doc="below 1 [NOT exact](trees-and-rules.md#lenience-faster-and-not-exact): more guesses"
        " are accepted, no token with more than 1/L times its chance",
    )
    lookup: bool | None = option(
        "--lookup/--no-lookup", commands=_RUN,
        help="guess that text goes on as it did before; default: without a draft, and with "
        "--tree auto --rule match",
        doc="[guess](lookup.md) that text goes on as it did before; default: without a draft, "
        "and with `--tree auto --rule match`",
    )
    lookup_length: str = option(
        "--lookup-length", default="1:16", metavar="MIN:MAX", commands=_RUN,
        help="tokens that must agree for a guess by --lookup or --datastore",
    )
    ngram: PathLike | None = option(
        "--ngram", kind=Path, metavar="FILE|STORE", commands=_RUN,
        help="guess by what follows on a token in a text or a store",
    )
    datastore: PathLike | None = option(
        "--datastore", kind=Path, metavar="STORE", commands=_RUN,
        help="guess by what follows in a store of offload datastore build",
        doc="[guess](lookup.md) by what follows in a store of [`offload datastore "
        "build`](datastore.md)",
    )
    threads: int | None = option(
        "--threads", metavar="N", is_per_rank=True, counts="cores", commands=(*_RUN, "tune"),
        help="compute threads; default: the fastest, by what steps take",
    )
    profile: PathLike | None = option(
        "--profile", kind=str, metavar="FILE", commands=(*_RUN, "plan"),
        help="of offload tune, or none; default: the one that fits this run",
        doc="file written by `offload tune`, or `none`; without it the one in the cache that "
        "holds for this run",
    )
    invariant: bool | None = option(
        "--invariant/--no-invariant", commands=_RUN,
        help="the same bits with every tree; default: where layers are streamed",
        doc="[the same bits](trees-and-rules.md#the-same-bits) with every tree, or the quickest "
        "way; default: the same bits where layers are streamed; a promise of one process, "
        "refused with `--ranks`",
    )
    link_limit: str | int | None = option(
        "--link-limit", metavar="SIZE", is_per_rank=True, is_hidden=True,
        commands=("generate", "serve", "tune", "demo"),
        help="slow the stream down to this per second",
    )
    # values per rank are read by it
    ranks: str | None = option(
        "--ranks", metavar="ROLES", is_eager=True, commands=_WRITE,
        help="of offload launch: shards, or stages:0-2,draft:3; see docs/ranks.md",
        doc="among [many ranks](ranks.md) that `offload launch` has started: `shards`, or "
        "`stages:0-2,draft:3`",
    )
    pipeline: str | None = option(
        "--pipeline", metavar="MODE", commands=_WRITE,
        help="of stages: async, sync or plain, with settings; see docs/ranks.md",
        doc="of stages, how [runs follow each other](ranks.md#runs-in-flight---pipeline): "
        "`async` (default with a draft), `sync` or `plain` (default without one, and with "
        "`--tree none`), with settings",
    )
    slow_layer_s: float = option(
        "--slow-layer", default=0.0, metavar="SECONDS", least=0, is_hidden=True, commands=_WRITE,
        help="every layer takes longer",
    )
    parallel: int = option(
        "--parallel", default=1, metavar="B", least=1, commands=("generate", "serve", "plan"),
        help="texts that are written at a time, for one pass over the weights",
        differs={"serve": {
            "default": 4, "help": "texts that are written at a time; memory is planned for so many",
        }},
        doc="[texts that are written at a time](many.md), for one pass over the weights; `plan` "
        "counts their memory",
    )


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """What a text is asked for."""

    prompt: str | None = option(
        "--prompt", "-p", metavar="TEXT", is_setting=False, commands=("generate", "demo"),
        help="the prompt; '-' reads standard input",
        differs={"demo": {"help": "Python code to go on with"}},
    )
    file: Path | None = option(
        "--file", "-f", metavar="FILE", is_setting=False, commands=("generate",),
        help="read the prompt from a UTF-8 file; many of them from a .jsonl",
        doc="read the prompt from a UTF-8 file; [many of them](many.md) from a .jsonl",
    )
    system: str | None = option(
        "--system", metavar="TEXT", commands=_WRITE,
        help="what the model is told before the prompt or the first question",
        doc="what the model is told before the prompt or the first question, where it has a chat"
        " template",
    )
    max_new_tokens: int | None = option(
        "-n", "--max-tokens", default=128, metavar="N", least=0,
        commands=("generate", "chat", "demo"), help="at most so many new tokens",
        differs={
            "chat": {"default": None, "least": 1, "help": "of one answer; default: what has room"},
            "demo": {"default": 96},
        },
        doors=("python", "batch", "chat"), called={"batch": "max_tokens", "chat": "max-tokens"},
    )
    stop: str | Sequence[str] | None = option(
        "--stop", metavar="TEXT", is_several=True, commands=_WRITE,
        help="end before this string; may be given several times",
        doors=("python", "batch", "chat"),
    )
    json_schema: Mapping[str, Any] | str | None = option(
        "--json-schema", kind=Path, metavar="FILE", commands=("generate",),
        help="write JSON that this schema allows; docs/grammar.md", doors=("python", "batch"),
        doc="write JSON that this schema allows: the new text keeps [a grammar](grammar.md), one"
        " of them at most",
    )
    regex: str | None = option(
        "--regex", metavar="TEXT", commands=("generate",), doors=("python", "batch"),
        help="write what this regular expression matches as a whole",
    )
    grammar: str | None = option(
        "--grammar", kind=Path, metavar="FILE", commands=("generate",), doors=("python", "batch"),
        help="write what these rules in Lark's notation allow",
    )
    session: Path | None = option(
        "--session", metavar="FILE", commands=_WRITE,
        help="keep tokens, keys and values there, and go on from there; see docs/flags.md",
        doc="keep the text and what was computed for it, and [go on from there](#sessions)",
    )
    raw: bool = option(
        "--raw", default=False, commands=("generate",), doors=("python",), help="no chat template",
    )
    num_logprobs: int | None = option(
        "--logprobs", metavar="K", commands=("generate",), doors=("python", "batch"),
        called={"batch": "logprobs"},
        help="with --json: of each new token, and of K of the likeliest",
        doc="with `--json`: under `logprobs` of each new token its log-probability and the K "
        "likeliest tokens with theirs, by the target's own logits, before penalties, biases "
        "and sampling",
    )
    samples: int = option(
        "--samples", default=1, metavar="K", least=1, commands=("generate",),
        help="so many texts of a prompt, by seeds that follow --seed",
    )
    out: Path | None = option(
        "--out", metavar="FILE", commands=("generate",),
        help="of many prompts: go on with the results in this file; default: stdout",
    )


@dataclass(frozen=True)
class SamplingOptions:
    """How the tokens of a text are drawn, as far as it is said."""

    given: Mapping[str, Any] = unset(Sampling)  # an option that is not given is left to the model
    greedy: bool = option(
        "--greedy", default=False, commands=_WRITE,
        help="the likeliest token always, whatever else is said",
    )


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What is shown."""

    as_json: bool = option(
        "--json", default=False, help="one JSON object on stdout and nothing else",
        commands=tuple(name for name in _ALL if name not in ("chat", "serve")),
    )
    quiet: bool = option(
        "--quiet", "-q", default=False, help="nothing on stderr but errors",
        commands=tuple(name for name in _ALL if name not in ("plan", "info")),
    )
    verbose: bool = option(
        "--verbose", "-v", default=False, help="say more: threads, slots, why this tree",
        commands=(*_RUN, "plan", "demo"),
    )


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Which machine `offload plan` is asked about."""

    hardware: str | None = option(
        "--hardware", metavar="NAME", commands=("plan",),
        help="another machine: l40, rtx4090, ..., h200 or FILE.json",
        doc="another machine by name or file; see [memory](memory.md)",
    )
    disk_speed: str | None = option(
        "--disk-speed", metavar="SIZE", commands=("plan",),
        help="of the disk per second, such as 3GB; default: measured",
    )
    tokens_per_sweep: float | None = option(
        "--tokens-per-sweep", metavar="G", commands=("plan",),
        help="what the named tree yields; default: from the profile",
    )
    # elsewhere `--ranks` are roles
    cluster: Path | None = option(
        "--ranks", metavar="FILE", commands=("plan",), is_shared=False,
        help="several machines, as a JSON file describes them; docs/ranks.md",
        doc="[several machines](ranks.md#planning-a-cluster), as a JSON file describes them; "
        "`-v`: and what takes their memory",
    )


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What `offload tune` measures with."""

    text: Sequence[Path] = option(
        "--text", default=(), kind=Path, is_required=True, is_several=True, metavar="FILE",
        commands=("tune",), help="UTF-8, of the kind to be decoded; several times",
    )
    tokens: int = option(
        "--tokens", default=2048, metavar="N", least=1, commands=("tune",),
        help="positions to trace",
    )
    teacher_forced: bool = option(
        "--teacher-forced", default=False, commands=("tune",),
        help="trace the text itself, quicker",
    )


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Whom a server serves, and how much it takes from them."""

    host: str = option(
        "--host", default="127.0.0.1", metavar="ADDRESS", commands=("serve",),
        help="to listen on; any but loopback needs a key",
    )
    port: int = option(
        "--port", default=8080, metavar="N", commands=("serve",),
        help="to listen on; 0 takes a free one",
    )
    api_key_file: Path | None = option(
        "--api-key-file", metavar="FILE", commands=("serve",),
        help="keys that let in, one a line; default: none is asked for",
    )
    queue: int = option(
        "--queue", default=64, metavar="Q", least=1, commands=("serve",),
        help="requests that may wait; more are refused with 429",
    )
    grace: float = option(
        "--grace", default=30.0, metavar="SECONDS", least=0, most=86_400, commands=("serve",),
        help="for texts under way when the server is ended",
    )
    max_body: str = option(
        "--max-body", default="4MiB", metavar="SIZE", commands=("serve",),
        help="largest body of a request",
    )


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What `offload demo` makes."""

    size: str = option(
        "--size", default="1GB", metavar="SIZE", commands=("demo",),
        help="how large to make the target",
    )


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    """What `offload pack` does."""

    out: Path | None = option("--out", metavar="DIR", commands=("pack",), help="folder to make")
    verify: bool = option(
        "--verify", default=False, commands=("pack",),
        help="instead decode all of a packed model and compare its checksums",
    )


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """What `offload verify` compares with."""

    manifest: Path | None = option(
        "--manifest", metavar="FILE", commands=("verify",),
        help="checksums to compare with; default: beside it, and written there",
    )
    write: bool = option(
        "--write", default=False, commands=("verify",),
        help="write FILE of --manifest, too, once nothing speaks against the model",
    )


# In the order of docs/flags.md.
RECORDS: tuple[type, ...] = (
    ModelChoice,
    TalkingModels,
    ModelOptions,
    Sampling,
    SamplingOptions,
    TextOptions,
    OutputOptions,
    PlanOptions,
    TuneOptions,
    ServerOptions,
    PackOptions,
    VerifyOptions,
    DemoOptions,
)
