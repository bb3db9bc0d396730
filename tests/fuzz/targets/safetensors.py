"""Checkpoints in safetensors: headers, data, the index. Read by `generate` and `plan` as a person would."""

from functools import partial

from case import Target
from damage import BYTES, JSON, data, header, special, strange_key
from model_files import generate_alike, plan, save_alike

_save_shards = partial(save_alike, shards=True)
_HEADER = {"*.safetensors": (header, header, header, *BYTES)}
_DATA = {"*.safetensors": (data, data, special, strange_key, *BYTES)}
_INDEX = {"*.index.json": JSON, "*.safetensors": (special, header)}
TARGETS = [
    Target("safetensors/header", save_alike, _HEADER, generate_alike),
    Target("safetensors/data", save_alike, _DATA, generate_alike),
    Target("safetensors/index", _save_shards, _INDEX, generate_alike),
    Target("safetensors/plan", _save_shards, _INDEX, plan),
]
