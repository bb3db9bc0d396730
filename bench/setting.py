"""What the commands of `offload bench` share: their options, the models they name, and how a result ends.

Without a model the packaged pair is used, its target inflated, so every command runs on any machine.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from offload.bench.compare import changes, require_same, tell
from offload.bench.gate import Proof, Written, prove, reference
from offload.bench.plain_reader import Reading, plain_rate
from offload.bench.record import Result, read, store, writable
from offload.calibration.device_link import device_link_bytes_per_s
from offload.checkpoint.hub import fetch
from offload.checkpoint.safetensors import Checkpoint, open_checkpoint
from offload.cli.console import Console
from offload.config import parse_size
from offload.engine.decoder import Decoder
from offload.engine.load import load
from offload.memory.planner import plan_memory
from offload.streaming.device import open_device

PROMPT_TOKENS = 128
_CEILING_BYTES = 400_000_000  # of one look at the link

Model = Annotated[
    str | None, typer.Option("--model", "-m", metavar="MODEL", help="target; default: the packaged one, inflated")
]
Draft = Annotated[
    str | None, typer.Option("--draft", "-d", metavar="MODEL", help="small model with the same vocabulary")
]
Size = Annotated[str, typer.Option(metavar="SIZE", help="how large to make the packaged target")]
Ram = Annotated[str | None, typer.Option(metavar="SIZE", help="memory budget; default: a quarter of the target")]
Quick = Annotated[bool, typer.Option("--quick", help="up to four minutes on two cores, larger errors")]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="store the result", callback=writable)]
Compare = Annotated[
    Path | None, typer.Option(metavar="OLD.json", help="flag what is slower than there beyond noise; exits with 1")
]
Prompts = Annotated[
    list[str] | None,
    typer.Option("--prompts", metavar="SET", help="code, prose, chat or a text or .jsonl file; several times"),
]


class Setting(NamedTuple):
    """Models and budget of one bench."""

    target: Path
    draft: Path | None
    origin: Path  # the model whose draws are right: the target, or the small one that it was inflated from
    ram_bytes: int
    device: str = "cpu"  # most benches are of disk and CPU, and their ceilings are
    gpu_memory: str | None = None

    @property
    def shards(self) -> Sequence[Path]:
        """Weight files of the target."""
        return open_checkpoint(self.target).shards

    def open(self, tree: str, **options: Any) -> Decoder:
        """A decoder with room for that tree; `options` are those of `load`."""
        place: dict[str, Any] = {"device": self.device, "gpu_memory": self.gpu_memory}
        return load(self.target, self.draft, self.ram_bytes, tree, **{"profile": "none", **place, **options})

    def ceiling(self, decoder: Decoder) -> float:
        """Bytes per second at which layers could arrive, now: those of a plain reader, or of copies to a GPU."""
        card = decoder.target._device
        if card is None:
            return plain_rate(self.shards, _CEILING_BYTES)
        return device_link_bytes_per_s(card, decoder.plan, self.shards)

    def prove(self, written: Sequence[Written]) -> Proof:
        """The gate; call it when all measuring is over and decoders are closed. Raises `UserError`."""
        with reference(self.origin, self.draft, self.ram_bytes) as score:
            return prove(written, score)

    def as_dict(self) -> dict[str, Any]:
        """For the stored result."""
        return {
            "target": self.target.name,
            "target_bytes": sum(path.stat().st_size for path in self.shards),
            "draft": None if self.draft is None else self.draft.name,
            "ram_bytes": self.ram_bytes,
            "device": self.device,
            "gpu_memory": self.gpu_memory,
        }


def find_setting(
    model: str | None, draft: str | None, size: str, ram: str | None, screen: Console, *, is_run: bool = True
) -> Setting:
    """The named models, or the packaged pair with a target of `size`. Raises `UserError`.

    Args:
        is_run: the target is to be decoded with, so what has no room is refused before it is fetched.
    """
    if model is not None:
        check = partial(_require_room, ram) if is_run else lambda *headers: None
        target, *small = fetch([model] if draft is None else [model, draft], check)
        num_bytes = sum(path.stat().st_size for path in target.shards)
        budget_bytes = parse_size(ram or num_bytes // 4, "--ram")
        return Setting(target.directory, small[0].directory if small else None, target.directory, budget_bytes)
    from offload.cli.demo import PAIR, inflated_target

    size_bytes = parse_size(size, "--size")
    made = inflated_target(size_bytes, partial(screen.bytes_landed, label="making the target"))
    named = PAIR / "draft" if draft is None else open_checkpoint(draft).directory
    return Setting(made, named, PAIR / "target", parse_size(ram or size_bytes // 4, "--ram"))


def _require_room(ram: str | None, target: Checkpoint, draft: Checkpoint | None = None) -> None:
    """Refuse, from headers alone, a budget that is too small even for the least of runs. Raises `UserError`."""
    plan_memory((target, draft), ram=ram or target.num_bytes // 4, dtype="auto", context=1, num_nodes=1)


def place_of(device: str, gpu_memory: str | None) -> dict[str, Any]:
    """What a setting has to know of `--device` and `--gpu-mem`. Raises `UserError`."""
    card = open_device(device, gpu_memory)
    return {"device": str(card.place) if card else "cpu", "gpu_memory": gpu_memory}


def say_ceiling(text: str, rate: float) -> None:
    """The first line of every bench."""
    print(f"ceiling: {text}, {rate / 1e9:.3f} GB/s", flush=True)


def say_link(shards: Sequence[Path]) -> float:
    """The ceiling of everything that streams: bytes per second of a plain reader, measured and said."""
    rate = plain_rate(shards, _CEILING_BYTES)
    say_ceiling(Reading().label, rate)
    return rate


def proof_line(proof: Proof) -> str:
    """What the gate found."""
    told = f"{proof.num_exact} tokens are the reference's own draw in float32, {proof.num_near} within bf16 rounding"
    by_distribution = (
        f"; {proof.num_by_law} follow its distribution, {proof.sigmas:+.1f} standard errors off"
        if proof.num_by_law
        else ""
    )
    return f"gate: {told}{by_distribution}"


def earlier(bench: str, compare: Path | None) -> Result | None:
    """What `--compare` names, read before anything is measured. Raises `UserError`."""
    old = None if compare is None else read(compare)
    if old is not None:
        require_same(old, bench, {})
    return old


def check_same(old: Result | None, setting: Setting, **others: object) -> None:
    """Refuse, before anything is measured, what `--compare` could not be compared with. Raises `UserError`."""
    if old is not None:
        require_same(old, old.bench, {**setting.as_dict(), **others})


def finish(result: Result, json_file: Path | None, old: Result | None) -> None:
    """Store, compare, and end with one JSON line; what is slower beyond noise exits with 1."""
    if json_file is not None:
        store(result, json_file)
    found = [] if old is None else changes(old, result)
    if old is not None:
        tell(old, result, found)
    print(json.dumps(result.as_dict()))
    if any(one.is_worse for one in found):
        raise typer.Exit(1)
