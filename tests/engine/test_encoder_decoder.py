"""T5, end to end: streamed decoding with any tree emits what transformers emits, prompt after prompt."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import set_json
from small_t5 import LAYOUTS, START, VOCAB_SIZE, build, reference, save, save_pair, streaming_ram
from tiny import FAMILIES, Pair, finished, save_tokenizer
from tiny import build as build_decoder
from tiny import save as save_decoder
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM
from transformers.cache_utils import DynamicLayer

import offload
from offload.engine.decoder import Decoder
from offload.engine.request import Request

TREES = ("none", "8x3", "32x8", "chain:6", "sequences:4x4", "grown:32x8")
CONTEXT = 96


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist() for length in (1, 90, 13)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair("v1.1", tmp_path_factory.mktemp("t5"))


@pytest.fixture
def decoder(pair: Pair) -> Iterator[Decoder]:
    with streamed(*pair) as opened:
        yield opened


def streamed(target: Path, draft: Path, **options: Any) -> Decoder:
    """Open both with no layer that stays."""
    ram = streaming_ram(target, draft, context=CONTEXT, num_nodes=32)
    return offload.load(target, draft, ram=ram, context=CONTEXT, tree="32x8", threads=1, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_greedy_ids_equal_transformers(layout: str, tmp_path: Path) -> None:
    target, draft = save_pair(layout, tmp_path)
    with streamed(target, draft) as decoder:
        assert (decoder.plan.num_layer_slots, decoder.plan.num_resident, decoder.plan.encoder_bytes) == (3, 0, 0)
        yields, seen = [], set[int]()
        every = TREES[::2] if layout == "v1.1" else TREES[:3:2]
        for prompt, trees, num_new in zip(prompts(), (TREES[2:3], every, TREES[1:2]), (12, 24, 12), strict=True):
            wanted = reference(target, prompt, num_new)
            seen |= set(wanted)
            for tree in trees:
                got = decoder.generate(prompt, max_new_tokens=num_new, tree=tree)
                assert got.token_ids == wanted, f"{tree}, prompt of {len(prompt)}"
                assert got.stats.num_prompt_tokens == len(prompt)
                yields.append(got.stats.tokens_per_sweep)
    assert len(seen) > 15, "texts that say little tell little"
    assert max(yields) > 1.5, "the draft never agreed: acceptance was not exercised"
    assert min(yields) == 1, "the tree-less run must take one sweep a token"


def test_same_seed_same_ids_for_every_tree_and_memory(pair: Pair, decoder: Decoder) -> None:
    sampling = {"temperature": 0.8, "top_p": 0.95, "max_new_tokens": 12}
    with offload.load(pair[0], ram="1GiB", context=CONTEXT, threads=1) as alone:
        assert alone.plan.encoder_bytes, "the encoder stays where everything does"
        wanted = [alone.generate(prompts()[2], seed=seed, **sampling).token_ids for seed in range(2)]
    assert wanted[0] != wanted[1], "seeds must matter"
    for seed, trees in enumerate((TREES[1::2], TREES[2:3])):
        for tree in trees:
            got = decoder.generate(prompts()[2], seed=seed, tree=tree, **sampling)
            assert got.token_ids == wanted[seed], f"seed {seed}, {tree}"


def test_a_prompt_moves_the_encoder_once_and_a_sweep_the_decoder(decoder: Decoder) -> None:
    stream, asked = decoder.target.stream, list[int]()
    carry = stream.cycle._carry
    stream.cycle._carry = lambda layer, *others: (asked.append(layer), carry(layer, *others))[1]
    got = decoder.generate(prompts()[1], max_new_tokens=6, tree="none")
    sweeps = [0, 1, 2, 3] * 6
    assert asked[: 3 + len(sweeps)] == [4, 5, 6, *sweeps], "and what follows is read ahead"
    assert got.stats.bytes_streamed == 5 * decoder.plan.streamed_bytes


def test_what_a_prompt_shares_with_the_one_before_is_kept_or_read_anew(decoder: Decoder) -> None:
    """A longer prompt that begins alike is another one to an encoder, to its first token even."""
    first, longer = prompts()[1], [*prompts()[1], 5, 6]
    runs = [(first, False), (first, True), (longer, True), (first[:-1], True)]
    for prompt, continues in runs:
        wanted = decoder.generate(prompt, max_new_tokens=5, tree="8x3").token_ids
        decoder.generate(first, max_new_tokens=5)
        result = finished(decoder.run(prompt, offload.Sampling(), max_new_tokens=5, tree="8x3", continues=continues))
        is_same = continues and prompt == first
        assert result.token_ids == wanted and result.stats.num_kept_tokens == (len(first) if is_same else 0)


@pytest.mark.parametrize("at", [1, 4])  # of the layers of the first sweep
def test_a_prompt_that_was_cut_short_goes_on(at: int, pair: Pair) -> None:
    class Enough(Exception):  # noqa: N818
        pass

    left = [at]

    def on_layer() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Enough

    with streamed(*pair, on_layer=on_layer) as decoder:
        run = decoder.run(prompts()[1], offload.Sampling(), max_new_tokens=8)
        with pytest.raises(Enough):
            list(run)
        assert list(run) and run.result().token_ids == decoder.generate(prompts()[1], max_new_tokens=8).token_ids


def in_the_encoder(decoder: Decoder, _: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        hook.remove()
        raise KeyboardInterrupt

    hook = decoder.target._model.meta_model.get_encoder().block[1].register_forward_pre_hook(interrupt)


def between_keys_and_values(_: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what an encoder has made goes into layers of transformers' own, first that of the draft's four."""
    right, left = DynamicLayer.update, [6]

    def update(layer: DynamicLayer, key: Tensor, value: Tensor, *others: object, **_: object) -> object:
        left[0] -= 1
        got = right(layer, key, value, *others)
        if left[0] == 0:
            layer.values = value[:, :, :0]
            raise KeyboardInterrupt
        return got

    monkeypatch.setattr(DynamicLayer, "update", update)


@pytest.mark.parametrize("continues", [False, True])
@pytest.mark.parametrize("cut", [in_the_encoder, between_keys_and_values])
def test_an_interrupt_leaves_no_half_of_a_prompt(
    cut: Callable[..., None], continues: bool, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = decoder.generate(prompts()[2], max_new_tokens=8).token_ids
    decoder.generate(prompts()[1], max_new_tokens=1)
    cut(decoder, monkeypatch)
    run = decoder.run(prompts()[2], offload.Sampling(), max_new_tokens=8)
    with pytest.raises(KeyboardInterrupt):
        list(run)
    if continues:
        run = decoder.run(prompts()[2], offload.Sampling(), max_new_tokens=8, continues=True)
    assert list(run) and run.result().token_ids == wanted


def test_what_an_encoder_does_not_take_is_refused(decoder: Decoder, tmp_path: Path) -> None:
    decoder.generate([2] * CONTEXT, max_new_tokens=1)
    for prompt, num_new, words in (
        ([2] * (CONTEXT + 1), 1, f"at most `context` tokens, {CONTEXT}, got a prompt of {CONTEXT + 1}"),
        ([2], CONTEXT, f"{CONTEXT} new tokens exceed the context of {CONTEXT}: raise `context`"),
        ([2, START, 3], 1, f"must not contain the token {START}, .*: leave it out"),
        ([{"role": "user", "content": "Hello"}], 1, "reads every prompt anew and cannot chat: use offload generate"),
    ):
        with pytest.raises(offload.UserError, match=words):
            decoder.generate(prompt, max_new_tokens=num_new)
    with pytest.raises(offload.UserError, match="a prompt must have a token"):
        decoder.step(decoder.begin([], offload.Sampling()))
    with pytest.raises(offload.UserError, match="`session` keeps a text that goes on"):
        decoder.save_session(tmp_path / "a.session")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("_no_weights")
def test_what_does_not_go_with_an_encoder_is_refused_early(pair: Pair, tmp_path: Path) -> None:
    alone = save_decoder(build_decoder(FAMILIES["llama"]()), tmp_path / "llama")
    nameless = save(build("v1.0"), tmp_path / "nameless", "v1.0")
    (nameless / "generation_config.json").unlink()
    target, draft = save_pair("v1.1", tmp_path)
    begun_with(1, draft)
    kept, chat = Request(prompts()[2], is_kept=True), Request([{"role": "user", "content": "Hello"}])
    for models, request, words in (
        ((pair[0],), kept, "`session` keeps a text that goes on"),
        ((pair[0],), chat, "cannot chat: use offload generate"),
        ((pair[0], alone), None, "must both have an encoder or none, got t5 and llama"),
        ((alone, pair[1]), None, "must both have an encoder or none, got llama and t5"),
        ((nameless,), None, "decoder_start_token_id must be a token id, got None"),
        ((target, draft), None, r"draft: decoder_start_token_id must be the target's, 0, got 1: "),
    ):
        with pytest.raises(offload.UserError, match=words):
            offload.load(*models, request=request)
    begun_with(VOCAB_SIZE, target)
    with pytest.raises(offload.UserError, match=f"must be less than {VOCAB_SIZE}, got {VOCAB_SIZE}: mend"):
        offload.load(target)


def begun_with(start: int, model: Path) -> None:
    set_json(model / "generation_config.json", decoder_start_token_id=start)


def test_text_has_no_sentinels_and_ends_where_the_model_ends_it(tmp_path: Path) -> None:
    """A head is wider than its tokenizer, whose entries beyond the text are special."""
    target = save(build("v1.1", vocab_size=VOCAB_SIZE + 9), tmp_path, "v1.1")
    tokenizer = save_tokenizer(target)
    with offload.load(target, ram="1GiB", context=CONTEXT, threads=1) as decoder:
        prompt = decoder.encode("Translate: one two three")
        ids = decoder.generate("Translate: one two three", max_new_tokens=40).token_ids
        assert ids == reference(target, prompt, 40)
        end = next(token for index, token in enumerate(ids) if index > 5 and token not in ids[:index])
    assert tokenizer.decode(ids, skip_special_tokens=True), "there is text to compare"
    settings = target / "generation_config.json"
    settings.write_text(settings.read_text().replace("{", f'{{"eos_token_id": {end}, ', 1))
    with offload.load(target, ram="1GiB", context=CONTEXT, threads=1) as decoder:
        got = decoder.generate("Translate: one two three", max_new_tokens=40)
    assert got.finish_reason == "stop" and got.token_ids == ids[: ids.index(end) + 1]
    assert got.text == tokenizer.decode(got.token_ids[:-1], skip_special_tokens=True)


def test_penalties_are_of_the_decoders_own_text(pair: Pair, decoder: Decoder) -> None:
    """As with transformers: what the encoder reads was not said."""
    model, (_, _, prompt) = AutoModelForSeq2SeqLM.from_pretrained(pair[0], dtype=torch.float32), prompts()
    options = {"do_sample": False, "max_new_tokens": 16, "repetition_penalty": 1.3, "use_cache": False}
    ids_1T = model.generate(torch.tensor([prompt]), **options)
    wanted = ids_1T[0, 1:].tolist()
    for tree in ("none", "8x3"):
        got = decoder.generate(prompt, max_new_tokens=16, repeat_penalty=1.3, tree=tree).token_ids
        assert got == wanted[: len(got)] and len(got) > 8
    assert decoder.generate(prompt, max_new_tokens=16, tree="none").token_ids != wanted
