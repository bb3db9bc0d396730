"""Checkpoints in safetensors: headers, data, the index. Read by `generate` and `plan` as a person would."""

from case import Target
from damage import BYTES, JSON, data, header, special, strange_key
from model_files import generate, plan, save_files

TARGETS = [
    Target("safetensors/header", save_files, {"*.safetensors": (header, header, header, *BYTES)}, generate),
    Target("safetensors/data", save_files, {"*.safetensors": (data, data, special, strange_key, *BYTES)}, generate),
    Target("safetensors/index", lambda folder: save_files(folder, shards=True),
        {"*.index.json": JSON, "*.safetensors": (special, header)}, generate),
    Target("safetensors/plan", lambda folder: save_files(folder, shards=True),
        {"*.index.json": JSON, "*.safetensors": (header, special)}, plan),
]  # fmt: skip
