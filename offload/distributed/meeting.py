"""Ranks meet, and see that they mean the same: options, files, and all weights to the last byte."""

from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from offload.checkpoint.identity import ModelIdentity, identity_of, proved
from offload.distributed.join import Joined, joined, require_same_weights
from offload.distributed.orders import all_gather_objects, try_together
from offload.distributed.transport import Transport
from offload.engine.resolve import ResolvedRun
from offload.rank_roles import require_place
from offload.streaming.summing import with_sum


class Meeting(NamedTuple):
    """The way to all others."""

    transport: Transport
    notes: tuple[str, ...]  # for the user


def meet_ranks(run: ResolvedRun, resources: ExitStack, transport: Transport | None) -> Meeting:
    """Return the way to all other ranks, who meet where torchrun's environment says.

    It is open as long as `resources`. A transport that is there already is taken as it is.

    Raises `UserError` where ranks do not come, or have other files or options.
    """
    if transport is not None:
        return Meeting(transport, ())
    target = run.files.target
    options = run.options
    run.hooks.on_phase("waiting for the other ranks")
    identity = identity_of(target)
    has_draft = "given" if run.files.draft else "none"
    alike = {"--ranks": options.ranks, "--pipeline": options.pipeline, "--draft": has_draft}
    alike |= {"--dtype": options.dtype, "--context": str(options.context)}
    agreed = " ".join(f"{flag} {value}" for flag, value in alike.items())
    meeting = resources.enter_context(joined(require_place(), identity, agreed, target.shards))
    _prove(run, meeting, identity)
    return Meeting(meeting.transport, tuple(filter(None, [meeting.note()])))


def _prove(run: ResolvedRun, meeting: Joined, identity: ModelIdentity) -> None:
    """Prove that all ranks have the same weights, of which each will read its share alone.

    All are read once where nothing else proves it.

    Raises `UserError` on all of them where they have not.
    """
    told = [card.proofs for card in meeting.handshakes]
    if all(proved(told[0], own) for own in told):
        return
    run.hooks.on_phase("reading all weights once, to compare them with the other ranks'")
    read = partial(
        with_sum,
        run.files.target,
        identity,
        open_source=run.open_source,
        limit_bytes_per_s=run.options.limit_bytes_per_s,
        on_bytes=run.hooks.on_bytes,
    )
    mine = try_together(meeting.transport, lambda: identity if identity.has_sum else read())
    require_same_weights(all_gather_objects(meeting.transport, dict(mine.proofs)), is_final=True)
