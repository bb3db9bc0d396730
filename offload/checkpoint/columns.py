"""The number of columns of a weight, from the sizes in the model's config and the weight's name.

Packed words alone do not tell how many columns they hold. Invariant: a wrong number, as in a family
with other names, does no harm: loading compares every weight with the model.
"""

from collections.abc import Mapping

from offload.checkpoint.small_files import first_size, of_text
from offload.encoding.base import Settings

# weights that take a layer's input, or are embedding tables
_NAMES = """
q_proj k_proj v_proj qkv_proj gate_proj up_proj gate_up_proj w1 w3 fc1 gate embed_tokens lm_head
q_a_proj kv_a_proj_with_mqa in_proj_qkv in_proj_qkvz in_proj_ba in_proj_z in_proj_a in_proj_b
"""
_OF_HIDDEN = frozenset(_NAMES.split())
# weights that take the output of the weights named with them
_AFTER = {"down_proj": ("gate_proj", "up_proj"), "w2": ("w1", "w3"), "fc2": ("fc1",)}


def columns_at(config: Settings, stem: str, rows_of: Mapping[str, int]) -> int:
    """Return the columns of the weight `stem`; 0 where config and names do not tell.

    `rows_of` returns the number of rows of a matrix by its name.
    """
    text = of_text(config)
    hidden = first_size(text, "hidden_size", "d_model")
    parent, _, name = stem.rpartition(".")
    if name in _OF_HIDDEN:
        return hidden
    if name == "o_proj":
        heads = first_size(text, "num_attention_heads")
        width = first_size(text, "v_head_dim", "head_dim")
        return heads * width if width else hidden
    beside = (rows_of.get(f"{parent}.{other}", 0) for other in _AFTER.get(name, ()))
    return next(filter(None, beside), 0)
