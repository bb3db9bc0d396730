"""Runs refused before torch is imported, by options, headers and free memory alone.

Importing torch and transformers takes seconds, too long to wait for a line such as "too little
memory". Invariant: whatever is refused here loading would refuse as well, by the same functions.
Models on the hub, on a GPU or on other ranks, or those that have to be made first, are left to
loading.
"""

import os
from dataclasses import replace
from pathlib import Path

from offload.checkpoint.checkpoint import Checkpoint, ModelFiles
from offload.checkpoint.download import folder_of
from offload.checkpoint.gguf import require_reader
from offload.checkpoint.open import ReadHeaders, gguf_file, headers_here, open_headers
from offload.checkpoint.sizes import longest_context
from offload.checkpoint.small_files import has_chat_template, has_tokenizer, no_chat_template
from offload.engine.resolve import resolve_files
from offload.errors import UserError
from offload.model.headers import known_layers
from offload.planning.load_options import LoadOptions
from offload.streaming.device import host_for, is_host

_SHORT = 64  # a short context: every run has more positions


def check_setup(
    options: LoadOptions,
    *,
    needs_text: bool = True,
    needs_template: bool = False,
    needs_context: bool = True,
) -> ReadHeaders:
    """Raise `UserError` for models that cannot be read, and for too little memory.

    Returns a reader of headers like `open_headers` that reads nothing twice: headers of the largest
    mixtures take 15 seconds.

    Args:
        needs_text: whether the target must have a tokenizer.
        needs_template: whether the tokenizer must have a chat template.
        needs_context: whether there must be room for the context of `options`, or for a short one.
    """
    headers = options.headers(headers_here)
    here = [header for header in headers if header is not None]
    if needs_text and headers[0] is not None:
        _require_tokenizer(headers[0])
    if len(here) == len(headers) and options.ranks is None:
        models = [model for model in options.files_of(here) if model is not None]
        described = [model for model in map(known_layers, models) if model is not None]
        if len(described) == len(models) and is_host(options.device):
            files = ModelFiles(*described)
            setup = resolve_files(files, options, host_for(options.gpu_memory))
            if not needs_context:
                context = min(_SHORT, longest_context(files.target) or _SHORT)
                setup = replace(setup, budget=replace(setup.budget, context=context))
            setup.admit()
    if needs_template and headers[0] is not None:
        place = headers[0].tokenizer_path
        # the chat template of a GGUF file is left to the library that reads it
        if os.path.isdir(place) and not has_chat_template(place):
            raise no_chat_template()
    known = dict(zip(options.models_to_read, headers, strict=True))
    return lambda model, config: known.get(model) or open_headers(model, config)


def tokenizer_place(model: str) -> Path:
    """Return the folder or GGUF file with a model's tokenizer. Raises `UserError` without one."""
    is_gguf = gguf_file(model) is not None
    place = open_headers(model).tokenizer_path if is_gguf else folder_of(model, with_weights=False)
    if not _has_tokenizer(place):
        raise UserError(f"{model} has no tokenizer: name the model that the store is for")
    return place


def _require_tokenizer(target: Checkpoint) -> None:
    """Raise `UserError` for a checkpoint without a tokenizer."""
    if not _has_tokenizer(target.tokenizer_path):
        file = target.shards[0]
        is_gguf = file.suffix.lower() == ".gguf"
        remedy = "give `config` ORG/NAME, the model that it was made from, or put"
        raise UserError(
            f"{file.name if is_gguf else target.name} has no tokenizer: "
            f"{remedy if is_gguf else 'put'} its tokenizer.json beside it"
        )


def _has_tokenizer(place: Path) -> bool:
    if os.path.isfile(place):
        require_reader(place)
        return True
    return has_tokenizer(place)
