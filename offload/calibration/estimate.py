"""Will it fit, and how fast will it be: the answer of `offload plan`, for this machine or one that nobody here owns.

Headers tell what lies where. Rates come from `--hardware`, or on this machine from the link, measured here and now, and
from a profile of `offload tune`. What is not known is left out rather than guessed. No torch but where there is a GPU.
Invariant: no weights are fetched, and none are read but for the 0.3 s that measure the link.
"""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from offload.calibration.link import link_bytes_per_s
from offload.checkpoint.hub import checkpoint_of_config, config_alone, is_here, open_headers
from offload.checkpoint.safetensors import Checkpoint, compute_dtype_name, read_config
from offload.checkpoint.sizes import model_shape
from offload.checkpoint.vocabulary import require_one_vocabulary
from offload.config import Sampling, format_bytes, require
from offload.errors import UserError
from offload.machine import has_cuda_driver
from offload.memory.plan import MemoryPlan
from offload.memory.planner import Files, ram_warning
from offload.planning.cost_model import Costs, Prediction, costs_on, is_disk_slower, predict, traffic_on
from offload.planning.hardware import Hardware, find_hardware
from offload.planning.options import LoadOptions
from offload.planning.profile import Identity, Machine, Profile, find_profile, parse_profile, read_profile
from offload.planning.room import Room
from offload.planning.tree_policy import TreeSelector, most_timed
from offload.tree.spec import TreeSpec, label_of
from offload.tree.topology import DynamicShape, Shape, chain

if TYPE_CHECKING:  # it brings torch along, which other machines are planned without
    from offload.streaming.device import Device

_DEFAULT = "default acceptance, of a 16 M target and its 1 M draft writing code greedily"
MAX_NODES = 1024  # of a tree that is chosen for a GPU
_FILLED_SHARE = 0.5  # of the context, whose keys and values a pass reads on average


class Estimate(NamedTuple):
    """What is known before anything is loaded."""

    plan: MemoryPlan
    hardware: Hardware | None  # None for this machine
    link_bytes_per_s: float | None  # measured, or the hardware's; None where neither is known
    predictions: tuple[Prediction, ...]  # without a tree, then with the wanted one; empty where costs are not known
    basis: str  # of the tokens per sweep, in words
    notes: tuple[str, ...]

    @property
    def sweep_s(self) -> float | None:
        """What moving the weights of one sweep takes."""
        streamed_bytes = traffic_on(self.hardware, self.plan).streamed_bytes
        return None if self.link_bytes_per_s is None else streamed_bytes / self.link_bytes_per_s

    def as_dict(self) -> dict[str, object]:
        """The figures by the names that `--json` uses."""
        return {
            "fits": True,
            **self.plan.as_dict(),
            "bytes_per_sweep": self.plan.streamed_bytes,
            "link_bytes_per_s": self.link_bytes_per_s,
            "sweep_s": self.sweep_s,
            "hardware": self.hardware.name if self.hardware else None,
            "predictions": [prediction.as_dict() for prediction in self.predictions],
            "basis": self.basis,
            "notes": list(self.notes),
        }


class _Case(NamedTuple):
    """One question, opened."""

    files: Files
    options: LoadOptions
    tree: TreeSpec
    hardware: Hardware | None  # that was named
    device: "Device | None"  # of this machine, that a run would take
    room: Room
    tokens_per_sweep: float | None  # of the named tree, as given

    @property
    def is_elsewhere(self) -> bool:
        """Whether no link of this machine and no profile made on it says anything."""
        return self.hardware is not None or (self.options.gpu_memory is not None and self.device is None)

    @property
    def is_open(self) -> bool:
        """Whether both models lie here, with their weights."""
        return self.files.draft is not None and all(map(is_here, filter(None, self.files)))

    @property
    def machine(self) -> Machine:
        """What a profile of this machine would be of."""
        name = self.device.name if self.device else "cpu"
        return Machine.here(compute_dtype_name(self.files.target, self.options.dtype), name)

    def plan(self, num_nodes: int) -> MemoryPlan:
        """Memory for trees of so many nodes."""
        return self.room.plan(self.files, num_nodes)

    def plan_without_draft(self) -> MemoryPlan:
        """Memory for one token per sweep."""
        return self.room.plan(Files(self.files.target), 1)


def estimate(
    model: str,
    draft: str | None,
    options: LoadOptions,
    *,
    hardware: str | None = None,
    tokens_per_sweep: float | None = None,
) -> Estimate:
    """Plan and predict. Raises `UserError` for whatever does not fit or cannot be read.

    Args:
        hardware: name or file of another machine; None is this one.
        tokens_per_sweep: of the named tree; None takes what is known of the pair.
    """
    machine = find_hardware(hardware) if hardware else None
    files = Files(_open(model), None if draft is None else _open(draft))
    if files.draft is not None:
        require_one_vocabulary(files.target, files.draft)
    tree, device = options.tree_spec(has_draft=draft is not None), _find_device(options, machine)
    case = _Case(files, options, tree, machine, device, _room(options, machine, device), tokens_per_sweep)
    _check(case)
    plan = case.plan(tree.num_nodes)  # refuses before the link is measured
    profile, basis = _profile(case)
    costs = _costs(case, profile)
    if costs is None:
        return Estimate(plan, machine, _measured_link(case), (), basis, _notes(case))
    predictions = _predictions(case, costs, profile, basis)
    shape = predictions[-1].shape
    is_guess = isinstance(shape, DynamicShape) and not (profile and profile.dynamic_yields) and not tokens_per_sweep
    basis = "tokens per sweep as given" if tokens_per_sweep else basis
    notes = _notes(case, is_guess=is_guess)
    return Estimate(case.plan(shape.num_nodes), machine, costs.link_bytes_per_s, predictions, basis, notes)


def _open(model: str) -> Checkpoint:
    path = config_alone(model)
    return open_headers(model) if path is None else checkpoint_of_config(read_config(path), path, _shapes_of)


def _shapes_of(config: dict[str, Any], path: Path) -> dict[str, tuple[int, ...]]:
    """Of any family that runs: transformers knows them, which brings torch along."""
    from offload.model.meta import parameter_shapes

    return parameter_shapes(config, path)


def _find_device(options: LoadOptions, hardware: Hardware | None) -> "Device | None":
    """The GPU of this machine that a run would take; none for other machines, and for a budget on a GPU elsewhere."""
    if hardware is not None:
        if options.device != "auto":
            raise UserError(f"`device` {options.device} is of this machine, `hardware` names another: give one of them")
        return None
    is_cpu = options.device == "cpu" and options.gpu_memory is None
    if is_cpu or (options.device == "auto" and not has_cuda_driver()):
        return None
    from torch import cuda

    from offload.streaming.device import open_device

    if options.device == "auto" and options.gpu_memory is not None and not cuda.is_available():
        return None
    return open_device(options.device, options.gpu_memory)


def _room(options: LoadOptions, hardware: Hardware | None, device: "Device | None") -> Room:
    """Budgets that are not given are the named machine's, or what is free on this one."""
    if hardware is not None:
        ram, gpu = options.ram or hardware.ram_bytes, options.gpu_memory or hardware.gpu_bytes
        return Room.of(replace(options, ram=ram, gpu_memory=gpu), "cuda")
    if device is None:
        return Room.of(options, None if options.gpu_memory is None else "cuda")
    return Room.of(options, str(device.place))


def _check(case: _Case) -> None:
    given = case.tokens_per_sweep
    if given is None:
        return
    require(given >= 1, "`tokens_per_sweep` must be 1 or more", given, "a sweep yields one token at least")
    if case.tree.kind in ("auto", "none"):
        raise UserError(f"`tokens_per_sweep` {given:g} belongs to one tree: name it, such as `tree` 128x20")
    if case.hardware is None:
        raise UserError("`tokens_per_sweep` goes with `hardware`; on this machine offload tune measures it")


def _profile(case: _Case) -> tuple[Profile | None, str]:
    """What is known of acceptance, and in words where from."""
    target, draft, named = *case.files, case.options.profile
    if draft is None or case.options.has_no_profile:
        return None, _DEFAULT
    if named is not None:
        return _named_profile(case, Path(named)), f"acceptance of {named}"
    if case.is_elsewhere or not case.is_open:
        return None, _DEFAULT
    profile, where = find_profile(Identity.of(target, draft, Sampling(), case.options.rule, case.machine))
    return profile, f"profile {where}" if profile else where


def _named_profile(case: _Case, path: Path) -> Profile:
    """A profile for these models; times of another machine do not matter where a GPU's are asked for."""
    profile, (target, draft) = parse_profile(path), case.files
    if not case.is_open:
        return profile
    own = profile.identity
    here = case.machine if case.hardware is None else own.machine
    sampling = Sampling(temperature=own.temperature, top_p=own.top_p, top_k=own.top_k)
    assert draft is not None, "a profile is of two models"
    return read_profile(path, Identity.of(target, draft, sampling, case.options.rule, here))


def _costs(case: _Case, profile: Profile | None) -> Costs | None:
    """Of the named GPU, or of this machine where it was measured."""
    if case.hardware is not None:
        dtype, positions = case.options.dtype, int(_FILLED_SHARE * case.plan_without_draft().context)
        draft = model_shape(case.files.draft, dtype) if case.files.draft else None
        return costs_on(case.hardware, model_shape(case.files.target, dtype), draft, positions)
    link = _measured_link(case)
    return None if profile is None or link is None else replace(profile.costs, link_bytes_per_s=link)


def _measured_link(case: _Case) -> float | None:
    target = case.files.target
    if case.is_elsewhere or not is_here(target):
        return None
    if case.device is not None:
        from offload.calibration.device_link import device_link_bytes_per_s

        return device_link_bytes_per_s(case.device, case.plan(case.tree.num_nodes), target.shards)
    return link_bytes_per_s(target.shards)


def _predictions(case: _Case, costs: Costs, profile: Profile | None, basis: str) -> tuple[Prediction, ...]:
    """One token per sweep and no draft, then the wanted tree, or the best."""
    found = [_predict(case, costs, case.plan_without_draft(), chain(0), 1.0)]
    if case.files.draft is not None and case.tree.kind != "none":
        max_nodes = MAX_NODES if case.hardware else most_timed(profile, costs)
        max_depth = case.plan(1).context - 1
        traffic_of = cache(partial(case.room.traffic, case.files, hardware=case.hardware))
        selector = TreeSelector(case.options.rule, profile, basis, costs, traffic_of, max_nodes, max_depth)
        choice = selector.choose(case.tree)
        tokens = case.tokens_per_sweep or choice.tokens_per_sweep
        found.append(_predict(case, costs, case.plan(choice.shape.num_nodes), choice.shape, tokens))
    return tuple(found)


def _predict(case: _Case, costs: Costs, plan: MemoryPlan, shape: Shape, tokens: float) -> Prediction:
    label = label_of(shape) if case.tree.kind == "auto" or shape.num_nodes == 1 else case.tree.label
    is_slower = is_disk_slower(case.hardware, plan)
    return predict(label, costs, traffic_on(case.hardware, plan), shape, tokens, is_disk_slower=is_slower)


def _notes(case: _Case, *, is_guess: bool = False) -> tuple[str, ...]:
    """Lines about what the figures leave out."""
    notes = [_device_note(case)]
    if case.hardware is None:
        notes.append(ram_warning(case.room.ram))
        notes.append(None if is_here(case.files.target) else _ABSENT)
    notes.append(_AS_STATIC if is_guess else None)
    return tuple(note for note in notes if note)


def _device_note(case: _Case) -> str | None:
    """Which GPU this is about, and how much of it."""
    if case.device is None:
        return None
    gpu_bytes, place = case.plan(1).gpu_bytes, case.device.place
    assert gpu_bytes is not None, "a plan for a GPU has a budget on it"
    return f"{place} is a {case.device.name}, {format_bytes(gpu_bytes)} of it to use; `device` cpu does without"


_ABSENT = "the weights are not here: their link was not measured"
_AS_STATIC = (
    "a dynamic tree is predicted as the static one of its size, which yields less: "
    "offload tune counts what dynamic ones do"
)
