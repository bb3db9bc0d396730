"""The bytes of each item in memory: caches, states, drafts, distributions, activations.

Sizes follow from shapes in headers, numbers of rows and positions. No torch. Invariant: each is the
most that is held at any time.
"""

from offload.checkpoint.sizes import ModelShape
from offload.sampling_options import NOISE_POSITIONS
from offload.trees.topology import PACES, most_rows, tier_rows

# code that runs for the first time, tokenizer, scratch of the matrix library: measured
RUNTIME_BYTES = 112 << 20
# committed tokens that one sweep reads by default, see `prompt_rows`
PROMPT_ROWS = 512
# ... and that a pass of a draft that reads the target's states takes in. Its weights stay in memory,
# so small passes take little longer, and what they leave goes to layers of the target.
STATE_ROWS = 128
# Rows that a feed-forward on a CPU takes at a time, and the most of one product.
INNER_ROWS = 256
# The head is read once per chunk. From about this many rows on multiplying takes longer than
# reading it (110 TFLOP/s over 0.86 TB/s on an L40), so smaller chunks would pay for reading and
# larger ones only take memory.
MAX_LOGITS_ROWS = 128
# scores, keys and values in float32 while rows attend in the order of their paths
PATH_SCRATCH_BYTES = 16 << 20
# Copies of a pass's scores while a tree grows: perturbed, joined, weighted, as chances.
_RANKING_COPIES = 4
# States of all rows of a pass up to which they take steps together; else row by row.
WIDE_STATES_BYTES = 16 << 20
# States that rows of a chain leave at once, before outputs are read from them.
STEPPED_STATES_BYTES = 1 << 20
# A text keeps a state behind its committed rows, one behind its last prompt, and a new one.
_KEPT_STATES = 3
# Keys and values in eight bits have a factor for each row of a head, in float32.
FACTOR_BYTES = 4
# Rows of a prompt behind which recurrent layers leave a state for other texts: states are as large as
# many rows.
POINT_ROWS = 512
# Copies of a state while it takes a step.
_STATE_COPIES = 6
# Hidden states of a pass lie as they were shown, as committed, and as the draft takes them.
_TAP_COPIES = 3
# Scratch of one draw: a block of float64 numbers, their keys, their order.
DRAW_BYTES = 16 << 20


def cache_slots(context: int, num_nodes: int, parallel: int) -> int:
    """Return the positions and rows of one text's cache.

    Prompts lie within its context. With one text at a time there is also room for branches that are
    scored.
    """
    return context + num_nodes + (min(PROMPT_ROWS, context) if parallel == 1 else 0)


def num_logits_rows(num_rows: int, *, is_gpu: bool) -> int:
    """Return the number of rows of a pass that are scored at once."""
    return min(num_rows, MAX_LOGITS_ROWS) if is_gpu else num_rows


def states_bytes(shape: ModelShape, num_rows: int, parallel: int, prompt_rows: int = 0) -> int:
    """Return the bytes that texts keep of recurrent layers, see `model.recurrent_cache`.

    `prompt_rows` of a pass leave states under way, for other texts.
    """
    kept = shape.recurrent
    num_passed = -(-prompt_rows // POINT_ROWS)
    states = parallel * _KEPT_STATES + num_passed
    return states * kept.state_bytes + parallel * num_rows * kept.kept_bytes


def stepping_bytes(shape: ModelShape, num_rows: int) -> int:
    """Return a recurrent layer's states while a tree passes through, see `model.recurrent_rows`."""
    largest_bytes = shape.recurrent.largest_bytes
    if num_rows * largest_bytes <= WIDE_STATES_BYTES:
        return _STATE_COPIES * num_rows * largest_bytes
    held_bytes = (num_rows.bit_length() + 2 + _STATE_COPIES) * largest_bytes
    return held_bytes + _STATE_COPIES * STEPPED_STATES_BYTES


def draft_bytes(
    draft: ModelShape, context: int, num_nodes: int, *, is_gpu: bool, parallel: int = 1
) -> int:
    """Return the bytes of a draft that stays whole, and of the scout below it.

    CUDA graphs keep activations of their own.
    """
    num_rows = most_rows(num_nodes) if draft.scout is None else tier_rows(num_nodes)
    models = [model for model in (draft, draft.scout) if model is not None]
    return sum(
        _draft_bytes(model, context, num_nodes, num_rows, is_gpu=is_gpu, parallel=parallel)
        for model in models
    )


def _draft_bytes(
    draft: ModelShape,
    context: int,
    num_nodes: int,
    num_rows: int,
    *,
    is_gpu: bool,
    parallel: int,
) -> int:
    """Return the bytes of one model that runs this many rows for a tree."""
    source_tokens = context if draft.encoder_bytes else 0
    slots = source_tokens + cache_slots(context, num_rows, parallel)
    kv_bytes = parallel * draft.kv_bytes_per_token * slots + states_bytes(draft, num_rows, parallel)
    weights_bytes = draft.num_bytes + draft.cast_bytes * len(
        (*draft.layer_bytes, *draft.encoder_bytes)
    )
    weights_bytes += draft.scratch_bytes
    if draft.experts is not None:
        weights_bytes += draft.num_expert_slots * draft.experts.slot_bytes
    if draft.shares_rest:  # except for a table that the target keeps on the host
        weights_bytes -= draft.head_bytes if is_gpu else draft.rest_bytes
        weights_bytes += draft.own_rest_bytes
    prompt_rows = STATE_ROWS if draft.tap_row_bytes else PROMPT_ROWS
    pass_bytes = activation_bytes(
        draft, max(prompt_rows, num_nodes), num_nodes, context, is_gpu=is_gpu
    )
    return (
        weights_bytes
        + kv_bytes
        + (2 if is_gpu else 1) * pass_bytes
        + growth_bytes(draft.vocab_size, num_nodes, num_rows)
    )


def taps_bytes(draft: ModelShape, num_rows: int) -> int:
    """Return the bytes of hidden states that a pass over this many rows hands a draft."""
    row_bytes = draft.tap_row_bytes + (draft.scout.tap_row_bytes if draft.scout else 0)
    return _TAP_COPIES * row_bytes * num_rows


def growth_bytes(vocab_size: int, num_nodes: int, num_rows: int) -> int:
    """Return the bytes of ranking in dynamic trees: float32 scores of all rows, and copies."""
    widest = max(pace.rows_per_pass(num_nodes) for pace in PACES)
    return 4 * vocab_size * (num_rows + _RANKING_COPIES * widest) if num_nodes > 1 else 0


def distribution_bytes(vocab_size: int, num_nodes: int) -> int:
    """Return the bytes of float32 distributions, one for every node but the last of a chain."""
    return 4 * vocab_size * (num_nodes - 1) + DRAW_BYTES if num_nodes > 1 else 0


def noise_bytes(vocab_size: int) -> int:
    """Return the bytes of the noise that a sampler keeps, in float64."""
    return 8 * vocab_size * NOISE_POSITIONS


def activation_bytes(
    shape: ModelShape, num_rows: int, num_logits: int, context: int, *, is_gpu: bool
) -> int:
    """Return the bytes of the widest pass: activations, logits, and masks.

    A mask has a number for each pair of a row and a position that the row may see.
    """
    num_pairs = num_rows * (context + num_rows)
    num_inner_rows = num_rows if is_gpu else min(num_rows, INNER_ROWS)
    rows_bytes = (
        shape.row_bytes - shape.inner_row_bytes
    ) * num_rows + shape.inner_row_bytes * num_inner_rows
    pass_bytes = rows_bytes + shape.logits_row_bytes * num_logits + shape.pair_bytes * num_pairs
    source_bytes = (
        context * (shape.row_bytes + shape.pair_bytes * context) if shape.encoder_bytes else 0
    )
    pass_bytes += stepping_bytes(shape, num_rows) + shape.column_bytes * (context + num_rows)
    return max(pass_bytes, source_bytes)  # an encoder takes in its prompt at once
