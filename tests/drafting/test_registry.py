"""Every drafter of the registry keeps to what a decoder asks of one."""

from pathlib import Path

import pytest
from tiny import FAMILIES, VOCAB_SIZE, save_pair

from offload.checkpoint.safetensors import open_checkpoint
from offload.drafting.hybrid import DRAFTERS, DrafterInputs, DrafterKind
from offload.drafting.lookup import Copying, GuessSources
from offload.engine.build import resident_model
from offload.kernels.registry import REFERENCES
from offload.sampling.sampler import Sampler
from offload.trees.spec import MatchLength
from offload.trees.topology import chain, k_ary
from offload.units import Sampling

PROMPT = [7, 11, 9, 5, 7, 11, 3, 7, 11]


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_drafter_keeps_a_text_in_its_state_alone(kind: DrafterKind, tmp_path: Path) -> None:
    """Two texts at once: what it proposes for one does not depend on the other."""
    model = resident_model(open_checkpoint(save_pair(FAMILIES["llama"](), tmp_path)[1]), "float32")
    sources = GuessSources([Copying(MatchLength(1, 8))] if kind.has_sources else [])
    drafter = DRAFTERS[kind](DrafterInputs(model, VOCAB_SIZE, 64, REFERENCES, sources, lambda *_: 1.0))
    sampler, shape = Sampler(Sampling(), VOCAB_SIZE), k_ary(2, 7) if any(kind) else chain(0)
    one, other, fresh = (drafter.new_state() for _ in range(3))
    first = drafter.grow(shape, PROMPT, sampler, one)
    drafter.grow(shape, [5, 6, 7, 8], sampler, other)
    drafter.commit(first, [0], [9], sampler, one)
    again = drafter.grow(shape, [*PROMPT, 9], sampler, one)
    assert again.tree.tokens == drafter.grow(shape, [*PROMPT, 9], sampler, fresh).tree.tokens
    assert again.tree.tokens[0] == 9 and (again.tree.num_nodes > 1) == any(kind)
    one.clear()
    fresh = drafter.new_state()  # compared with, since a drafter has learned from what was committed
    assert (
        drafter.grow(shape, PROMPT, sampler, one).tree.tokens == drafter.grow(shape, PROMPT, sampler, fresh).tree.tokens
    )
    model.close()
