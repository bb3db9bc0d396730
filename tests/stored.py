"""Tiny models in the forms that a folder or a file may have them in; a `Make` writes one, and returns where it lies."""

from collections.abc import Callable
from pathlib import Path

import torch
from gguf_files import MODELS, write_gguf
from quantised import save_quantised
from safetensors.torch import load_file, save_file
from test_families import tiny_model
from test_path_rows import config_named
from tiny import save

from offload.packing.pack import pack

Make = Callable[[Path], Path]


def plain(family: str = "llama", dtype: torch.dtype = torch.float32, *, in_one_file: bool = False) -> Make:
    size = "1GB" if in_one_file else "150KB"
    return lambda folder: save(tiny_model(config_named(family)).to(dtype), folder, max_shard_size=size)


def packed(family: str = "llama") -> Make:
    """Its source lies beside it."""
    make = plain(family, torch.bfloat16)
    return lambda folder: pack(make(folder.with_name("source")), folder, progress=lambda *_: None).folder


def quantised(name: str, family: str = "llama") -> Make:
    return lambda folder: save_quantised(plain(family)(folder.with_name("plain")), name, folder).directory


def gguf(kind: str, *, max_tensors: int = 0) -> Make:
    return lambda folder: write_gguf(MODELS["llama"](), made(folder) / "m.gguf", kind, max_tensors=max_tensors).path


def made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def change_tensor(folder: Path, name: str, change: Callable[[torch.Tensor], object]) -> Path:
    """Change one in place; return its file."""
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if name in tensors:
            change(tensors[name])
            save_file(tensors, path, {"format": "pt"})
            return path
    raise AssertionError(name)
