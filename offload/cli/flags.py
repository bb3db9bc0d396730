"""Flags that several commands share: one name, one meaning, one line of help. Nothing heavy is
imported.
"""

import re
from pathlib import Path
from typing import Annotated

import typer

from offload import machine as cores
from offload.rank_roles import RankInfo, find_place, own_value
from offload.units import RULES, require


def _place(context: typer.Context) -> RankInfo | None:
    """Of this process, where the command runs on many ranks; what else sets RANK, a job that calls
    it, is not asked.
    """
    # of `plan` it is a file
    return find_place() if isinstance(context.params.get("ranks"), str) else None


def _of_this_rank(
    context: typer.Context, param: typer.CallbackParam, text: str | None
) -> str | None:
    """Of one value per rank its own; a list where there are no ranks is left to whoever reads the
    value.
    """
    return None if text is None else own_value(text, param.opts[0], _place(context))


Model = Annotated[
    str,
    typer.Option(
        "--model", "-m", metavar="MODEL", help="folder, GGUF file or hub id of the target"
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft",
        "-d",
        metavar="MODEL",
        help="small model with the same vocabulary; self:int4, self:int8: a copy",
    ),
]
DraftDtype = Annotated[
    str | None,
    typer.Option(
        metavar="TYPE", help="int8 or int4: hold the draft in fewer bits; default: as stored"
    ),
]
Prompt = Annotated[
    str | None,
    typer.Option("--prompt", "-p", metavar="TEXT", help="the prompt; '-' reads standard input"),
]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        "--file",
        "-f",
        metavar="FILE",
        help="read the prompt from a UTF-8 file; many of them from a .jsonl",
    ),
]
Parallel = Annotated[
    int,
    typer.Option(
        metavar="B", min=1, help="texts that are written at a time, for one pass over the weights"
    ),
]
Results = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FILE",
        help="of many prompts: go on with the results in this file; default: stdout",
    ),
]
Samples = Annotated[
    int,
    typer.Option(metavar="K", min=1, help="so many texts of a prompt, by seeds that follow --seed"),
]
LargestTree = Annotated[
    str | None,
    typer.Option(metavar="NxD", help="largest tree to time; default: what fits, up to 512x24"),
]
Config = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL", help="folder or hub id of what a GGUF target was made from; docs/gguf.md"
    ),
]
Ram = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        callback=_of_this_rank,
        help="memory budget, such as 8GiB, or one per rank; default: 3/4 of what is free",
    ),
]
Device = Annotated[str, typer.Option(metavar="DEVICE", help="auto, cpu, cuda or cuda:N")]
GpuMem = Annotated[
    str | None, typer.Option(metavar="SIZE", help="device memory budget, such as 24GiB")
]
Context = Annotated[
    int | None,
    typer.Option(metavar="N", help="positions for prompt and new tokens; default: at most 4096"),
]
Dtype = Annotated[str, typer.Option(metavar="TYPE", help="auto, bfloat16, float16 or float32")]
Tree = Annotated[
    str,
    typer.Option(
        metavar="TREE",
        help="auto, none, NxD (N nodes, D deep), dynamic:NxD, chain:L, chain:auto (L as guesses fare), sequences:KxL",
    ),
]
Lenience = Annotated[
    float,
    typer.Option(
        metavar="L",
        help="below 1 NOT EXACT: more guesses pass, no token at over 1/L times its chance",
    ),
]
RuleName = Annotated[
    str, typer.Option("--rule", metavar="RULE", help=f"of acceptance: {', '.join(RULES)}")
]
Json = Annotated[bool, typer.Option("--json", help="one JSON object on stdout and nothing else")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="nothing on stderr but errors")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="say more: threads, slots, why this tree")
]


def _own_threads(context: typer.Context, text: str | None) -> int | None:
    """A whole number, this rank's own where there is one for each."""
    if text is None:
        return None
    own = own_value(text, "--threads", _place(context))
    if not (own.isascii() and own.isdigit()):
        raise typer.BadParameter(f"{own!r} is not a valid integer.")
    if int(own) < 1:
        raise typer.BadParameter(f"{own} is not greater than or equal to 1.")
    return _at_most_cores(int(own))


def _at_most_cores(num_threads: int) -> int:
    """More than there are cores only wait for each other, and thousands are more than a process may
    start.
    """
    if num_threads > (most := cores.num_cores()):
        rule = f"--threads must be at most {most}, the cores that this process may use"
        require(False, rule, num_threads, "leave it out to have it measured")
    return num_threads


Threads = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        parser=str,
        callback=_own_threads,
        help="compute threads; default: the fastest, by what steps take",
    ),
]
ProfileFile = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="FILE",
        help="of offload tune, or none; default: the one that fits this run",
    ),
]
LinkLimit = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        callback=_of_this_rank,
        help="slow the stream down to this per second",
        hidden=True,
    ),
]
Experts = Annotated[
    str,
    typer.Option(
        metavar="HOW",
        help="experts of a mixture: demand (those that a pass needs), layers (all of them), auto",
    ),
]
Ranks = Annotated[
    str | None,
    typer.Option(
        metavar="ROLES",
        is_eager=True,
        help="of offload launch: shards, or stages:0-2,draft:3; see docs/ranks.md",
    ),  # eager: values of one rank among many are read by it
]
Pipeline = Annotated[
    str | None,
    typer.Option(
        metavar="MODE", help="of stages: async, sync or plain, with settings; see docs/ranks.md"
    ),
]
SlowLayer = Annotated[
    float, typer.Option(metavar="SECONDS", min=0, help="every layer takes longer", hidden=True)
]
Invariant = Annotated[
    bool | None,
    typer.Option(
        "--invariant/--no-invariant",
        help="the same bits with every tree; default: where layers are streamed",
    ),
]
Lookup = Annotated[
    bool | None,
    typer.Option(
        "--lookup/--no-lookup",
        help="guess that text goes on as it did before; default: without a draft, and with --tree auto --rule match",
    ),
]
LookupLength = Annotated[
    str,
    typer.Option(
        metavar="MIN:MAX", help="tokens that must agree for a guess by --lookup or --datastore"
    ),
]
Ngram = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE|STORE", help="guess by what follows on a token in a text or a store"
    ),
]
Datastore = Annotated[
    Path | None,
    typer.Option(
        metavar="STORE", help="guess by what follows in a store of offload datastore build"
    ),
]
OwnTemp = Annotated[
    float | None,
    typer.Option(
        "--temp", "--temperature", metavar="T", help="0 is greedy; default: as the model suggests"
    ),
]
OwnTopP = Annotated[
    float | None, typer.Option("--top-p", metavar="P", help="keep the likeliest that sum to this")
]
OwnTopK = Annotated[
    int | None,
    typer.Option("--top-k", metavar="K", help="keep so many of the likeliest; 0 keeps all"),
]
OwnMinP = Annotated[
    float | None,
    typer.Option(
        "--min-p", metavar="P", help="keep tokens at least P times as likely as the likeliest"
    ),
]
RepeatPenalty = Annotated[
    float | None,
    typer.Option(metavar="R", help="above 1: against tokens that are in the prompt or the answer"),
]
PresencePenalty = Annotated[
    float | None,
    typer.Option(metavar="A", help="off the logits of tokens that are in the answer, once"),
]
FrequencyPenalty = Annotated[
    float | None, typer.Option(metavar="A", help="... and as many times as they are there")
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(metavar="ID:NUMBER", help="added to a token's logit; may be given several times"),
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        "--logprobs", metavar="K", help="with --json: of each new token, and of K of the likeliest"
    ),
]
System = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT", help="what the model is told before the prompt or the first question"
    ),
]
Greedy = Annotated[
    bool, typer.Option("--greedy", help="the likeliest token always, whatever else is said")
]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="end before this string; may be given several times"),
]
JsonSchema = Annotated[
    Path | None,
    typer.Option(
        "--json-schema", metavar="FILE", help="write JSON that this schema allows; docs/grammar.md"
    ),
]
Regex = Annotated[
    str | None,
    typer.Option(
        "--regex", metavar="TEXT", help="write what this regular expression matches as a whole"
    ),
]
LarkGrammar = Annotated[
    Path | None,
    typer.Option(
        "--grammar", metavar="FILE", help="write what these rules in Lark's notation allow"
    ),
]
Session = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="keep tokens, keys and values there, and go on from there; see docs/flags.md",
    ),
]
Temp = Annotated[float, typer.Option("--temp", "--temperature", metavar="T", help="0 is greedy")]
TopP = Annotated[
    float, typer.Option(metavar="P", help="keep the likeliest tokens that sum to this")
]
TopK = Annotated[
    int, typer.Option(metavar="K", help="keep so many of the likeliest tokens; 0 keeps all")
]
Seed = Annotated[
    int,
    typer.Option(
        metavar="N", help="same seed, same text; with the rules match and topk for any tree"
    ),
]
NumTokens = Annotated[
    int, typer.Option("-n", "--max-tokens", metavar="N", min=0, help="at most so many new tokens")
]

# The library's errors name arguments, in backticks; a person at the command line knows them by
# these names.
_FLAG_OF = {
    "config": "--config", "context": "--context", "datastore": "--datastore", "device": "--device",
    "disk_speed": "--disk-speed", "draft": "--draft", "draft_dtype": "--draft-dtype", "dtype": "--dtype",
    "experts": "--experts", "frequency_penalty": "--frequency-penalty", "gpu_memory": "--gpu-mem",
    "grammar": "--grammar", "greedy": "--greedy", "hardware": "--hardware", "invariant": "--invariant",
    "json_schema": "--json-schema", "lenience": "--lenience", "link_limit": "--link-limit",
    "logit_bias": "--logit-bias", "lookup": "--lookup", "lookup_length": "--lookup-length", "max_new_tokens": "-n",
    "min_p": "--min-p", "ngram": "--ngram", "num_logprobs": "--logprobs", "out": "--out", "parallel": "--parallel",
    "pipeline": "--pipeline", "presence_penalty": "--presence-penalty", "profile": "--profile", "ram": "--ram",
    "ranks": "--ranks", "raw": "--raw", "regex": "--regex", "repeat_penalty": "--repeat-penalty", "rule": "--rule",
    "samples": "--samples", "seed": "--seed", "session": "--session", "slow_layer_s": "--slow-layer",
    "stop": "--stop", "system": "--system", "temperature": "--temp", "threads": "--threads",
    "tokens_per_sweep": "--tokens-per-sweep", "top_k": "--top-k", "top_p": "--top-p", "tree": "--tree",
    "verify": "--verify", "host": "--host", "port": "--port", "manifest": "--manifest", "write": "--write",
}  # fmt: skip


def as_flags(message: str) -> str:
    """A line of the library with the flags that its arguments are given by."""
    return re.sub(r"`(\w+)`", lambda match: _FLAG_OF.get(match[1], match[0]), message)
