"""What `model/library.py` calls the inputs of an indexer is what this transformers calls them."""

from typing import Any

import pytest
from test_families import INDEXED, config_of
from torch import nn
from transformers import AutoModelForCausalLM
from wrappers import wrapper_config, wrapper_model

from offload.errors import UserError
from offload.model.library import EARLIER_INDICES, MASK, require_arguments
from offload.model.mixers.indexed import _make_of

WRAPPED = ("mistral_large4", "glm5_next")


def layers_of(kind: str) -> list[Any]:
    if kind in WRAPPED:
        return [*wrapper_model(wrapper_config(kind)).get_decoder().layers]
    return [*AutoModelForCausalLM.from_config(config_of(kind)).get_decoder().layers]


@pytest.mark.parametrize("kind", [*INDEXED, *WRAPPED])
def test_an_indexer_is_given_what_ours_takes(kind: str) -> None:
    makes = set()
    for layer in layers_of(kind):
        attention = getattr(layer, "self_attn", None)
        indexer = getattr(attention, "indexer", None)
        if indexer is not None:
            make = _make_of(indexer)
            assert make is not None, [name for name, _ in indexer.named_parameters()]
            require_arguments(indexer, make.inputs)
            require_arguments(layer, [MASK])
            makes.add(make)
        if getattr(attention, "skip_topk", False):
            require_arguments(layer, [EARLIER_INDICES])
    assert len(makes) == 1


def test_a_name_that_has_changed_is_told() -> None:
    class Renamed(nn.Module):
        def forward(self, rows: Any, q_resid: Any) -> None: ...

    with pytest.raises(UserError, match=r"transformers .* has no argument hidden_states of Renamed\.forward, which"):
        require_arguments(Renamed(), ["hidden_states", "q_resid"])
