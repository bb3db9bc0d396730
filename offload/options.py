"""The options of the program, each declared once; how tokens are drawn is in `sampling_options`.

A command takes records of them, and of each record the options that name the command.
`docs/flags.md` is made of what stands here. Nothing is imported that takes time.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar

from offload.declaration import given_of, option
from offload.errors import require
from offload.machine import MAX_THREADS
from offload.rules import RULES
from offload.sampling_options import MOST_SAMPLES, Sampling
from offload.units import ByteSize, Rate, parse_cache_size

# A table: what an option is, who takes it, what is said of it.
# fmt: off

DTYPES = ("auto", "bfloat16", "float16", "float32")
KV_DTYPES = ("auto", "fp8", "int8")
# how routed experts come: one by one as passes need them, or with their layers
EXPERTS = ("auto", "demand", "layers")
CHAT_PAIR = Path(__file__).parent / "chat_pair"
DEMO_PAIR = CHAT_PAIR.with_name("demo_pair")
PathLike = str | os.PathLike[str]
_WRITE = ("generate", "chat")
_RUN = (*_WRITE, "serve")
_LOAD = (*_RUN, "plan", "tune")
_ALL = (*_LOAD, "list", "demo", "pack", "unpack", "verify", "build", "append", "info")


@dataclass(frozen=True)
class ModelChoice:
    """Which models."""

    GROUP: ClassVar[str] = "Model"
    model: PathLike = option(
        "--model", "-m", default="", kind=str, is_required=True, metavar="MODEL", commands=_LOAD,
        is_main=True,
        help="folder, GGUF file or hub id of the target model",
        differs={command: {"is_required": False} for command in ("chat", "serve")},  # `demo` brings one
        doc="the target: folder or hub id, [quantised](quantised.md) or not, or a [GGUF "
        "file](gguf.md)",
    )
    draft: PathLike | None = option(
        "--draft", "-d", kind=str, metavar="MODEL", commands=_LOAD, is_main=True,
        help="small model with the same vocabulary, which guesses ahead; self:int4, self:int8: a copy "
        "of the target in fewer bits; mtp: layers that its files carry; eagle3:PATH, dflash:PATH: a head made for "
        "it; auto: what is quickest here; +lookup, +store:PATH beside it",
        differs={"tune": {"is_required": True, "help": "small model that guesses ahead, or self:int4, self:int8"}},
        doc="what guesses ahead: a small model, `self:int4` or `self:int8`, `mtp`, "
        "`eagle3:PATH`, `dflash:PATH`, `auto`; see [drafts](drafts.md); "
        "`A+lookup+store:PATH` joins others to it, `self:int4+MODEL` or `self:int4+mtp` a smaller one "
        "that guesses below the copy",
    )

    def names(self) -> tuple[str, str | None]:
        """Return both, as text."""
        return str(self.model), None if self.draft is None else str(self.draft)


@dataclass(frozen=True)
class TalkingModels(ModelChoice):
    """Which models a conversation is with."""

    demo: bool = option(
        "--demo", default=False, commands=("chat", "serve"), is_setting=False, is_main=True,
        help="a packaged toy in place of --model: it answers questions about Python",
    )

    def names(self) -> tuple[str, str | None]:
        """Return both, as text; the packaged pair where it is asked for. Raises `UserError`."""
        named = [str(path) for path in (self.model, self.draft) if path]
        if self.demo:
            requirement = "`demo` brings its own models"
            require(not named, requirement, " and ".join(named), "leave out `model` and `draft`, or `demo`")
            return str(CHAT_PAIR / "target"), str(CHAT_PAIR / "draft")
        way = "give a folder, a GGUF file or a hub id, or `demo` for the packaged one"
        require(bool(self.model), "`model` says what is to run", "none", way)
        return super().names()


@dataclass(frozen=True)
class ModelOptions:
    """How models are loaded, and how the target's tokens are guessed."""

    GROUP: ClassVar[str] = "Memory"
    ram: str | int | None = option(
        "--ram", metavar="SIZE", reads=ByteSize.parse, is_per_rank=True, commands=(*_LOAD, "demo"), is_main=True,
        help="memory budget, such as 8GiB; default: 3/4 of what is free",
        differs={"demo": {
            "help": "memory budget; default: a quarter of the size, if that works",
            "is_per_rank": False,
        }},
        doc="[budget](memory.md) for everything but Python itself (about 0.35 GiB); default: what is free less a "
        "quarter, or less 1 GiB where that is more",
    )
    tree: str = option(
        "--tree", default="auto", metavar="TREE", commands=(*_LOAD, "demo"), group="Guessing",
        help="tree of guesses: auto, none, NxD (N nodes, D deep), dynamic:NxD, chain:L, chain:auto (as "
        "long as guesses come true), sequences:KxL",
        differs={
            "tune": {
                "default": None, "metavar": "NxD",
                "help": "largest tree to time; default: what fits, up to 512x24",
            },
        },
        doc="[kind of tree](trees-and-rules.md#which-tree), such as `64x16` or `none`; of `tune` the largest to time",
    )
    rule: str = option(
        "--rule", default="match", metavar="RULE", commands=(*_LOAD, "demo"), group="Guessing",
        help=f"rule by which guesses are accepted: {', '.join(RULES)}",
        doc=f"[what is accepted](trees-and-rules.md#rules-of-acceptance): {', '.join(f'`{rule}`' for rule in RULES)}",
    )
    _: KW_ONLY
    config: PathLike | None = option(
        "--config", kind=str, metavar="MODEL", commands=_LOAD, group="Model",
        help="folder or hub id of the model that a GGUF file was made from; see docs/gguf.md",
        doc="folder or hub id of [what a GGUF file was made from](gguf.md#config-and-tokenizer)",
    )
    device: str = option(
        "--device", default="auto", metavar="DEVICE", commands=_LOAD,
        help="device that computes: auto, cpu, cuda, cuda:N, or several cards, cuda:N,M",
        doc="device that computes: auto, cpu, cuda, cuda:N, or [several cards](ranks.md#two-cards), cuda:N,M",
    )
    gpu_memory: str | int | None = option(
        "--gpu-mem", metavar="SIZE", reads=ByteSize.parse, commands=_LOAD, differs={"plan": {"is_main": True}},
        help="memory budget on the GPU, such as 24GiB",
    )
    context: int | None = option(
        "--context", metavar="N", within="1 to 2^30", remedy="prompt and new tokens have to fit, 4096 is usual",
        commands=(*_RUN, "plan"), is_main=True,
        help="make room for N tokens, prompt and new ones; default: the model's limit, at most 4096",
        differs={command: {"is_main": False} for command in ("chat", "serve")},  # eight matter first
    )
    dtype: str = option(
        "--dtype", default="auto", metavar="TYPE", choices=DTYPES, commands=_LOAD, group="Model",
        help=f"type to compute in: {', '.join(DTYPES[:-1])} or {DTYPES[-1]}",
        doc="to compute in; `auto` is the checkpoint's own",
    )
    kv_dtype: str = option(
        "--kv-dtype", default=KV_DTYPES[0], metavar="TYPE", choices=KV_DTYPES, commands=(*_RUN, "plan"),
        help="NOT EXACT with fp8 or int8: the target's keys and values in half the memory, or less",
        doc="NOT exact with `fp8`, `int8`: the target's keys and values [in half the "
        "memory](memory.md#smaller-caches)",
    )
    draft_dtype: str | None = option(
        "--draft-dtype", metavar="TYPE", commands=_LOAD, group="Guessing",
        help="hold the draft in fewer bits: int8 or int4; default: as it is stored",
        doc="`int8` or `int4`: hold the draft in [fewer bits](drafts.md): same text",
    )
    experts: str = option(
        "--experts", default=EXPERTS[0], metavar="HOW", choices=EXPERTS, commands=_LOAD,
        help="how the experts of a mixture are read: demand (those that a pass needs), layers (all of "
        "them), auto",
        doc="[how experts come](experts.md): `demand`, those that a pass needs; `layers`, all; "
        "`auto`",
    )
    lenience: float = option(
        "--lenience", default=1.0, metavar="L", commands=_RUN, group="Guessing",
        help="NOT EXACT below 1: more guesses pass, and a token is drawn with up to 1/L times its chance",
        doc="[NOT exact](trees-and-rules.md#lenience-faster-and-not-exact) below 1: more "
        "guesses pass",
    )
    lookup: bool | None = option(
        "--lookup/--no-lookup", commands=_RUN, group="Guessing",
        help="guess that the text goes on as it did before; default: on without a draft, and with "
        "--tree auto --rule match",
        doc="[guess](lookup.md) that text goes on as before; default: without a draft, and with "
        "`--tree auto --rule match`",
    )
    lookup_length: str = option(
        "--lookup-length", default="1:16", metavar="MIN:MAX", commands=_RUN, group="Guessing",
        help="how many tokens must agree before --lookup or --datastore guesses",
    )
    ngram: PathLike | None = option(
        "--ngram", kind=Path, metavar="FILE|STORE", commands=_RUN, group="Guessing",
        help="guess what follows on a token most often in a text or a store",
    )
    datastore: PathLike | None = option(
        "--datastore", kind=Path, metavar="STORE", commands=_RUN, group="Guessing",
        help="guess what follows in a store that offload datastore build has made",
        doc="[guess](lookup.md) what follows in a [store](datastore.md)",
    )
    threads: int | None = option(
        "--threads", metavar="N", within=f"1 to {MAX_THREADS}", remedy="leave it out to have it measured",
        is_per_rank=True, counts="cores", commands=(*_RUN, "tune"), group="Expert",
        help="number of compute threads; default: the fastest, as measured",
    )
    profile: PathLike | None = option(
        "--profile", kind=str, metavar="FILE", commands=(*_RUN, "plan"), group="Expert",
        help="file that offload tune has written, or none; default: the one that fits this run",
        doc="of `offload tune`, or `none`; default: the one in the cache that fits this run",
    )
    invariant: bool | None = option(
        "--invariant/--no-invariant", commands=_RUN, group="Expert",
        help="compute the same bits with every tree; default: on where it takes no time",
        doc="[the same bits](trees-and-rules.md#the-same-bits) with every tree; default: where "
        "it takes no time; refused with `--ranks`",
    )
    link_limit: str | int | None = option(
        "--link-limit", metavar="SIZE", reads=Rate.parse, is_per_rank=True, is_hidden=True, group="Expert",
        commands=("generate", "serve", "tune", "demo"),
        help="slow the stream down to this per second",
    )
    # values per rank are read by it
    ranks: str | None = option(
        "--ranks", metavar="ROLES", is_eager=True, commands=(*_RUN, "plan"), group="Expert",
        help="roles of the ranks that offload launch starts, or of several cards: shards, or "
        "stages:0-2,draft:3; see docs/ranks.md",
        doc="among [ranks](ranks.md) of `offload launch` or several cards: `shards`, or `stages:0-2,draft:3`",
    )
    pipeline: str | None = option(
        "--pipeline", metavar="MODE", commands=_RUN, group="Expert",
        help="how stages run: async, sync or plain, with settings; see docs/ranks.md",
        doc="how [runs of stages follow each other](ranks.md#runs-in-flight---pipeline): "
        "`async` (default with a draft), `sync` or `plain`, with settings",
    )
    parallel: int = option(
        "--parallel", default=1, metavar="B", least=1, within="1 to 256", remedy="1 writes one text at a time",
        commands=("generate", "serve", "plan"),
        help="write B texts at a time, which share every pass over the weights",
        differs={"serve": {
            "default": 4, "is_main": True, "help": "write B texts at a time; memory is planned for so many",
        }},
        doc="[texts at a time](many.md), for one pass over the weights",
    )
    prompt_cache_ram: str | int = option(
        "--prompt-cache-ram", default="none", metavar="SIZE", reads=parse_cache_size, commands=(*_RUN, "plan"),
        help="keep prompts that were read in so much of --ram: a size, none, or auto (what no layer fits into)",
        differs={"serve": {"default": "auto"}},
        doc="memory, of `--ram`, for [prompts that were "
        "read](server.md#prompts-that-come-again): a size, `none`, or `auto`",
    )
    prompt_cache: PathLike | None = option(
        "--prompt-cache", kind=Path, metavar="DIR", commands=_RUN,
        help="keep prompts that were read in a folder, also for later runs",
        doc="keep [prompts that were read](server.md#prompts-that-come-again) in a folder, for "
        "later runs too",
    )
    prompt_cache_size: str | int = option(
        "--prompt-cache-size", default="8GiB", metavar="SIZE", reads=ByteSize.parse, commands=_RUN,
        help="how large --prompt-cache may become; what was used least makes room",
    )

    @property
    def budgets(self) -> tuple[str | int | None, str | int | None]:
        """The sizes that the user has given, if any."""
        return self.ram, self.gpu_memory


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """What a text is asked for."""

    GROUP: ClassVar[str] = "Text"
    prompt: str | None = option(
        "--prompt", "-p", metavar="TEXT", is_setting=False, commands=("generate", "demo"),
        is_main=True,
        help="the prompt; '-' reads it from standard input",
        differs={"demo": {"help": "Python code to go on with"}},
    )
    file: Path | None = option(
        "--file", "-f", metavar="FILE", is_setting=False, commands=("generate",), is_main=True,
        help="read the prompt from a UTF-8 file, or many prompts from a .jsonl file",
        doc="the prompt from a UTF-8 file or `-`; [many](many.md) from a .jsonl",
    )
    system: str | None = option(
        "--system", metavar="TEXT", commands=_WRITE, differs={"chat": {"is_main": True}},
        help="instructions that the model reads before the prompt or the first question",
    )
    max_new_tokens: int | None = option(
        "-n", "--max-tokens", default=128, metavar="N", least=-1,
        is_main=True, commands=("generate", "chat", "demo"),
        help="write at most N new tokens; -1: as many as the context has room for",
        differs={
            "chat": {
                "default": None, "least": 1,
                "help": "write at most N tokens in an answer; default: as many as have room",
            },
            "demo": {"default": 96, "least": 0, "help": "write at most N new tokens"},
            "python": {"help": "write at most N new tokens; 128 where it is left out"},
        },
        doors=("python", "batch", "chat"), called={"batch": "max_tokens", "chat": "max-tokens"},
    )
    stop: str | Sequence[str] | None = option(
        "--stop", metavar="TEXT", is_several=True, commands=_WRITE,
        help="end the text before this string; may be given several times",
        doors=("python", "batch", "chat"),
        differs={"python": {"help": "end the text before this string, or before any of several"}},
    )
    think: bool | None = option(
        "--think/--no-think", commands=_WRITE, doors=("python",),
        help="let the model think before it answers, or not; default: as its chat template does",
        doc="by the switch of the chat template; refused where it has none",
    )
    # the command line takes a path here, whose file `cli.sampling` reads
    json_schema: Mapping[str, Any] | str | None = option(
        "--json-schema", kind=Path, metavar="FILE", commands=("generate",),
        help="write JSON that this schema allows; see docs/grammar.md", doors=("python", "batch"),
        doc="write JSON that this schema allows: [a grammar](grammar.md), one at most",
    )
    regex: str | None = option(
        "--regex", metavar="TEXT", commands=("generate",), doors=("python", "batch"),
        help="write a text that this regular expression matches as a whole",
    )
    grammar: str | None = option(
        "--grammar", kind=Path, metavar="FILE", commands=("generate",), doors=("python", "batch"),
        help="write a text that these rules in Lark's notation allow",
    )
    session: Path | None = option(
        "--session", metavar="FILE", commands=_WRITE, differs={"chat": {"is_main": True}},
        help="keep the text and its cache in FILE, and go on from there; see docs/flags.md",
        doc="keep the text and what was computed for it, and [go on from there](#sessions)",
    )
    raw: bool = option(
        "--raw", default=False, commands=("generate",), doors=("python",), help="leave the chat template out",
    )
    num_logprobs: int | None = option(
        "--logprobs", metavar="K", commands=("generate",), doors=("python", "batch"),
        group="Output",
        called={"batch": "logprobs"},
        differs={"python": {"help": "tell how likely each new token is, and the K likeliest beside it"}},
        help="with --json: tell how likely each new token is, and the K likeliest tokens beside it",
        doc="with `--json`: of each new token its log-probability, and the K likeliest beside "
        "it, before penalties, biases and sampling",
    )
    samples: int = option(
        "--samples", default=1, metavar="K", least=1, most=MOST_SAMPLES, commands=("generate",), group="Sampling",
        help="write K texts of a prompt, with --seed and the seeds behind it",
    )
    out: Path | None = option(
        "--out", metavar="FILE", commands=("generate",), group="Output",
        help="write the results of many prompts to FILE, and go on where it ends; default: stdout",
    )


    @property
    def num_wanted(self) -> int:
        """New tokens of a text, more than any context has room for where -1 asks for all."""
        return sys.maxsize if self.max_new_tokens == -1 else self.max_new_tokens or 0


@dataclass(frozen=True)
class SamplingOptions:
    """How the tokens of a text are drawn, as far as it is said."""

    GROUP: ClassVar[str] = "Sampling"
    given: Mapping[str, Any] = given_of(Sampling)  # an option that is not given is left to the model
    greedy: bool = option(
        "--greedy", default=False, commands=_WRITE,
        help="always take the likeliest token, whatever other flags say",
    )


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What is shown."""

    GROUP: ClassVar[str] = "Output"
    as_json: bool = option(
        "--json", default=False, help="print one JSON object on stdout, and nothing else",
        commands=tuple(name for name in _ALL if name not in ("chat", "serve")),
    )
    quiet: bool = option(
        "--quiet", "-q", default=False, help="print nothing on stderr but errors",
        commands=tuple(name for name in _ALL if name not in ("plan", "info", "list")),
    )
    verbose: bool = option(
        "--verbose", "-v", default=False, help="tell more: threads, slots, why this tree",
        commands=(*_RUN, "plan", "demo"), differs={"plan": {"is_main": True}},
    )

    def __post_init__(self) -> None:
        requirement = "`quiet` and `verbose` exclude each other"
        require(not (self.quiet and self.verbose), requirement, "both", "leave one of them out")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Which machine `offload plan` is asked about."""

    GROUP: ClassVar[str] = "Memory"
    hardware: str | None = option(
        "--hardware", metavar="NAME", commands=("plan",), is_main=True,
        help="plan for another machine: l40, rtx4090, ..., h200 or FILE.json",
        doc="another machine by name or file; see [memory](memory.md)",
    )
    disk_speed: str | None = option(
        "--disk-speed", metavar="SIZE", commands=("plan",), is_main=True,
        help="bytes that the disk reads in a second, such as 3GB; default: measured",
    )
    tokens_per_sweep: float | None = option(
        "--tokens-per-pass", "--tokens-per-sweep", metavar="G", commands=("plan",),
        group="Guessing",
        help="tokens that a pass with the named tree yields; default: as the profile says",
    )


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What `offload tune` measures with."""

    GROUP: ClassVar[str] = "Text"
    text: Sequence[Path] = option(
        "--text", default=(), kind=Path, is_required=True, is_several=True, metavar="FILE",
        is_main=True,
        commands=("tune",), help="UTF-8 text of the kind that will be decoded; may be given several times",
    )
    tokens: int = option(
        "--tokens", default=2048, metavar="N", least=1, commands=("tune",), is_main=True,
        help="trace N positions",
    )


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Whom a server serves, and how much it takes from them."""

    GROUP: ClassVar[str] = "Server"
    host: str = option(
        "--host", default="127.0.0.1", metavar="ADDRESS", commands=("serve",), is_main=True,
        help="address to listen on; any but loopback needs --api-key-file",
    )
    port: int = option(
        "--port", default=8080, metavar="N", commands=("serve",), is_main=True,
        help="port to listen on; 0 takes a free one",
    )
    alias: Sequence[str] = option(
        "--alias", default=(), kind=str, is_several=True, metavar="NAME", commands=("serve",),
        help="another name that clients may ask for, '*' for any; may be given several times",
    )
    cors: Sequence[str] = option(
        "--cors", default=(), kind=str, is_several=True, metavar="ORIGIN", commands=("serve",),
        help="let pages of this origin ask, such as http://localhost:3000; may be given several times",
    )
    api_key_file: Path | None = option(
        "--api-key-file", metavar="FILE", commands=("serve",), is_main=True,
        help="file of keys, one a line, of which clients must send one; default: none is asked for",
    )
    queue: int = option(
        "--queue", default=64, metavar="Q", least=1, commands=("serve",),
        help="let Q requests wait; more are refused with 429",
    )
    grace: float = option(
        "--grace", default=30.0, metavar="SECONDS", least=0, most=86_400, commands=("serve",),
        help="how long texts under way may still take when the server is ended",
    )
    max_body: str = option(
        "--max-body", default="4MiB", metavar="SIZE", commands=("serve",),
        help="largest body that a request may have",
    )


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What `offload demo` makes."""

    GROUP: ClassVar[str] = "Model"
    size: str = option(
        "--size", default="1GB", metavar="SIZE", commands=("demo",),
        help="how large to make the target",
    )


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    """What `offload pack` does."""

    GROUP: ClassVar[str] = "Output"
    out: Path | None = option("--out", metavar="DIR", commands=("pack",), help="folder to make")
    beside: str | None = option(
        "--beside", metavar="int4", commands=("pack",),
        help="a copy of 4 bits stays in memory, for --draft self:int4 as well, and half of each "
        "weight streams beside it",
    )
    verify: bool = option(
        "--verify", default=False, commands=("pack",),
        help="make nothing: decode all of a packed model, and compare its checksums",
    )


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """What `offload verify` compares with."""

    GROUP: ClassVar[str] = "Output"
    manifest: Path | None = option(
        "--manifest", metavar="FILE", commands=("verify",),
        help="checksums to compare with; default: those beside the model, if there are any",
    )
    write: bool = option(
        "--write", default=False, commands=("verify",),
        help="write the checksums, beside the model or to --manifest, if the model is sound",
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
