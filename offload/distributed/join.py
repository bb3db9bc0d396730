"""How processes that only know where to meet become ranks that talk and have the same weights.

First their handshakes are compared, JSON in the store of torch.distributed. A rank that does not
come in time is named; one with another version, other files or other options is refused, on every
rank alike and before anything is sent. Weights are proved to be the same to the last byte, if need
be by reading all of them once.
"""

import os
import socket
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist
from msgspec import Struct

from offload.checkpoint.identity import PARTS, ModelIdentity, identity_of, proved
from offload.declaration import listed
from offload.distributed.agreement import gather_values, try_together
from offload.distributed.transport import Channel, Transport, chosen_interface
from offload.engine.setup import Setup
from offload.errors import TOLD, RankError, UserError, ensure, reason, require
from offload.interrupts import terminated_at_once, terminated_later
from offload.rank_roles import RankInfo, require_place
from offload.streaming.summing import with_sum

# the version of messages and handshakes; it changes if an older rank would misread them
PROTOCOL = 5
JOIN_LIMIT_S = 120.0
EXCHANGE_LIMIT_S = 60.0
_MAX_HANDSHAKE_BYTES = 65536
_ASK_AGAIN_S = 0.1
# exchanges may wait longer than the limit of silence, so that silence is noticed first
_PATIENCE = 1.2
# time for rank 0 to print a reason before torchrun ends it because another rank ended
_TELL_S = 1.0
_READ_S = 5.0
SAME_FILES = "give both the same files"
_REMEDIES = {
    **dict.fromkeys(("offload", "torch", "protocol"), "install the same version on both"),
    "options": "start both with the same flags",
    **dict.fromkeys(PARTS, SAME_FILES),
}


class RankHandshake(Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank states when it joins."""

    must_agree: dict[str, str]  # values that must be equal, by the keys of `_REMEDIES`
    proofs: dict[str, str]  # proofs of the weights, see `ModelIdentity`
    host: str  # a name, and an id for hosts of the same name
    disks: list[str]  # disks from which it reads weights

    @classmethod
    def of_this(cls, model: ModelIdentity, options: str, shards: Sequence[Path]) -> "RankHandshake":
        """Return this process's handshake; the arguments are those of `joined`."""
        release = ".".join(torch.__version__.split(".")[:2])
        # imported late: the package lies above all of its folders
        version = sys.modules["offload"].__version__
        agreed = {
            "offload": version,
            "torch": release,
            "protocol": str(PROTOCOL),
            "options": options,
            **model.parts,
        }
        disks = sorted({str(path.stat().st_dev) for path in shards})
        return cls(agreed, dict(model.proofs), f"{socket.gethostname()} {_boot_id()}", disks)

    @classmethod
    def parse(cls, content: bytes, rank: int) -> "RankHandshake":
        """Parse another rank's handshake, which is not trusted. Raises `UserError`."""
        try:
            ensure(len(content) <= _MAX_HANDSHAKE_BYTES, "it is too long")
            return msgspec.json.decode(content, type=cls)
        except (ValueError, RecursionError):
            raise UserError(
                f"rank {rank} says of itself what is no handshake: {_REMEDIES['protocol']}"
            ) from None


class Joined(NamedTuple):
    """Ranks that have met."""

    transport: Transport
    handshakes: list[RankHandshake]  # by rank

    def note(self) -> str:
        """Return notes for the user on the ranks' places; empty if there are none."""
        users = defaultdict[tuple[str, str], list[int]](list)
        for rank, handshake in enumerate(self.handshakes):
            for disk in handshake.disks:
                users[handshake.host, disk].append(rank)
        shared = sorted({tuple(ranks) for ranks in users.values() if len(ranks) > 1})
        return "; ".join(
            f"ranks {listed([*map(str, ranks)])} read one disk, its speed is divided"
            for ranks in shared
        )


def meet_ranks(
    setup: Setup, resources: ExitStack, transport: Transport | None
) -> tuple[Transport, tuple[str, ...]]:
    """Return the way to all other ranks, open as long as `resources`, and notes.

    They meet where torchrun's environment says; a given transport is used as it is. Raises
    `UserError` if ranks do not come, or have other files or options.
    """
    if transport is not None:
        return transport, ()
    target = setup.files.target
    options = setup.options
    setup.hooks.on_phase("waiting for the other ranks")
    identity = identity_of(target)
    alike = {
        "--ranks": options.ranks,
        "--pipeline": options.pipeline,
        "--draft": setup.files.draft_kind,
    }
    alike |= {"--dtype": setup.dtype, "--context": str(options.context)}
    alike |= {"--parallel": str(options.parallel)}
    agreed = " ".join(f"{flag} {value}" for flag, value in alike.items())
    joint = resources.enter_context(joined(require_place(), identity, agreed, target.shards))
    _prove(setup, joint, identity)
    return joint.transport, tuple(filter(None, [joint.note()]))


def _prove(setup: Setup, joint: Joined, identity: ModelIdentity) -> None:
    """Prove that all ranks have the same weights, if need be by reading all of them once.

    Raises `UserError` on all of them if they differ.
    """
    proofs_of_ranks = [handshake.proofs for handshake in joint.handshakes]
    if all(proved(proofs_of_ranks[0], proofs) for proofs in proofs_of_ranks):
        return
    setup.hooks.on_phase("reading all weights once, to compare them with the other ranks'")
    read = partial(
        with_sum,
        setup.files.target,
        identity,
        open_source=setup.open_source,
        limit_bytes_per_s=setup.options.limit_bytes_per_s,
        on_bytes=setup.hooks.on_bytes,
    )
    mine = try_together(joint.transport, lambda: identity if identity.has_sum else read())
    proofs = gather_values(joint.transport, dict(mine.proofs), dict[str, str])
    require_same_weights(proofs, is_final=True)


@contextmanager
def joined(
    place: RankInfo,
    model: ModelIdentity,
    options: str,
    shards: Sequence[Path],
    *,
    limit_s: float = JOIN_LIMIT_S,
    exchange_limit_s: float = EXCHANGE_LIMIT_S,
) -> Iterator[Joined]:
    """Join the ranks, which talk until this context ends; each rank's last word says how it ended.

    Args:
        model: must be the same on all ranks, as far as is known yet.
        options: settings that must be the same, as a user would recognise them.
        shards: files that weights are read from, whose disks are compared.
        limit_s: how long to wait for a rank that does not come.
        exchange_limit_s: how long a rank may be silent, or keep others waiting in an exchange.

    Raises `UserError` where a rank does not come or does not agree.
    """
    with terminated_at_once():
        store = meet(place, limit_s)
    handshakes = exchange_handshakes(
        store, place, RankHandshake.of_this(model, options, shards), limit_s
    )
    with _marking_as_told():
        compare(handshakes)
    with terminated_at_once():
        transport = _open(store, place, limit_s, exchange_limit_s)
    with _marking_as_told(), ended_by(transport):
        yield Joined(transport, handshakes)


@contextmanager
def _marking_as_told() -> Iterator[None]:
    """Mark an error that all ranks have received."""
    try:
        yield
    except BaseException as error:
        error.add_note(TOLD)
        raise


@contextmanager
def ended_by(transport: Transport) -> Iterator[None]:
    """Close the transport at the end, with the reason if that is an error.

    Rank 0 receives a loss even after SIGTERM.
    """
    is_refusal = False
    why = ""
    try:
        with terminated_later(transport.lost, is_head=transport.rank == 0):
            yield
    except (RankError, GeneratorExit):
        raise
    # a rank that followed the head to its end exits so
    except SystemExit as leaving:
        why = f"exit code {leaving.code}" if leaving.code else ""
        raise
    except KeyboardInterrupt:
        why = "interrupted"
        raise
    except BaseException as error:
        is_refusal = isinstance(error, UserError)
        why = reason(error)
        raise
    finally:
        transport.close(why, is_refusal=is_refusal)


def leave_reason(place: RankInfo, line: str, *, meet_s: float, heard_s: float) -> bool:
    """Send rank 0 the reason not to join; return True if it arrived. Raises `UserError`."""
    store = meet(place, meet_s)
    due_s = monotonic() + heard_s
    try:
        store.set(f"reason/{place.rank}", line)
        while not store.check([f"heard/{place.rank}"]):
            if monotonic() > due_s:
                return False
            sleep(_ASK_AGAIN_S)
    # rank 0 has left with a reason of its own, or with this one
    except RuntimeError:
        return True
    sleep(_TELL_S)
    return True


def leave_death(place: RankInfo, line: str) -> None:
    """Tell rank 0, should it wait for that rank, how its process has ended. Raises `UserError`."""
    meet(place._replace(rank=-1), _READ_S).set(f"death/{place.rank}", line)


def meet(place: RankInfo, limit_s: float) -> dist.Store:
    """Return the store that all ranks write to. Raises `UserError` if it cannot be reached."""
    is_host = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = dist.TCPStore(
            place.address,
            place.port,
            None,
            is_host,
            timedelta(seconds=limit_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, ValueError, OSError) as error:
        requirement = (
            f"rank {place.rank} must reach {place.address}:{place.port} within {limit_s:g} s"
        )
        raise UserError(
            f"{requirement}, got {reason(error)}: is it started there, is the port open?"
        ) from None
    return dist.PrefixStore("offload", store)


def exchange_handshakes(
    store: dist.Store, place: RankInfo, mine: RankHandshake, limit_s: float
) -> list[RankHandshake]:
    """Return the handshakes of all ranks.

    Raises `UserError` for a rank that is late, or gave up, `RankError` without a store.
    """
    try:
        store.set(f"card/{place.rank}", msgspec.json.encode(mine).decode())
        _wait_for_handshakes(store, place.num_ranks, limit_s)
        cards = [store.get(f"card/{rank}") for rank in range(place.num_ranks)]
        _wait_for_readers(store, place)
    # torch raises various subclasses
    except RuntimeError:
        raise RankError("rank 0 is gone (it has closed the store that ranks meet at)") from None
    return [RankHandshake.parse(card, rank) for rank, card in enumerate(cards)]


def _wait_for_readers(store: dist.Store, place: RankInfo) -> None:
    """Have rank 0, whose end closes the store, stay until all have read it, or `_READ_S`."""
    store.set(f"read/{place.rank}", "")
    due_s = monotonic() + _READ_S
    keys = [f"read/{rank}" for rank in range(place.num_ranks)]
    while place.rank == 0 and not store.check(keys) and monotonic() < due_s:
        sleep(_ASK_AGAIN_S)


def _wait_for_handshakes(store: dist.Store, num_ranks: int, limit_s: float) -> None:
    """Wait until all ranks have joined. Raises `UserError` for a refusal or a late rank."""
    due_s = monotonic() + limit_s
    missing = set(range(num_ranks))
    while missing := {rank for rank in missing if not store.check([f"card/{rank}"])}:
        for rank in sorted(missing):
            if store.check([f"death/{rank}"]):
                raise RankError(f"rank {rank} {store.get(f'death/{rank}').decode()}")
            if store.check([f"reason/{rank}"]):
                store.set(f"heard/{rank}", "")
                raise UserError(
                    f"rank {rank}: {store.get(f'reason/{rank}')[:1024].decode(errors='replace')}"
                )
        if monotonic() > due_s:
            who = f"rank{'s' if len(missing) > 1 else ''} {listed([*map(str, sorted(missing))])}"
            error = UserError(
                f"all {num_ranks} ranks must come within {limit_s:g} s, got none of {who}: see why there"
            )
            # rank 0 reports the same
            if 0 not in missing:
                error.add_note(TOLD)
            raise error
        sleep(_ASK_AGAIN_S)


def compare(handshakes: Sequence[RankHandshake]) -> None:
    """Raise `UserError`, the same on every rank, if ranks would misunderstand each other."""
    first = handshakes[0]
    for rank, handshake in enumerate(handshakes):
        for subject, remedy in _REMEDIES.items():
            expected, got = (card.must_agree.get(subject, "none") for card in (first, handshake))
            if expected != got:
                requirement = f"ranks must have the same {subject}"
                raise UserError(
                    f"{requirement}, got {expected!r} on rank 0 and {got!r} on rank {rank}: {remedy}"
                )
    require_same_weights([handshake.proofs for handshake in handshakes], is_final=False)


def require_same_weights(proofs: Sequence[Mapping[str, str]], *, is_final: bool) -> None:
    """Raise `UserError` for other weights, or for weights not proved to be the same at the end."""
    for rank, rank_proofs in enumerate(proofs):
        is_same = proved(proofs[0], rank_proofs)
        if is_same is False or (is_final and not is_same):
            requirement = "ranks must have the same weights, to the last byte"
            raise UserError(
                f"{requirement}, got others on rank {rank} than on rank 0: {SAME_FILES}"
            )


def _open(store: dist.Store, place: RankInfo, limit_s: float, exchange_limit_s: float) -> Transport:
    """Return a transport over new process groups. Raises `UserError` for unreachable ranks."""
    meeting = timedelta(seconds=limit_s)
    talking = timedelta(seconds=exchange_limit_s)
    requirement = (
        "a process has one decoder of several ranks at a time, and no other group of torch's"
    )
    require(not dist.is_initialized(), requirement, "another", "close that first")
    try:
        with chosen_interface(place.address, place.port):
            return _grouped(store, place, meeting, talking)
    except RuntimeError as error:
        requirement = f"rank {place.rank} must reach all others at the address by which it is known"
        raise UserError(
            f"{requirement}, got {reason(error)}: set GLOO_SOCKET_IFNAME to the network between them"
        ) from None


def _grouped(
    store: dist.Store, place: RankInfo, meeting: timedelta, talking: timedelta
) -> Transport:
    """Return a transport; raises what torch does."""
    dist.init_process_group(
        "gloo", store=store, rank=place.rank, world_size=place.num_ranks, timeout=talking
    )
    channels = {channel: dist.new_group(timeout=meeting, backend="gloo") for channel in Channel}
    exchange = dist.new_group(timeout=_PATIENCE * talking, backend="gloo")
    dist.barrier()
    assert dist.group.WORLD is not None, "it was made above"
    return Transport(channels, exchange, dist.group.WORLD, talking.total_seconds())


def _boot_id() -> str:
    """Return an id that differs between hosts, and hosts of containers, of the same name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
