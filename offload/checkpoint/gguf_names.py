"""What llama.cpp calls the tensors of a model, and how it stores them.

Experts lie in one stacked tensor for each of their matrices. Here each expert gets names of its
own, as in safetensors, so that code for experts need not know GGUF. Invariant: every tensor of a
file has one known meaning, or the file is refused.
"""

import re
from collections.abc import Iterator

from offload.checkpoint.layout import slice_of
from offload.checkpoint.safetensors import damaged
from offload.checkpoint.small_files import first_size
from offload.checkpoint.tensors import MOST_EXPERTS, ROWS, Coded, Entries, TensorEntry
from offload.encoding.base import Settings
from offload.encoding.gguf import BLOCKS, GgufBlocks, HeadPermutation
from offload.errors import UserError
from offload.families.gguf import ARCHITECTURES, PROJECTIONS

Named = Iterator[tuple[str, TensorEntry]]
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)(?:\.(weight|bias|scale))?")
_EXTRA = re.compile(r"blk\.(\d+)\.nextn\.")
_OUTER = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
          "output.weight": "lm_head.weight"}  # fmt: skip


def tensors_of(
    where: str, kind: str, stored: Entries, stated: Settings, config: Settings
) -> dict[str, TensorEntry]:
    """Return the tensors by Hugging Face's names.

    `stated` are the file's statements about the model, `config` is that of its text part. Raises
    `UserError` for an unknown tensor.
    """
    tensors = dict[str, TensorEntry]()
    reader = _Reader(where, kind, stored, stated, config)
    for gguf_name, entry in stored.items():
        for name, tensor in reader.read(gguf_name, entry):
            if name in tensors:
                raise damaged(f"{where}: {gguf_name:.80} is there twice")
            tensors[name] = tensor
    return tensors


class _Reader:
    """Settings that hold for all tensors of a file."""

    def __init__(
        self, where: str, kind: str, stored: Entries, stated: Settings, config: Settings
    ) -> None:
        self._where = where
        self._kind = kind
        self._architecture = ARCHITECTURES[kind]
        self._num_layers = stated.get("num_hidden_layers", 1 << 32)
        num_heads = stated.get("num_attention_heads", 0)
        self._heads = {"attn_q": num_heads, "attn_k": stated.get("num_key_value_heads", num_heads)}
        self._config = config
        # layers whose gate and up projections differ in type, so that all of both is expanded
        coded = (name for name, entry in stored.items() if entry.dtype in BLOCKS)
        matches = (re.match(r"blk\.(\d+)\.ffn_(gate|up)_exps", name) for name in coded)
        self._kinds = {int(match[1]) for match in matches if match is not None}

    def read(self, gguf_name: str, entry: TensorEntry) -> Named:
        """Yield the model's tensors made of one in the file; none if the model has no use for it."""
        architecture = self._architecture
        outer = {**_OUTER, **architecture.outer}
        match = _BLOCK.fullmatch(gguf_name)
        extra = _EXTRA.match(gguf_name) or match
        # layers that guess further ahead
        if gguf_name in architecture.ignored or (extra and int(extra[1]) >= self._num_layers):
            return
        if gguf_name in outer:
            yield outer[gguf_name], self._changed("", outer[gguf_name], entry)
            return
        layer, part, end = match.groups() if match else (0, "", None)
        prefix = f"model.layers.{int(layer)}." if match else ""
        ends = ("weight", "bias") if part in PROJECTIONS else ("weight",)
        short = part if end is None else f"{part}.{end}"
        if short in architecture.others:
            name = prefix + architecture.others[short]
            yield name, self._changed(part, name, entry)
        elif part in architecture.experts and end == "weight":
            yield from self._experts(prefix + architecture.experts[part], int(layer), entry)
        elif part in architecture.woven and end in ("weight", "bias"):
            name = prefix + architecture.weave + ("_bias" if end == "bias" else "")
            yield from self._woven(name, architecture.woven.index(part), entry)
        elif part in ("attn_k_b", "attn_v_b") and "attn_kv_b" in architecture.parts:
            yield from self._heads_of_latent(prefix, part, entry)
        elif part in architecture.parts and end in ends:
            name = f"{prefix}{architecture.parts[part]}.{end}"
            yield name, self._changed(part, name, entry)
        else:
            complaint = f"{self._where}: {gguf_name:.80} is not known of architecture {self._kind}"
            raise UserError(f"{complaint}: take the model in safetensors")

    def _experts(self, name: str, layer: int, stack: TensorEntry) -> Named:
        if stack.dtype in BLOCKS or layer in self._kinds:
            stack = stack._replace(coded=Coded(GgufBlocks(stack.dtype)))
        for expert, part in enumerate(self._slices(name, stack)):
            yield f"{name.format(expert)}.weight", part

    def _woven(self, name: str, turn: int, stack: TensorEntry) -> Named:
        """Yield each expert's rows, which alternate with those of another stack."""
        coding = GgufBlocks(stack.dtype, is_transposed=len(stack.shape) == 3)
        coded = Coded(coding, turn=turn, num_woven=len(self._architecture.woven))
        stack = stack._replace(coded=coded)
        for expert, part in enumerate(self._slices(name, stack, least_dims=2)):
            yield f"{name.format(expert)}{ROWS}{turn}", part

    def _heads_of_latent(self, prefix: str, part: str, stack: TensorEntry) -> Named:
        """Yield the rows of each head's values, or of its keys, which are stored as columns."""
        is_keys = part == "attn_k_b"
        stack = stack._replace(coded=Coded(GgufBlocks(stack.dtype, is_flipped=is_keys)))
        for head, matrix in enumerate(self._slices(part, stack)):
            shape = matrix.shape[::-1] if is_keys else matrix.shape
            name = f"{prefix}self_attn.kv_b_proj.weight{ROWS}{2 * head + (not is_keys)}"
            yield name, matrix._replace(shape=shape)

    def _slices(self, name: str, stack: TensorEntry, least_dims: int = 3) -> Iterator[TensorEntry]:
        """Yield the parts along a stack's first dimension."""
        num_parts = stack.shape[0]
        is_stack = least_dims <= len(stack.shape) <= 3 and 0 < num_parts <= MOST_EXPERTS
        if not is_stack or stack.num_bytes % num_parts:
            raise damaged(f"{self._where}: {name} has shape {list(stack.shape)}")
        yield from (slice_of(stack, index, num_parts) for index in range(num_parts))

    def _changed(self, part: str, name: str, entry: TensorEntry) -> TensorEntry:
        """Return a tensor with a coding that undoes how llama.cpp changed it."""
        architecture = self._architecture
        is_norm = name.endswith("norm.weight") and part != "ssm_norm"
        added = architecture.added if is_norm else 0
        interleaved = self._heads.get(part, 0) if architecture.has_interleaved_heads else 0
        if interleaved and entry.shape[0] % (2 * interleaved):
            complaint = f"{name} has {entry.shape[0]} rows for {interleaved} heads"
            raise damaged(f"{self._where}: {complaint}")
        tiles = self._tiles(part, name, entry.shape)
        is_exponential = part == "ssm_a"
        # gpt-oss multiplies by the transpose of experts' matrices
        is_transposed = bool(architecture.woven) and name.endswith("experts.down_proj")
        is_changed = added or interleaved or tiles or is_exponential or is_transposed
        if entry.dtype in BLOCKS or is_changed:
            order = (interleaved, added, tiles, is_exponential)
            coding = GgufBlocks(entry.dtype, *order, is_transposed=is_transposed)
            entry = entry._replace(coded=Coded(coding))
        if part == "ssm_conv1d" and len(entry.shape) == 2:  # a convolution has one more dimension
            entry = entry._replace(shape=(entry.shape[0], 1, entry.shape[1]))
        return entry

    def _tiles(self, part: str, name: str, shape: tuple[int, ...]) -> HeadPermutation | None:
        """Return the order of value heads in recurrent layers; None where it is the model's order."""
        if "linear_attn." not in name or part == "ssm_norm":
            return None
        num_groups, num_heads, key_width, value_width = (
            first_size(self._config, f"linear_{size}")
            for size in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        )
        first = 2 * num_groups * key_width if part in ("attn_qkv", "ssm_conv1d") else 0
        is_columns = part == "ssm_out"
        width = 1 if part in ("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt") else value_width
        is_even = bool(num_groups) and num_heads % num_groups == 0
        if not is_even or shape[is_columns:][:1] != (first + num_heads * width,):
            raise damaged(f"{self._where}: {name} has shape {list(shape)}, not that of its config")
        if num_heads == num_groups:
            return None
        return HeadPermutation(num_groups, num_heads // num_groups, first, is_columns)
