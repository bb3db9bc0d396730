"""What `offload tune` measured for a pair of models on a machine, kept as JSON in the user's cache.

The text that it is measured with is looked at here as well, before torch is imported. A profile
holds for exactly the models, rule, sampling settings and machine that it names. Invariant: any
other profile, or a malformed one, is never used: it is refused where the user named it, and skipped
with a reason where it was found.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from msgspec import Meta, MsgspecError, convert

from offload.checkpoint.checkpoint import Checkpoint, ModelFiles
from offload.checkpoint.files import cache_folder, read_object, read_text, write_whole
from offload.checkpoint.identity import identity_of, proved
from offload.checkpoint.layer_sizes import ExpertShape
from offload.checkpoint.tensors import MOST_EXPERTS
from offload.errors import UserError, ensure, os_errors_as_user_error, reason, require
from offload.machine import MAX_THREADS, cpu_name
from offload.planning.acceptance import DynamicYield
from offload.planning.cost_model import Costs
from offload.planning.expert_traffic import ExpertRouting
from offload.sampling_options import Sampling
from offload.trees.topology import check_acceptance

SCHEMA = 4  # raise it when a field changes its meaning
_MOST_LAYERS = 4096  # of any model
_AGAIN = "run offload tune again"
# uses of the experts of a layer
_Row = Annotated[
    tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1, max_length=MOST_EXPERTS)
]
# terms of data sheets, which measured curves include
_NEVER_MEASURED = ("grow_s", "host_s", "ends_share")
_SPOKEN = {
    "target": "target model",
    "draft": "draft model",
    "num_cores": "core count",
    "dtype": "compute type",
}

_MOST_TEXT_BYTES = 1 << 30


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
    def from_models(
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
            proofs={part: model.proofs for part, model in models.items()},
        )

    @property
    def file_name(self) -> str:
        """Return one name per identity; it begins with the pair, whose profiles sort together."""
        settings = f"{self.rule}-t{self.temperature:g}-p{self.top_p:g}-k{self.top_k}"
        return f"{_short(self.target + self.draft)}-{settings}-{_short(repr(self))}.json"

    def differences(self, other: "Identity") -> list[str]:
        """Return in words what differs in the other identity."""
        mine, others = (
            {**asdict(identity), **asdict(identity.machine)} for identity in (self, other)
        )
        keys = [
            key for key in mine if key not in ("machine", "proofs") and mine[key] != others[key]
        ]
        # A profile shapes the tree and decides no token, so weights that look the same are enough;
        # a sum or the hub's checksum that differs shows that they are not.
        changes = [
            f"{_SPOKEN.get(key, key)} {_brief(others[key])}, not {_brief(mine[key])}"
            for key in keys
        ]
        for part in ("target", "draft"):
            both = (identity.proofs.get(part, {}) for identity in (self, other))
            if part not in keys and proved(*both) is False:
                changes.append(f"other {part} weights, by their checksums")
        return changes


@dataclass(frozen=True, slots=True)
class ExpertUses:
    """How often rows of the target were routed to each expert; dense layers are not counted."""

    uses_LE: Annotated[tuple[_Row, ...], Meta(min_length=1, max_length=_MOST_LAYERS)]
    num_rows: Annotated[int, Meta(ge=1, le=2**63 - 1)]  # of all passes together

    @property
    def routing(self) -> ExpertRouting:
        """Return the routing that was counted."""
        return ExpertRouting.counted(self.uses_LE, self.num_rows)

    @property
    def uses_B(self) -> list[float]:
        """Return the uses per row of each expert, layer after layer."""
        return [count / self.num_rows for count in chain(*self.uses_LE)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Measured acceptance and times."""

    identity: Identity
    target_name: str
    draft_name: str
    created: str  # UTC, ISO 8601
    num_tokens: int
    acceptance: tuple[float, ...]  # by rank
    standard_error: tuple[Annotated[float, Meta(ge=0, le=1)], ...]  # of each entry
    num_threads: Annotated[int, Meta(ge=1, le=MAX_THREADS)]  # the most that computed
    costs: Costs
    dynamic_yields: tuple[DynamicYield, ...]  # for a few bounds; empty where the rule has none
    expert_uses: ExpertUses | None = None  # of a mixture whose experts are read on demand

    @property
    def routing(self) -> ExpertRouting | None:
        """Return the routing that was counted, or None."""
        return None if self.expert_uses is None else self.expert_uses.routing

    def of_experts(self, experts: ExpertShape | None, *, is_named: bool = False) -> "Profile":
        """Return the profile for a target with these experts: counts of others are dropped.

        Raises `UserError` for them where the user has named the profile.
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
        """Return the values that the file holds and `--json` prints."""
        values = asdict(self)
        for name in _NEVER_MEASURED:
            del values["costs"][name]
        uses = values.pop("expert_uses")
        values |= {} if uses is None else {"expert_uses": uses}
        return {"schema": SCHEMA, **values}


# takes settings and rule; returns the profile, or None and why there is none
FindProfile: TypeAlias = Callable[[Sampling, str], tuple[Profile | None, str]]


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
        path = folder / identity.file_name
        if os.path.isfile(path):
            profile = parse_profile(path)
            require_same_run(profile, identity, path)
            return profile, str(path)
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


NOT_WANTED = (None, "no profile is wanted")


def profile_finder(
    files: ModelFiles, named: Path | None, machine: Machine | None, experts: ExpertShape | None
) -> FindProfile:
    """Return a finder of a pair's profile, which raises `UserError` for a named one that misfits.

    Args:
        named: what the user has named; None looks for the one that was saved for the run.
        machine: that computes; None is another one: no profile that was made here says anything of
            it, and the times of a named one do not matter.
        experts: of the target, if they are read on demand.
    """
    target, draft = files
    if draft is None:
        return lambda *_: NOT_WANTED
    has_weights = target.is_here and draft.is_here

    @lru_cache(maxsize=256)  # a server is asked for any settings
    def find(sampling: Sampling, rule: str) -> tuple[Profile | None, str]:
        if feature := sampling.unprofiled:
            none = f"no profile holds for a run with {feature}"
            require(named is None, none, f"`profile` {named}", "leave one of them out")
            return None, none
        if named is None and (machine is None or not has_weights):
            return None, "no profile was made there"
        if named is None:
            assert machine is not None, "it is here"
            identity = Identity.from_models(target, draft, sampling, rule, machine)
            profile, where = find_profile(identity)
            return profile and profile.of_experts(experts), where
        profile = parse_profile(named)
        if has_weights:
            here = machine or profile.identity.machine
            identity = Identity.from_models(target, draft, sampling, rule, here)
            require_same_run(profile, identity, named)
        return profile.of_experts(experts, is_named=True), str(named)

    return lambda sampling, rule: find(sampling.kind, rule)


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
    with os_errors_as_user_error(f"cannot write {path}", "set XDG_CACHE_HOME to another folder"):
        write_whole(path, text)


def format_json(values: Mapping[str, object]) -> str:
    """Return JSON with one line per entry and layer of experts, for reading."""
    texts = {key: json.dumps(value) for key, value in values.items()}
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
    with os_errors_as_user_error(f"cannot read the profile {path}", "check the path"):
        values = read_object(path, _AGAIN)
    schema = values.pop("schema", None)
    if schema != SCHEMA:
        raise UserError(
            f"profile {path.name} has schema {schema}, this version reads {SCHEMA}: {_AGAIN}"
        )
    try:
        profile = _built(values)
        _check(profile)
    except (TypeError, KeyError, ValueError, AttributeError, MsgspecError) as error:
        raise UserError(f"profile {path.name} is malformed ({reason(error)}): {_AGAIN}") from None
    return profile


def _built(values: dict[str, Any]) -> Profile:
    """Return the profile of declared types that a file holds; what it holds beyond is refused."""
    profile = convert(values, Profile)
    _require_known(values, profile.as_dict())
    return profile


def _require_known(given: Any, kept: Any) -> None:
    """Raise `ValueError` where nested objects have keys that were not kept."""
    if isinstance(given, dict):
        for key, value in given.items():
            ensure(key in kept, f"{key!r:.80} is no key of it")
            _require_known(value, kept[key])


def _check(profile: Profile) -> None:
    """Check what types do not tell. Raises `ValueError`, or `UserError` for the acceptance."""
    check_acceptance(profile.acceptance)
    is_whole = len(profile.standard_error) == len(profile.acceptance)
    ensure(is_whole, "one standard error per acceptance entry")
    times = (*profile.costs.compute_s.seconds, *profile.costs.draft_step_s.seconds)
    ensure(all(time > 0 for time in times), "times must be positive")
    for shape in profile.dynamic_yields:
        ensure(
            shape.depth < shape.num_nodes, "a dynamic tree has a depth, and more nodes than that"
        )
        requirement = "a pass yields one token, and one more for every level"
        ensure(shape.tokens_per_sweep <= shape.depth + 1, requirement)
    if uses := profile.expert_uses:
        # pools and plans are sized by them
        num_sizes = len({len(row) for row in uses.uses_LE})
        ensure(num_sizes == 1, "every layer of expert_uses must have as many experts")
        most = max(chain(*uses.uses_LE))
        ensure(most <= uses.num_rows, "an expert is used at most once for each row")


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _brief(value: object) -> str:
    return value[:12] if isinstance(value, str) and len(value) == 32 else str(value)


def tuning_text(path: Path) -> str:
    """Return the text to tune with. Raises `UserError` where it is missing, empty or not UTF-8."""
    # models write \n alone
    text = read_text(path, "the text", _MOST_TEXT_BYTES).replace("\r\n", "\n")
    if not text.strip():
        raise UserError(f"the text {path} is empty: give text of the kind that will be decoded")
    return text
