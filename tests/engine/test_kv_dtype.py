"""Keys and values in eight bits: another text than the target's own, and one for every tree; bytes as planned."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_families import config_of, tiny_model
from test_prefix_cache import opened, written
from tiny import FAMILIES, random_ids, save, save_pair

import offload
from offload.errors import UserError
from offload.memory.plan import MemoryBudget
from offload.memory.planner import plan_memory
from offload.model.headers import describe
from offload.model.kv_coding import CODINGS, RowCoding
from offload.options import KV_DTYPES
from offload.planning.load_options import LoadOptions

CODED = KV_DTYPES[1:]
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
    "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 80, "vocab_size": 128256,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5,
}  # fmt: skip


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


def test_128_k_positions_of_a_70b_are_planned_or_refused_with_figures(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    model: Any = describe(tmp_path, None)
    sizes = {"dtype": "bfloat16", "context": 131_072}

    def plan(kv_dtype: str, ram: float, gpu: float | None = None) -> Any:
        gpu_bytes = None if gpu is None else int(gpu * 2**30)
        budget = MemoryBudget(ram_bytes=int(ram * 2**30), gpu_bytes=gpu_bytes, kv_dtype=kv_dtype, **sizes)
        return plan_memory(offload.checkpoint.checkpoint.ModelFiles(model), budget, 1)

    with pytest.raises(UserError, match=r"needs .* GiB of .* budget is 32 GiB: raise `ram` to .* or lower `context`"):
        plan("auto", 32)
    plain_bytes = plan("auto", 1000).kv_bytes
    for kv_dtype in CODED:
        coded_bytes = plan(kv_dtype, 32).kv_bytes
        assert 2 * coded_bytes / plain_bytes == pytest.approx((128 + 4) / 128, abs=1e-3)
        with pytest.raises(
            UserError, match=r"needs .* GiB of device memory .* budget is 24 GiB: raise `gpu_memory` to"
        ):
            plan(kv_dtype, 200, 24)
