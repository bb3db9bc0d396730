"""A prompt's passes: as many as link and computing ask for, with the same bits in one as in several."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from plans import plan_memory
from transformers import LlamaConfig, MixtralConfig, PreTrainedConfig

import offload
from offload.calibration import link as rates
from offload.checkpoint.open import open_checkpoint
from offload.engine.decoder import Decoder
from offload.engine.request import Request
from offload.memory import prompt_rows
from offload.memory.sizes import PROMPT_ROWS
from offload.model.parts import BatchPart
from offload.sampling.logits import Logits
from offload.sampling_options import Sampling

_SIZES: dict[str, Any] = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 24,
                          "num_attention_heads": 4, "num_key_value_heads": 2,
                          "max_position_embeddings": 4096}  # fmt: skip
CONTEXT, TOKENS = 2048, [7 + index * index % 200 for index in range(1900)]


@pytest.fixture(scope="module", params=["dense", "mixture"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config: PreTrainedConfig = LlamaConfig(**_SIZES)
    if request.param == "mixture":
        few = {**_SIZES, "intermediate_size": 256, "num_local_experts": 4, "num_experts_per_tok": 2}
        config = MixtralConfig(**few, sliding_window=None)
    return tiny.save(tiny.build(config), tmp_path_factory.mktemp(request.param))


@contextmanager
def opened(
    model: Path, monkeypatch: pytest.MonkeyPatch, link: float, **options: Any
) -> Iterator[tuple[Decoder, list[int]]]:
    """A decoder on a machine with such a link, some layers of which stay; and the rows of each of its passes."""
    monkeypatch.setattr(rates, "link_bytes_per_s", lambda *_, **__: link)
    monkeypatch.setattr("offload.calibration.rates.known_flops_per_s", lambda *_: 1e9)
    monkeypatch.setattr(prompt_rows, "_MOST_MORE", 100.0)  # layers are tiny here, and rows are not
    settings = {"context": CONTEXT, "profile": "none", "threads": 1, "tree": "none", "experts": "layers", **options}
    sizes = {"context": CONTEXT, "num_nodes": 1, "parallel": settings.get("parallel", 1), "experts": "layers"}
    roomy = plan_memory((open_checkpoint(model), None), ram=1 << 40, dtype="auto", **sizes)
    ram = roomy.fixed_bytes + sum(roomy.layer_bytes) * 3 // 4
    with offload.load(model, ram=ram, **settings) as decoder, monkeypatch.context() as patch:
        assert decoder.plan.is_streamed
        sweep, rows = decoder.target._sweep, list[int]()

        def counted(parts: Sequence[BatchPart], *given: Any, **named: Any) -> Logits:
            rows.append(sum(len(part.token_T) for part in parts))
            return sweep(parts, *given, **named)

        patch.setattr(decoder.target, "_sweep", counted)
        yield decoder, rows


def states_after(decoder: Decoder) -> list[torch.Tensor]:
    """Keys and values of the prompt, and what follows on it."""
    run = decoder.start(Request(TOKENS, Sampling(), 4))
    for _ in run:
        pass
    states = run.sequence.caches.target.states(len(TOKENS))
    return [tensor.clone() for held in states.values() for tensor in held.values()] + [
        torch.tensor(run.sequence.new_ids)
    ]


def test_a_slow_link_takes_a_prompt_in_one_pass_with_the_same_bits(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(model, monkeypatch, link=1e12) as (decoder, rows):
        wanted = states_after(decoder)
        assert decoder.invariance.holds and decoder.plan.max_prompt_rows == PROMPT_ROWS
        assert rows[:4] == [512, 512, 512, 364] and decoder.plan.num_prompt_sweeps(len(TOKENS)) == 4
    with opened(model, monkeypatch, link=1e3) as (decoder, rows):
        got = states_after(decoder)
        assert rows[0] == len(TOKENS) and decoder.plan.num_prompt_sweeps(len(TOKENS)) == 1
    assert all(torch.equal(left, other) for left, other in zip(wanted, got, strict=True))


def test_several_prompts_share_the_rows_of_a_pass(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, passes = [TOKENS[:700], TOKENS[100:800]], []
    for link in (1e12, 1e3):
        with opened(model, monkeypatch, link, parallel=2) as (decoder, rows):
            runs = [decoder.start(Request(prompt, Sampling(), 3)) for prompt in prompts]
            while any(run.is_writing for run in runs):
                tiny.advance(decoder, runs)
            passes.append(([run.sequence.new_ids for run in runs], rows[:3]))
    (wanted, few), (result, many) = passes
    assert wanted == result
    assert few == [512, 512 + 1, 374 + 1 + 1] and many[0] == 1400, "a pass has the roots of those who are taken in"


def test_a_long_pass_is_interrupted_between_layers_and_goes_on(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = list[None]()

    def on_layer() -> None:
        layers.append(None)
        if len(layers) == 5:
            raise KeyboardInterrupt

    with opened(model, monkeypatch, 1e3, on_layer=on_layer) as (decoder, rows):
        with pytest.raises(KeyboardInterrupt):
            decoder.generate(TOKENS, max_new_tokens=4)
        assert len(layers) == 5 and rows == [len(TOKENS)]
        again = decoder.generate(TOKENS, max_new_tokens=4).token_ids
    with opened(model, monkeypatch, 1e3) as (decoder, rows):
        assert decoder.generate(TOKENS, max_new_tokens=4).token_ids == again
        run = decoder.run(TOKENS[:1500], Sampling(), max_new_tokens=1, continues=True)
        assert run.sequence.stats.num_kept_tokens == 1499, "what was taken in by one pass is kept like any other"
