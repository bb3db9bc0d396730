"""What `offload tune` measured for a pair of models on a machine, kept as JSON in the user's cache.

A profile holds for exactly the models, rule, sampling settings and machine that it names.
Invariant: any other profile, or a malformed one, is never used: it is refused where the user named
it, and skipped with a reason where it was found.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from offload.checkpoint.files import cache_folder, read_object, replacing
from offload.checkpoint.identity import identity_of, proved
from offload.checkpoint.safetensors import Checkpoint
from offload.checkpoint.sizes import ExpertShape
from offload.errors import UserError, ensure, reason
from offload.machine import cpu_name
from offload.planning.acceptance import NUM_RANKS, PRODUCT_FORM, DynamicYield
from offload.planning.cost_model import Costs, Curve
from offload.trees.spec import MAX_TREE_NODES
from offload.trees.topology import check_acceptance
from offload.units import Sampling

SCHEMA = 3  # raise it when a field changes its meaning
_MOST_THREADS = 4096  # of any machine
_MOST_LAYERS = 4096  # of any model
_MOST_EXPERTS = 65_536  # of any layer
_AGAIN = "run offload tune again"
# fields whose first names are kept as keys in files
_KEY_OF = {"dynamic_yields": "grown", "overlap_penalty": "friction"}
_NAME_OF = {key: name for name, key in _KEY_OF.items()}
# terms of data sheets, which measured curves include
_NEVER_MEASURED = ("grow_s", "host_s", "ends_share")
_SPOKEN = {
    "target": "target model",
    "draft": "draft model",
    "num_cores": "core count",
    "dtype": "compute type",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The machine, device and type that the times were taken on."""

    cpu: str
    num_cores: int
    torch: str
    dtype: str
    device: str

    @classmethod
    def here(cls, dtype: str, device: str = "cpu") -> "Machine":
        """Return this machine."""
        cores = os.cpu_count() or 1
        return cls(
            cpu=cpu_name(), num_cores=cores, torch=version("torch"), dtype=dtype, device=device
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """All that a profile depends on."""

    target: str  # digests of the identities of the two models
    draft: str
    rule: str
    temperature: float
    top_p: float
    top_k: int
    machine: Machine
    # Proofs of all bytes of the weights of either model; no part of the name.
    proofs: Mapping[str, Mapping[str, str]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls, target: Checkpoint, draft: Checkpoint, sampling: Sampling, rule: str, machine: Machine
    ) -> "Identity":
        """Return the identity of a run; greedy runs do not depend on top-p and top-k."""
        models = {"target": identity_of(target), "draft": identity_of(draft)}
        return cls(
            target=models["target"].digest,
            draft=models["draft"].digest,
            rule=rule,
            temperature=float(sampling.temperature),
            top_p=1.0 if sampling.is_greedy else float(sampling.top_p),
            top_k=0 if sampling.is_greedy else sampling.top_k,
            machine=machine,
            proofs={part: one.proofs for part, one in models.items()},
        )

    @property
    def file_name(self) -> str:
        """Return one name per identity; it begins with the pair, whose profiles sort together."""
        settings = f"{self.rule}-t{self.temperature:g}-p{self.top_p:g}-k{self.top_k}"
        return f"{_short(self.target + self.draft)}-{settings}-{_short(repr(self))}.json"

    def differences(self, other: "Identity") -> list[str]:
        """Return in words what differs in the other identity."""
        mine, others = ({**asdict(one), **asdict(one.machine)} for one in (self, other))
        keys = [
            key for key in mine if key not in ("machine", "proofs") and mine[key] != others[key]
        ]
        # A profile shapes the tree and decides no token, so weights that look the same are enough;
        # a sum or the hub's checksum that differs shows that they are not.
        edited = [
            part
            for part in ("target", "draft")
            if part not in keys
            and proved(self.proofs.get(part, {}), other.proofs.get(part, {})) is False
        ]
        return [
            *(
                f"{_SPOKEN.get(key, key)} {_brief(others[key])}, not {_brief(mine[key])}"
                for key in keys
            ),
            *(f"other {part} weights, by their checksums" for part in edited),
        ]


def unprofiled(sampling: Sampling) -> str:
    """Return in words which settings profiles do not cover; empty where they cover all."""
    words = "penalties or biases" if sampling.is_adjusted else ""
    return words or ("min-p" if sampling.min_p and not sampling.is_greedy else "")


class ExpertUses(NamedTuple):
    """How often rows of the target were routed to each expert; dense layers are not counted."""

    uses_LE: tuple[tuple[int, ...], ...]
    num_rows: int  # of all passes together

    @property
    def uses_B(self) -> list[float]:
        """Return the uses per row of each expert, layer after layer.

        A cache of experts starts with the most used.
        """
        return [count / self.num_rows for count in chain(*self.uses_LE)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Measured acceptance and times."""

    identity: Identity
    target_name: str
    draft_name: str
    created: str  # UTC, ISO 8601
    num_tokens: int
    is_teacher_forced: bool  # ranks on the given text, not on what the target wrote
    acceptance: tuple[float, ...]  # by rank
    standard_error: tuple[float, ...]  # of each entry
    smoothing: float  # how many observations the product form is worth, by held-out traces
    num_threads: int  # the most that computed
    costs: Costs
    # for a few bounds; empty where the rule or the way of tracing gives none
    dynamic_yields: tuple[DynamicYield, ...]
    # the rank of every token, window by window; -1: not among the candidates
    traces: tuple[tuple[int, ...], ...]
    expert_uses: ExpertUses | None = None  # of a mixture whose experts are read on demand

    @property
    def follows_traces(self) -> bool:
        """Return whether trees consist of traced paths, not of the acceptance vector alone."""
        return self.smoothing < PRODUCT_FORM

    def of_experts(self, experts: ExpertShape | None, *, is_named: bool = False) -> "Profile":
        """Return the profile for a target with these experts, read on demand.

        Uses of other experts are dropped. Raises `UserError` for them where the user has named the
        profile.
        """
        uses = self.expert_uses
        if uses is None or experts is None:
            return self
        counted = (len(uses.uses_LE), len(uses.uses_LE[0]))
        wanted = (experts.num_layers, experts.num_experts)
        if counted == wanted:
            return self
        if not is_named:
            return replace(self, expert_uses=None)
        sizes = "{} layers of {} experts, not {} of {}".format(*counted, *wanted)
        raise UserError(f"the named profile counts uses in {sizes}: {_AGAIN}")

    def as_dict(self) -> dict[str, object]:
        """Return what the file holds and `--json` prints."""
        values = {_KEY_OF.get(name, name): value for name, value in asdict(self).items()}
        measured = {
            name: value for name, value in values["costs"].items() if name not in _NEVER_MEASURED
        }
        values["costs"] = {_KEY_OF.get(name, name): value for name, value in measured.items()}
        uses = values.pop("expert_uses")
        values |= {} if uses is None else {"expert_uses": uses._asdict()}
        return {"schema": SCHEMA, **values}


def profiles_folder() -> Path:
    """Return where profiles are kept. Raises what `cache_folder` raises."""
    return cache_folder() / "profiles"


def save_profile(profile: Profile) -> Path:
    """Write the profile under its own name, whole or not at all; return the path."""
    path = profiles_folder() / profile.identity.file_name
    write_atomically(path, format_json(profile.as_dict()))
    return path


def find_profile(identity: Identity) -> tuple[Profile | None, str]:
    """Return the cached profile for `identity`, or None and why there is none."""
    try:
        folder = profiles_folder()
        if os.path.isfile(folder / identity.file_name):
            return read_profile(folder / identity.file_name, identity), str(
                folder / identity.file_name
            )
    except UserError as error:
        return None, str(error)
    pair, _ = identity.file_name.split("-", 1)
    others = sorted(folder.glob(f"{pair}-*.json"))
    if not others:
        return None, "no profile for this pair of models: offload tune measures one"
    return (
        None,
        f"no profile for these settings, {_why_not(others[0], identity)}: offload tune measures one",
    )


def read_profile(path: Path, identity: Identity) -> Profile:
    """Read a profile and check that it holds for `identity`. Raises `UserError` otherwise."""
    profile = parse_profile(path)
    require_same_run(profile, identity, path)
    return profile


def require_same_run(profile: Profile, identity: Identity, path: Path) -> None:
    """Raise `UserError` for a profile, read from `path`, that does not hold for `identity`."""
    differences = identity.differences(profile.identity)
    if differences:
        raise UserError(
            f"profile {path.name} was measured for another run ({'; '.join(differences)}): {_AGAIN}"
        )


def require_writable(folder: Path) -> None:
    """Raise `UserError` where a folder cannot be written, before hours of measuring."""
    trial = folder / f".{os.getpid()}"
    write_atomically(trial, "")
    trial.unlink(missing_ok=True)  # a program in another container may have the same number


def write_atomically(path: Path, text: str) -> None:
    """Write a file, whole or not at all. Raises `UserError` where that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as scratch:
            scratch.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error.strerror}): set XDG_CACHE_HOME to another folder"
        ) from None


def format_json(values: Mapping[str, object]) -> str:
    """Return JSON with one line per entry, window of traces and layer of experts, for reading."""
    texts = {key: json.dumps(value) for key, value in values.items()}
    if isinstance(traces := values.get("traces"), list | tuple):
        texts["traces"] = _by_rows(traces)
    if isinstance(uses := values.get("expert_uses"), dict):
        rows = _by_rows(uses["uses_LE"])
        texts["expert_uses"] = f'{{"num_rows": {uses["num_rows"]}, "uses_LE": {rows}}}'
    return (
        "{\n" + ",\n".join(f" {json.dumps(key)}: {text}" for key, text in texts.items()) + "\n}\n"
    )


def _by_rows(rows: Iterable[object]) -> str:
    return "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]"


def _why_not(path: Path, identity: Identity) -> str:
    try:
        return (
            f"the one at hand has {'; '.join(identity.differences(parse_profile(path).identity))}"
        )
    except UserError as error:
        return f"the one at hand is of no use ({error})"


def parse_profile(path: Path) -> Profile:
    """Read and check a profile, whatever it was measured for. Raises `UserError`."""
    try:
        values = read_object(path, _AGAIN)
    except OSError as error:
        raise UserError(
            f"cannot read the profile {path} ({error.strerror}): check the path"
        ) from None
    found = values.pop("schema", None)
    if found != SCHEMA:
        raise UserError(
            f"profile {path.name} has schema {found}, this version reads {SCHEMA}: {_AGAIN}"
        )
    try:
        profile = _build(values)
        _check(profile)
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError) as error:
        raise UserError(f"profile {path.name} is malformed ({reason(error)}): {_AGAIN}") from None
    return profile


def _build(values: dict[str, Any]) -> Profile:
    """Build nested dataclasses from nested objects; a missing or unknown key is a `TypeError`."""
    identity = values["identity"]
    costs = {_NAME_OF.get(key, key): value for key, value in values["costs"].items()}
    parts: dict[str, Any] = {
        "identity": Identity(**{**identity, "machine": Machine(**identity["machine"])}),
        "costs": Costs(
            **{**costs, **{name: _curve(costs[name]) for name in ("compute_s", "draft_step_s")}}
        ),
        "dynamic_yields": tuple(DynamicYield(**one) for one in values.pop("grown")),
        "traces": tuple(tuple(map(int, trace)) for trace in values["traces"]),
    }
    if "expert_uses" in values:
        parts["expert_uses"] = _expert_uses(**values["expert_uses"])
    parts |= {name: tuple(map(float, values[name])) for name in ("acceptance", "standard_error")}
    return Profile(**{**values, **parts})


def _expert_uses(uses_LE: list[list[int]], num_rows: int) -> ExpertUses:
    """Return checked uses, since pools and plans are sized by them. Raises `ValueError`."""
    ensure(0 < len(uses_LE) <= _MOST_LAYERS, f"expert_uses must have 1 to {_MOST_LAYERS} layers")
    num_experts = len(uses_LE[0])
    ensure(
        0 < num_experts <= _MOST_EXPERTS,
        f"expert_uses must have 1 to {_MOST_EXPERTS} experts in a layer",
    )
    ensure(
        all(len(uses) == num_experts for uses in uses_LE),
        "every layer of expert_uses must have as many experts",
    )
    ensure(
        all(type(count) is int for count in (num_rows, *chain(*uses_LE))),
        "expert_uses must be whole numbers",
    )
    ensure(0 < num_rows < 2**63, "expert_uses must be of some rows")
    ensure(
        all(0 <= count <= num_rows for count in chain(*uses_LE)),
        "an expert is used at most once for each row",
    )
    return ExpertUses(tuple(map(tuple, uses_LE)), num_rows)


def _curve(value: dict[str, Any]) -> Curve:
    sizes = value["sizes"]
    seconds = value["seconds"]
    ensure(
        0 < len(sizes) == len(seconds) and sizes == sorted(set(sizes)),
        "a curve needs rising sizes, each a time",
    )
    return Curve(tuple(map(int, sizes)), tuple(map(float, seconds)))


def _check(profile: Profile) -> None:
    """Check that values make sense.

    Raises `ValueError`, or `UserError` for the acceptance vector.
    """
    proofs = profile.identity.proofs.values()
    ensure(
        all(isinstance(text, str) for own in proofs for text in own.values()),
        "proofs must be texts by name",
    )
    check_acceptance(profile.acceptance)
    costs = profile.costs
    times = (*costs.compute_s.seconds, *costs.draft_step_s.seconds, costs.link_bytes_per_s)
    ensure(all(0 < time < float("inf") for time in times), "times and rates must be positive")
    ensure(0 <= costs.verify_s < float("inf"), "verify_s must not be negative")
    ensure(0 <= costs.overlap_penalty <= 1, "friction must lie in [0, 1]")
    ensure(
        len(profile.standard_error) == len(profile.acceptance),
        "one standard error per acceptance entry",
    )
    ensure(
        all(0 <= error <= 1 for error in profile.standard_error),
        "standard errors must lie in [0, 1]",
    )
    ensure(0 < profile.smoothing < float("inf"), "smoothing must be positive")
    ensure(0 < profile.num_threads <= _MOST_THREADS, f"num_threads must lie in 1..{_MOST_THREADS}")
    for one in profile.dynamic_yields:
        ensure(one.num_nodes <= MAX_TREE_NODES, f"trees have at most {MAX_TREE_NODES} nodes")
        ensure(
            1 <= one.depth < one.num_nodes, "a dynamic tree has a depth, and more nodes than that"
        )
        ensure(
            1 <= one.tokens_per_sweep <= one.depth + 1,
            "a sweep yields one token, and one more for every level",
        )
    ranks = {rank for trace in profile.traces for rank in trace}
    ensure(
        bool(ranks) and ranks <= set(range(-1, NUM_RANKS)),
        f"traces must hold ranks in -1..{NUM_RANKS - 1}",
    )


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _brief(value: object) -> str:
    return value[:12] if isinstance(value, str) and len(value) == 32 else str(value)
