"""Gemma 4's assistants as draft decoders, and which of the target's layers lend them keys.

Names are those of published files (transformers 5.24 `gemma4_assistant`). Invariant: an assistant
that does not fit the target is refused from headers alone.
"""

from typing import Any

from offload.checkpoint.carried import MIXER
from offload.checkpoint.checkpoint import Carried, Checkpoint
from offload.checkpoint.heads import ASSISTANT, OTHER_HEAD, check_kind, joined
from offload.checkpoint.sizes import config_sizes
from offload.checkpoint.small_files import of_text
from offload.encoding.base import Settings
from offload.errors import UserError, require

_MIXED = {
    "pre_projection.weight": f"{MIXER}pre_projection.weight",
    "post_projection.weight": f"{MIXER}post_projection.weight",
    "masked_embedding.centroids.weight": f"{MIXER}centroids.weight",
}
_ORDER = "masked_embedding.token_ordering"
_TABLE = "model.embed_tokens.weight"
# attention settings that a target and its assistant must share
_ALIKE = ("head_dim", "global_head_dim", "num_key_value_heads", "num_global_key_value_heads")


def assistant_checkpoint(target: Checkpoint, draft: Checkpoint) -> Checkpoint:
    """Return an assistant as a decoder that reads the target's keys. Raises `UserError`."""
    where = draft.name
    check_kind(draft, ASSISTANT)
    theirs = of_text(target.config)
    sizes_of_draft = dict(of_text(draft.config))
    sizes = config_sizes(target)
    kind = str(theirs.get("model_type"))
    requirement = f"{where}: an assistant of Gemma 4 goes with a Gemma 4"
    require(kind.startswith("gemma4"), requirement, kind, OTHER_HEAD)
    for given, wanted in (
        (draft.config.get("backbone_hidden_size"), sizes["hidden_size"]),
        (sizes_of_draft.get("vocab_size"), sizes["vocab_size"]),
        *((sizes_of_draft.get(name), theirs.get(name)) for name in _ALIKE),
    ):
        requirement = (
            f"{where}: an assistant of another target (sizes must be {target.name}'s, {wanted})"
        )
        require(None in (given, wanted) or given == wanted, requirement, given, OTHER_HEAD)
    mixed = {_MIXED[name]: entry for name, entry in draft.extra.items() if name in _MIXED}
    order = draft.extra.get(_ORDER)
    clusters = None
    if draft.config.get("use_ordered_embeddings") is True and order is not None:
        clusters = (order, int(draft.config.get("centroid_intermediate_top_k") or 32))
    missing = [name for name in (*_MIXED,)[:2] if _MIXED[name] not in mixed]
    missing += [_TABLE] if _TABLE not in draft.tensors or _TABLE not in target.tensors else []
    missing += [_ORDER] if draft.config.get("use_ordered_embeddings") and not clusters else []
    if missing:
        raise UserError(f"{where}: no {missing[0]}: take an assistant that is whole")
    table = {f"{MIXER}table.weight": target.tensors[_TABLE]}
    sizes_of_draft |= {
        "model_type": kind,
        "num_kv_shared_layers": 0,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
    }
    carried = Carried(
        frozenset(),
        is_fed_normed=True,
        lent=_lenders(where, theirs, sizes_of_draft),
        clusters=clusters,
    )
    return joined(target, draft, sizes_of_draft, {**draft.tensors, **mixed}, carried, table)


def _lenders(where: str, target: Settings, borrower: Settings) -> tuple[tuple[str, int], ...]:
    """Return, by kind of attention, the target's last layer with keys. Raises `UserError`."""
    kinds: Any = target.get("layer_types") or []
    num_own = len(kinds) - int(target.get("num_kv_shared_layers") or 0)
    last = {kind: layer for layer, kind in enumerate(kinds[:num_own])}
    lent = dict.fromkeys(borrower.get("layer_types") or ["full_attention"])
    unknown = [kind for kind in lent if kind not in last]
    requirement = f"{where}: an assistant reads keys of layers that the target has"
    require(not unknown, requirement, ", ".join(map(str, unknown)), OTHER_HEAD)
    return tuple((kind, last[kind]) for kind in lent)
