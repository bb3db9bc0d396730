"""Windows of text, each of which a tune traces once.

Invariant: a tune that is interrupted goes on behind its last finished window, and only for the very
same question.
"""

import json
from collections.abc import Sequence
from typing import Annotated, NamedTuple

from msgspec import Meta, MsgspecError, convert

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.files import read_object
from offload.checkpoint.sizes import model_shape
from offload.engine.decoder import Decoder
from offload.engine.hooks import Counted
from offload.engine.request import encode
from offload.engine.tokenizer import load_tokenizer
from offload.errors import UserError
from offload.planning.acceptance import NUM_RANKS
from offload.planning.profile import write_atomically
from offload.reports import tune_question
from offload.reports.tracing import ranks_of, tokens_again, write_in_turns
from offload.reports.tune_question import TuneQuestion


class TracedWindow(NamedTuple):
    """The results of one window."""

    # the accepted rank at each position, or -1
    ranks: Annotated[list[Annotated[int, Meta(ge=-1, lt=NUM_RANKS)]], Meta(min_length=1)]
    # of each of the question's dynamic trees: the tokens of its passes
    tokens_B: list[list[Annotated[int, Meta(ge=1)]]]


def encode_windows(
    target: Checkpoint, texts: Sequence[str], num_tokens: int
) -> tuple[tuple[int, ...], ...]:
    """Return `cut_windows` of texts, by the target's tokenizer. Raises `UserError`."""
    tokenizer = load_tokenizer(target.tokenizer_path)
    vocab_size = model_shape(target).vocab_size
    encoded = [encode(tokenizer, text, vocab_size, raw=True) for text in texts]
    return cut_windows(encoded, num_tokens)


def cut_windows(texts: Sequence[Sequence[int]], num_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Return windows that give `num_tokens` to trace, or all there are, spread over the texts.

    Raises `UserError` where no text is as long as one window.
    """
    size = tune_question.NUM_PROMPT
    stride = size + tune_question.NUM_NEW
    windows = list[tuple[int, ...]]()
    for ids in texts:
        windows += (tuple(ids[lo : lo + size]) for lo in range(0, len(ids) - size + 1, stride))
    if not windows:
        longest = max(map(len, texts), default=0)
        requirement = f"a text must have {size} tokens for one window"
        raise UserError(f"{requirement}, the longest has {longest}: give more text")
    wanted = max(1, -(-num_tokens // tune_question.NUM_NEW))
    step = max(1.0, len(windows) / wanted)
    return tuple(windows[int(index * step)] for index in range(min(wanted, len(windows))))


def trace_windows(
    decoder: Decoder, question: TuneQuestion, progress: Counted
) -> list[TracedWindow]:
    """Trace every window; those that an interrupted tune has left are not measured again.

    The last one is: the times of a tune are those of the passes that this decoder runs.
    """
    traced = _unfinished(question)[: len(question.windows) - 1]
    for index in range(len(traced), len(question.windows)):
        progress(index, len(question.windows), "tracing text")
        traced.append(trace_window(decoder, question, index))
        write_atomically(question.state_path, json.dumps({"windows": traced}))
    progress(len(traced), len(traced), "tracing text")
    return traced


def trace_window(decoder: Decoder, question: TuneQuestion, index: int) -> TracedWindow:
    """Let the target write behind one window, and rank what it wrote."""
    window = question.windows[index]
    sampling = question.sampling.later(index)
    num_new = tune_question.NUM_NEW
    written = write_in_turns(decoder, window, sampling, num_new, question.trees, first=index)
    tokens_B = [
        tokens_again(decoder, window, written, sampling, tree) for tree in question.dynamic_trees
    ]
    return TracedWindow(ranks_of(decoder, window, written, sampling), tokens_B)


def _unfinished(question: TuneQuestion) -> list[TracedWindow]:
    """Return the finished windows of an interrupted tune; none of a file that is not whole."""
    try:
        windows = read_object(question.state_path, "it is measured again")["windows"]
        traced = convert(windows, list[TracedWindow])
    except (OSError, ValueError, KeyError, MsgspecError):
        return []
    is_sound = len(traced) <= len(question.windows)
    is_sound &= all(len(window.tokens_B) == len(question.dynamic_trees) for window in traced)
    return traced if is_sound else []
