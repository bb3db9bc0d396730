"""Models, budget and device of one bench: found once, opened by every command in the same way.

Without a model the packaged pair is used, its target inflated, so every command runs on any
machine. With `--layers N` the pair takes the shape of Llama-2 70B and 7B and is made in memory, for
devices. `--device pretend` is the host in the role of a device: it shows that the commands work,
and no speed of it means anything.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from offload.bench.harness.gate import Proof, Written, prove, reference
from offload.bench.harness.plain_reader import plain_rate
from offload.bench.harness.synthetic import (
    LLAMA_2_7B,
    LLAMA_2_70B,
    TINY,
    TINY_DRAFT,
    open_source,
    origin,
    sketch,
)
from offload.calibration.link import copy_bytes_per_s
from offload.checkpoint.generation_config import start_tokens
from offload.checkpoint.hub import fetch, open_headers
from offload.checkpoint.safetensors import Checkpoint
from offload.cli.console import Console
from offload.cli.demo import PAIR, inflated_target
from offload.engine.decoder import Decoder
from offload.engine.load import load
from offload.engine.request import with_start
from offload.errors import UserError
from offload.machine import available_ram_bytes
from offload.memory.plan import MemoryPlan
from offload.memory.planner import ModelFiles, least_budget, plan_memory
from offload.streaming.device import Device, HostDevice, open_device
from offload.trees.spec import parse_tree
from offload.units import parse_size, require

PROMPT_TOKENS = 128
PRETEND = "pretend"
# bytes of one reading of the link
CEILING_BYTES = 400_000_000
_COPY_BYTES = 64 << 20
# share of free memory for a model that is made there
_FREE_SHARE = 0.9
_ROOMY_BYTES = 1 << 50


class Setting(NamedTuple):
    """What one bench measures with."""

    target: Path
    draft: Path | None
    # the model whose draws are right: the target, or the small one that it was made from
    origin: Path
    ram_bytes: int
    device: str = "cpu"
    gpu_memory: str | int | None = None
    opened: Device | None = None  # None is the CPU
    # the ranks that run the target together
    ranks: str | None = None

    @property
    def shards(self) -> Sequence[Path]:
        return open_headers(self.target).shards

    @property
    def is_synthetic(self) -> bool:
        """Whether the target is made in memory, where no disk is read."""
        return self.origin.parent == self.target.parent

    def open(self, tree: str, **options: Any) -> Decoder:
        """Open a decoder with room for that tree; `options` are those of `load`.

        Raises `UserError`.
        """
        require(
            options.get("lenience", 1) == 1,
            "what is measured is proved: `lenience` must be 1",
            "less",
            "leave it out",
        )
        place: dict[str, Any] = {"device": self.opened or "cpu", "gpu_memory": self.gpu_memory}
        how = {
            "profile": "none",
            "open_source": open_source,
            "ranks": self.ranks,
            **place,
            **options,
        }
        return load(self.target, self.draft, self.ram_bytes, tree, **how)

    def open_streamed(self, tree: str, **options: Any) -> Decoder:
        """Open a decoder with the least budget, so that every layer streams.

        Raises `UserError`.
        """
        files = ModelFiles(
            open_headers(self.target), None if self.draft is None else open_headers(self.draft)
        )
        how = {"context": options["context"], "dtype": options.get("dtype", "auto")}
        plan = partial(plan_memory, files, num_nodes=parse_tree(tree).num_nodes, **how)
        if self.opened is None:
            return self._replace(ram_bytes=least_budget(lambda size: plan(ram=size))).open(
                tree, **options
            )
        on_device = partial(plan, ram=self.ram_bytes)
        return self._replace(gpu_memory=least_budget(lambda size: on_device(gpu=size))).open(
            tree, **options
        )

    def ceiling(self, plan: MemoryPlan) -> float:
        """Return bytes per second at which layers could arrive now.

        Those of a plain reader, or of copies to a device.
        """
        device = self.opened
        if device is None:
            return plain_rate(self.shards, CEILING_BYTES)
        pinned = device.open_allocator()
        try:
            seconds = plan.streamed_bytes / copy_bytes_per_s(
                device, pinned.allocate(_COPY_BYTES).array
            )
        finally:
            pinned.close()
        if plan.disk_streamed_bytes and not self.is_synthetic:
            seconds = max(
                seconds, plan.disk_streamed_bytes / plain_rate(self.shards, CEILING_BYTES)
            )
        return plan.streamed_bytes / seconds if seconds else float("inf")

    def prove(self, written: Sequence[Written]) -> Proof:
        """Prove all runs, after all measuring, with decoders closed. Raises `UserError`."""
        start = start_tokens(open_headers(self.origin))
        begun = [run._replace(prompt_ids=with_start(run.prompt_ids, start)) for run in written]
        with reference(
            self.origin, None if self.is_synthetic else self.draft, self.ram_bytes
        ) as score:
            return prove(begun, score)

    def as_dict(self) -> dict[str, Any]:
        target_bytes = sum(path.stat().st_size for path in self.shards)
        names = {
            "target": self.target.name,
            "target_bytes": target_bytes,
            "draft": self.draft and self.draft.name,
        }
        place = {"ram_bytes": self.ram_bytes, "device": self.device, "gpu_memory": self.gpu_memory}
        return {**names, **place, **({} if self.ranks is None else {"ranks": self.ranks})}


class Need(NamedTuple):
    """The most that a bench opens at once, which a budget that nobody named must have room for."""

    tree: str = "64x16"
    context: int = 1024
    rule: str = "match"
    parallel: int = 1

    def budget_bytes(self, files: ModelFiles) -> int:
        """Return a quarter of the target, or the least that works."""
        spec = parse_tree(self.tree)
        plan = partial(
            plan_memory,
            files,
            dtype="auto",
            context=self.context,
            num_nodes=1 if spec.is_chosen else spec.num_nodes,
            rule=self.rule,
            parallel=self.parallel,
        )
        quarter_bytes = files.target.num_bytes // 4
        try:
            plan(ram=_ROOMY_BYTES)
        except UserError:  # what no memory holds is refused when it is opened
            return quarter_bytes
        return max(quarter_bytes, least_budget(lambda size: plan(ram=size)))


_USUAL = Need()


def find_setting(
    model: str | None,
    draft: str | None,
    size: str,
    ram: str | None,
    screen: Console,
    need: Need = _USUAL,
) -> Setting:
    """Return the named models, or the packaged pair with a target of `size`.

    Without `ram` the budget is that of `need`. Raises `UserError`, before it fetches.
    """
    if model is not None:
        names = [model] if draft is None else [model, draft]
        headers = list(map(open_headers, names))
        _require_room(ram, *headers)
        target, *small = fetch(names, headers, screen.wait)
        files = ModelFiles(target, *small)
        own = target.directory
        guesser = small[0].directory if small else None
    else:
        size_bytes = parse_size(size, "--size")
        own = inflated_target(size_bytes, partial(screen.bytes_landed, label="making the target"))
        guesser = PAIR / "draft" if draft is None else open_headers(draft).directory
        files = ModelFiles(open_headers(own), open_headers(guesser))
    budget_bytes = need.budget_bytes(files) if ram is None else parse_size(ram, "--ram")
    return Setting(own, guesser, PAIR / "target" if model is None else own, budget_bytes)


def resident_pair(ram: str | None) -> Setting:
    """Return the packaged pair as it is, to measure what does not depend on streaming."""
    return Setting(
        PAIR / "target", PAIR / "draft", PAIR / "target", parse_size(ram or "2GiB", "--ram")
    )


@contextmanager
def synthetic_setting(num_layers: int, ram: str | None, device: Device | None) -> Iterator[Setting]:
    """Return the pair in the shape of Llama-2 70B and 7B, with as many layers.

    On the pretend device it has some megabytes.
    """
    is_tiny = device is None or device.place.type == "cpu"
    shape, small = (TINY, TINY_DRAFT) if is_tiny else (LLAMA_2_70B, LLAMA_2_7B)
    shape = shape._replace(num_layers=num_layers)
    ram_bytes = (
        int(_FREE_SHARE * available_ram_bytes()) if ram is None else parse_size(ram, "--ram")
    )
    if num_layers < TINY.num_layers or (not is_tiny and shape.layer_bytes * num_layers > ram_bytes):
        fitting = max(0, ram_bytes // shape.layer_bytes)
        raise UserError(
            f"--layers must be {TINY.num_layers} to {fitting} in this --ram, got {num_layers}: change either"
        )
    with tempfile.TemporaryDirectory(prefix="offload-bench-") as name:
        folder = Path(name)
        sketched = (
            sketch(PAIR / "target", folder / "target", shape),
            sketch(PAIR / "draft", folder / "draft", small),
        )
        yield Setting(*sketched, origin(PAIR / "target", folder / "origin", shape), ram_bytes)


def place_of(device: str, gpu_memory: str | None) -> dict[str, Any]:
    """Return what a setting has to know of `--device` and `--gpu-mem`. Raises `UserError`."""
    if device == PRETEND:
        return {"device": PRETEND, "gpu_memory": gpu_memory or "1152MiB", "opened": HostDevice()}
    opened: Device | None = open_device(device, gpu_memory)
    return {
        "device": str(opened.place) if opened else "cpu",
        "gpu_memory": gpu_memory,
        "opened": opened,
    }


def _require_room(ram: str | None, target: Checkpoint, draft: Checkpoint | None = None) -> None:
    """Refuse, from headers alone, a budget too small for the least of runs. Raises `UserError`."""
    if ram is not None:
        plan_memory((target, draft), ram=ram, dtype="auto", context=1, num_nodes=1)
