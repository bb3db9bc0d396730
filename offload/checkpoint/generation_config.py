"""A model's suggested generation settings, from the generation_config.json beside its weights.

The file may be hostile, and is checked as such.
"""

import os
from pathlib import Path
from typing import Any

from offload.checkpoint.checkpoint import Checkpoint
from offload.checkpoint.download import download
from offload.checkpoint.files import read_json
from offload.checkpoint.open import is_from_hub
from offload.checkpoint.small_files import has_encoder, of_text
from offload.declaration import options_at
from offload.errors import UserError
from offload.sampling_options import Sampling

_NAME = "generation_config.json"
_SUGGESTED = options_at("suggested", Sampling)


def suggested_sampling(model: str, seed: int) -> Sampling:
    """Return the sampling that a folder or hub id suggests.

    It is greedy unless the file sets `do_sample`; a repetition penalty always holds. Settings that
    the file leaves out are off: temperature 1, all tokens. Raises `UserError` for values that make
    no sense.
    """
    settings = _read(model)
    is_drawn = settings.get("do_sample", False) is True
    given = {}
    try:
        for key, option in _SUGGESTED.items():
            value = settings.get(key)
            if value is not None and (is_drawn or not option.is_drawing):
                if type(value) not in ((int,) if option.kind is int else (int, float)):
                    raise UserError(f"`{option.name}` must be a number, got {value!r:.80}")
                given[option.name] = value
        return Sampling(**{"temperature": 1.0 if is_drawn else 0.0, **given, "seed": seed})
    except UserError as error:
        remedy = "mend the file, or leave it out with `greedy`"
        raise UserError(f"{model}: {_NAME}: {error}; {remedy}") from None


def served_sampling(model: str) -> Sampling:
    """Return the sampling for requests that name none: the model's own suggestion.

    Models are tuned for their suggestion: one that is tuned for temperature 0.6 is worse at 1,
    OpenAI's default, which is used where a model suggests none. Raises `UserError` for a suggestion
    that makes no sense.
    """
    suggested = suggested_sampling(model, 0)
    return Sampling(temperature=1.0) if suggested.is_greedy else suggested


def generation_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return settings as transformers merges them: generation config, config, its text part."""
    path = checkpoint.small_files / _NAME
    outer = {name: value for name, value in checkpoint.config.items() if value is not None}
    return {
        **of_text(checkpoint.config),
        **outer,
        **(read_json(path) if os.path.isfile(path) else {}),
    }


def stated_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the settings of a generation_config.json that transformers applies in every run.

    Without that file, transformers takes such settings from config.json.
    """
    path = checkpoint.small_files / _NAME
    return read_json(path) if os.path.isfile(path) else dict(checkpoint.config)


def start_ids_of(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return the ids before the decoder's text, none without an encoder. Raises `UserError`."""
    if not has_encoder(checkpoint.config):
        return ()
    settings = generation_settings(checkpoint)
    named = settings.get("decoder_start_token_id")
    start = settings.get("bos_token_id") if named is None else named
    if type(start) is not int or start < 0:
        where = f"{checkpoint.name}: decoder_start_token_id must be a token id"
        raise UserError(f"{where}, got {start!r:.80}: put it into {_NAME} (0 for T5)")
    return (start,)


def end_ids_of(checkpoint: Checkpoint) -> frozenset[int]:
    """Return the tokens that end a sequence. Raises `UserError`.

    They are those of generation_config.json; where it names none, those of config.json, at which
    transformers' `generate` would not stop.
    """
    named = generation_settings(checkpoint).get("eos_token_id")
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if not all(type(token) is int for token in ids):
        where = f"{checkpoint.name}: eos_token_id must be a token id or several"
        raise UserError(f"{where}, got {named!r}: fix it")
    return frozenset(ids)


def _read(model: str) -> dict[str, Any]:
    folder = Path(os.path.expanduser(model))
    if os.path.isfile(folder):  # GGUF
        folder = folder.parent
    elif is_from_hub(model):
        folder = download(model, [_NAME])
    return read_json(folder / _NAME) if os.path.isfile(folder / _NAME) else {}
