"""Checkpoints written by mlx-lm, turned into transformers' names and numbers.

mlx-lm stacks experts, renames weights and changes some, by family. Invariant: a family is read only
if every change to its tensors is known here; the sources are the `sanitize` functions of mlx-lm
0.32.2, and any other family is refused by name.
"""

import re
from collections.abc import Iterable, Mapping

from offload.checkpoint.layout import slice_of
from offload.checkpoint.methods import INSTEAD, method_of, quantisation
from offload.checkpoint.tensors import Coded, Entries, TensorEntry
from offload.encoding.base import ENCODINGS, Settings
from offload.encoding.gguf import GgufBlocks
from offload.errors import UserError

# families whose tensors are those of transformers, except for some that are not read
_AS_THEY_ARE = """
cohere cohere2 ernie4_5 exaone4 gemma gemma2 gemma3 gemma3_text glm glm4 granite helium
hunyuan_v1_dense llama mimo ministral3 mistral mistral3 olmo olmo2 olmo3 phi phi3 qwen2 qwen3
seed_oss smollm3 stablelm starcoder2
"""
_ONE_BY_ONE = {name: name for name in ("gate_proj", "up_proj", "down_proj")}
_BY_NUMBER = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
# names of an expert's matrices in transformers' files, for families with stacks
_STACKED = {
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe", "mellum"), _ONE_BY_ONE),
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe"), _ONE_BY_ONE),
    **dict.fromkeys(("mixtral", "phimoe"), _BY_NUMBER),
}
# recurrent families: norms have 1 added, and convolution kernels are transposed
_RECURRENT = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
_FAMILIES = frozenset((*_AS_THEY_ARE.split(), *_STACKED, *_RECURRENT))
_STACK = re.compile(r"\.switch_mlp\.(gate_proj|up_proj|down_proj)\.weight$")
_NORM = re.compile(r"(?:_layernorm|\bmodel\.norm|\b[qk]_norm)\.weight$")


def is_of_mlx(config: Settings, formats: Iterable[object], names: Iterable[str]) -> bool:
    """Return True if mlx-lm wrote a checkpoint.

    It is told by the `format` in its files, by its quantisation settings, or by its stacks.
    """
    settings = quantisation(config)
    is_named = isinstance(settings, dict) and method_of(settings) == "mlx"
    return is_named or "mlx" in formats or any(".switch_mlp." in name for name in names)


def require_known(where: str, config: Settings) -> None:
    """Raise `UserError` for a family whose tensors mlx-lm may change in unknown ways."""
    family = config.get("model_type")
    if family not in _FAMILIES:
        requirement = (
            f"{where}: of what mlx-lm wrote, models whose tensors it leaves alone are read"
        )
        raise UserError(f"{requirement}, {family!s:.40} is not known to be one: {INSTEAD}")


def as_in_transformers(where: str, config: Settings, tensors: Entries) -> dict[str, TensorEntry]:
    """Return the tensors by transformers' names, an entry for each expert. Raises `UserError`."""
    family = str(config.get("model_type"))
    names = _STACKED.get(family)
    renamed = dict[str, TensorEntry]()
    for name, entry in tensors.items():
        match = _STACK.search(name)
        if match is not None and names is not None:
            renamed |= _experts(where, name[: match.start()], names[match[1]], entry)
        elif family in _RECURRENT:
            renamed[name] = _original(name, entry)
        else:
            renamed[name] = entry
    return renamed


def _experts(
    where: str, mixture: str, matrix: str, entry: TensorEntry
) -> Mapping[str, TensorEntry]:
    """Return the matrices of a stack, by their names in transformers' files."""
    parts = (entry, *(companion for _, companion in entry.companions))
    num_experts = entry.shape[0] if len(entry.shape) == 3 else 0
    if not num_experts or any(part.shape[:1] != (num_experts,) for part in parts):
        shapes = " and ".join(str(list(part.shape)) for part in parts)
        requirement = f"{where}: {mixture}.switch_mlp must be stacks of as many experts"
        raise UserError(f"{requirement}, has shapes {shapes}: convert the model again")
    return {
        f"{mixture}.experts.{expert}.{matrix}.weight": slice_of(entry, expert, num_experts)
        for expert in range(num_experts)
    }


def _original(name: str, entry: TensorEntry) -> TensorEntry:
    """Return a tensor of a recurrent family as it was before mlx-lm changed it."""
    if entry.coded is not None or entry.dtype not in ENCODINGS:
        return entry
    if name.endswith("conv1d.weight") and len(entry.shape) == 3 and entry.shape[2] == 1:
        channels, width, _ = entry.shape
        return entry._replace(shape=(channels, 1, width))
    if _NORM.search(name) and len(entry.shape) == 1:
        return entry._replace(coded=Coded(GgufBlocks(entry.dtype, added=1)))
    return entry
