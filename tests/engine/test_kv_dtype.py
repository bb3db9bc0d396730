"""Keys and values in eight bits: another text than the target's own, and one for every tree; bytes as planned."""

from pathlib import Path

import pytest
import torch
from test_families import config_of, tiny_model
from test_prefix_cache import opened, written
from tiny import FAMILIES, random_ids, save, save_pair

import offload
from offload.errors import UserError
from offload.model.kv_cache import CODINGS, RowCoding
from offload.options import KV_DTYPES
from offload.planning.load_options import LoadOptions

CODED = KV_DTYPES[1:]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_pair(FAMILIES["llama"](), tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize("dtype", CODED)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_one_text_for_every_tree_and_way_to_cut_the_prompt(
    dtype: str, temperature: float, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, options = random_ids(120), {"num_new": 24, "temperature": temperature, "seed": 3}
    with opened(pair) as plain:
        plain_text = written(plain, ids, **options)
    texts = list[list[int]]()
    for tree in ("none", "8x3", "chain:3", "dynamic:8x3"):
        with opened(pair, kv_dtype=dtype, tree=tree, prompt_cache_ram="1MiB") as decoder:
            others = random_ids(30, seed=9)
            results = [written(decoder, ids, **options), written(decoder, others, 4), written(decoder, ids, **options)]
            texts += [results[0].token_ids, results[2].token_ids]
            assert not any(result.is_exact for result in results) and plain_text.is_exact
            assert results[2].stats.num_kept_tokens >= 64 and "NOT exact (keys and values in" in repr(results[0])
            assert any(line.startswith(f"NOT EXACT: `kv_dtype` {dtype} rounds") for line in decoder.notes)
    assert all(text == texts[0] for text in texts)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "gemma3"])
def test_hybrids_and_windows_as_well(kind: str, tmp_path: Path) -> None:
    pair = (
        save_pair(FAMILIES[kind](), tmp_path)
        if kind in FAMILIES
        else (save(tiny_model(config_of(kind)), tmp_path),) * 2
    )
    ids, texts = random_ids(150), list[list[int]]()
    for tree in ("none", "8x3"):
        with opened(pair, kv_dtype="int8", tree=tree) as decoder:
            texts.append(written(decoder, ids, 16).token_ids)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("dtype", CODED)
def test_the_cache_takes_what_was_planned_and_little_more_than_half(dtype: str, pair: tuple[Path, Path]) -> None:
    with opened(pair) as plain, opened(pair, kv_dtype=dtype) as decoder:
        written(decoder, random_ids(40), 4)
        taken = sum(
            buffer.numel() * buffer.element_size()
            for layer in range(decoder.target._model.num_layers)
            for buffer in decoder._pool.caches.target.buffers_of(layer).values()
        )
        assert taken == decoder.plan.kv_bytes < plain.plan.kv_bytes / 2, "float32 beside one byte and a factor"
        assert decoder.plan.total_bytes <= decoder.plan.ram_bytes


@pytest.mark.parametrize("dtype", CODED)
def test_a_row_is_coded_by_its_own_numbers_alone_and_to_within_its_words(dtype: str) -> None:
    coding: RowCoding = CODINGS[dtype]
    rows = torch.randn(1, 2, 70, 16, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 70)[:, None]
    rows[0, 0, 3] = 0
    coded = dict(coding.coded({"keys": rows, "values": rows, "index": rows}))
    assert coded["index"] is rows and coded["keys"].dtype is torch.uint8
    back = coding.expanded(coded["keys"], coded["keys_scales"], torch.float32)
    step = {"int8": 0.5 / 127, "fp8": 2**-4}[dtype]
    assert ((back - rows).abs() <= step * rows.abs().amax(3, keepdim=True) * 1.001).all() and not back[0, 0, 3].any()
    for lo, hi in ((0, 1), (5, 41), (69, 70)):
        some = dict(coding.coded({"keys": rows[:, :, lo:hi]}))
        assert all(some[name].equal(coded[name][:, :, lo:hi]) for name in some)
        part = coding.expanded(some["keys"], some["keys_scales"], torch.float32)
        assert part.equal(back[:, :, lo:hi])


def test_what_it_does_not_go_with_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"`prompt_cache` keeps the keys and values of the model's own type, got"):
        LoadOptions(*pair, kv_dtype="fp8", prompt_cache=tmp_path)
    with opened(pair, kv_dtype="fp8", parallel=1) as decoder:
        written(decoder, random_ids(20))
        with pytest.raises(UserError, match=r"`session` keeps the keys and values of the model's own type, got"):
            decoder.save_session(tmp_path / "a.session")
    latent = save(tiny_model(config_of("deepseek_v3")), tmp_path / "latent")
    with pytest.raises(UserError, match=r"`kv_dtype` needs layers .* of heads alone, got .*deepseek_v3"):
        offload.load(latent, ram="1GiB", kv_dtype="int8")
