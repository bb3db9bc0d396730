"""Prompts that come again: what was computed for a beginning serves every text with it, in memory and from a folder."""

import json
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from carried_models import carrying
from matrix import matrix
from test_families import config_of, tiny_model
from tiny import FAMILIES, VOCAB_SIZE, finished, random_ids, save, save_pair, streaming_ram

import offload
from offload.engine import block_folder
from offload.engine.block_folder import BlockFolder
from offload.engine.decoder import Decoder
from offload.engine.prefix_cache import BLOCK_ROWS, BlockStore, PrefixCache, TokenChain
from offload.engine.request import Request
from offload.engine.service import Engine
from offload.errors import UserError
from offload.sampling_options import Sampling

CONTEXT, NUM_NEW = 250, 6
ROOM_BYTES = 4 << 20
HYBRIDS = ("qwen3_5_text", "qwen3_next", "lfm2", "granitemoehybrid", "jamba", "kimi_linear", "minimax", "zamba2",
           "recurrent_gemma", "olmo_hybrid")  # fmt: skip
FAMILY = {"llama": "llama", "sliding": "gemma3", "delta": "qwen3_5_text", "mamba": "granitemoehybrid"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = dict[str, tuple[Path, Path]]()

    def of(kind: str) -> tuple[Path, Path]:
        if kind not in made:
            where = tmp_path_factory.mktemp(kind)
            if kind == "mtp":
                made[kind] = (carrying("qwen3_next")[0],) * 2
            elif (family := FAMILY.get(kind, kind)) in FAMILIES:
                made[kind] = save_pair(FAMILIES[family](), where)
            else:
                made[kind] = (save(tiny_model(config_of(family)), where),) * 2
        return made[kind]

    return of


@contextmanager
def opened(
    pair: tuple[Path, Path], *, context: int = CONTEXT, parallel: int = 2, room_bytes: int = ROOM_BYTES, **options: Any
) -> Iterator[Decoder]:
    """A decoder whose layers stream, with room for prompts beside them where it is asked for."""
    target, draft = pair
    sizes = {"context": context, "parallel": parallel, "num_nodes": 8 * parallel, "experts": "layers"}
    ram = streaming_ram(target, draft, dtype="float32", **sizes) + (room_bytes if options else 0)
    options = {"tree": "8x3", "dtype": "float32", "threads": 1, "experts": "layers", **options}
    named = options.pop("draft", draft)
    with offload.load(target, named, ram, context=context, parallel=parallel, **options) as decoder:
        yield decoder


def written(decoder: Decoder, ids: list[int], num_new: int = NUM_NEW, **options: Any) -> Any:
    run = decoder.start(Request(ids, Sampling(**options), num_new), continues=True)
    try:
        return finished(run)
    finally:
        decoder.release(run)


def conversations(number: int, chance: random.Random) -> list[list[tuple[list[int], int]]]:
    """Prompts with seeds, turn by turn: of a few beginnings, continued, edited, cut, started over."""
    systems = [random_ids(size, seed=size) for size in (70, 100, 140)]
    talks = []
    for _ in range(number):
        ids = [*chance.choice(systems)]
        turns = []
        for _ in range(chance.choice((1, 2, 3))):
            if turns and chance.random() < 0.4:
                ids = ids[: chance.randrange(20, len(ids))]
            if chance.random() < 0.3:
                ids[chance.randrange(len(ids))] = chance.randrange(3, VOCAB_SIZE)
            ids = [*ids, *(chance.randrange(3, 60) for _ in range(chance.randrange(1, 60)))][: CONTEXT - 20]
            turns.append((ids, chance.randrange(100)))
        talks.append(turns)
    return talks


@pytest.mark.full
@pytest.mark.parametrize("kind", ["llama", "sliding", "mtp", *HYBRIDS])
@pytest.mark.parametrize("seed", [5, 6])
def test_texts_of_four_clients_are_those_without_the_cache(kind: str, seed: int, folders: Any) -> None:
    """Fifty conversations with edits, at any temperature; memory stays within what was planned for it."""
    talks = conversations(50, random.Random(seed))
    options = {"draft": "mtp"} if kind == "mtp" else {}
    if kind not in FAMILY or kind == "mtp":  # whose vocabularies are smaller
        talks = [[([token % 50 + 3 for token in ids], seed) for ids, seed in turns] for turns in talks]

    def drawn(seed: int) -> dict[str, Any]:
        return {"temperature": 0.8 * (seed % 2), "seed": seed}

    with opened(folders(kind), **options) as plain:
        wanted = [[written(plain, ids, **drawn(seed)).token_ids for ids, seed in talk] for talk in talks]
    size = 32 if kind in HYBRIDS else 1  # in MiB: states are large
    kept = {"prompt_cache_ram": f"{size}MiB", "room_bytes": ROOM_BYTES + (size << 20)}
    with opened(folders(kind), **kept, **options) as decoder, Engine(decoder) as engine:
        prefixes = decoder._pool._prefixes
        assert prefixes is not None and decoder.plan.prompt_cache_bytes == size << 20
        num_kept = list[int]()

        def talk_through(talk: list[tuple[list[int], int]]) -> list[list[int]]:
            results = [engine.submit(Request(ids, Sampling(**drawn(seed)), NUM_NEW)).result(300) for ids, seed in talk]
            num_kept.extend(result.stats.num_kept_tokens for result in results)
            assert prefixes.num_bytes <= decoder.plan.prompt_cache_bytes
            return [result.token_ids for result in results]

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(talk_through, talks)) == wanted
        assert sum(num > BLOCK_ROWS for num in num_kept) > len(num_kept) // 10, "else nothing is shown"
        assert 0 < decoder.plan.total_bytes <= decoder.plan.ram_bytes


@pytest.mark.parametrize("kind", ["llama", "delta"])
def test_a_conversation_behind_seven_others_and_behind_a_restart_is_read_in_a_pass(
    kind: str, folders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six turns, and seven other conversations between each two; the seventh comes from the folder alone."""
    options = {"prompt_cache_ram": "3MiB", "prompt_cache": tmp_path / "prompts"}
    most_rows = 80
    monkeypatch.setattr("offload.memory.prompt_rows.PROMPT_ROWS", most_rows)
    monkeypatch.setattr("offload.memory.prompt_rows._LEAST_ROWS", most_rows)
    ids = random_ids(130)
    with opened(folders(kind), **options) as decoder:
        assert decoder.plan.max_prompt_rows == most_rows
        for turn in range(6):
            for other in range(7):
                written(decoder, random_ids(150, seed=100 + 10 * turn + other), 1)
            result = written(decoder, ids)
            assert turn == 0 or len(ids) - 1 - result.stats.num_kept_tokens <= most_rows, "else it takes two passes"
            ids = [*ids, *result.token_ids, *random_ids(9, seed=turn)]
    with opened(folders(kind), **options) as decoder, opened(folders(kind)) as plain:
        result = written(decoder, ids)
        assert len(ids) - 1 - result.stats.num_kept_tokens <= most_rows
        assert result.token_ids == written(plain, ids).token_ids
        assert result.stats.tokens_per_sweep == written(plain, ids).stats.tokens_per_sweep, "the draft's rows are there"


@matrix("family", HYBRIDS, daily=2)
def test_hybrids_leave_states_inside_of_prompts(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another text that begins alike goes on from them, as agents' prompts end apart; so it does behind a restart."""
    monkeypatch.setattr("offload.engine.prefix_cache.POINT_ROWS", BLOCK_ROWS)
    pair = (save(tiny_model(config_of(family)), tmp_path / family),) * 2
    begin, *ends = ([token % 50 + 3 for token in random_ids(size)] for size in (2 * BLOCK_ROWS + 12, 20, 31))
    ids, other = ([*begin, *end[::-1]] for end in ends)
    with opened(pair) as plain:
        wanted = [written(plain, tokens).token_ids for tokens in (ids, other)]
    options = {"prompt_cache_ram": "4MiB", "prompt_cache": tmp_path / "prompts"}
    with opened(pair, **options) as decoder:
        results = [written(decoder, tokens) for tokens in (ids, other)]
    with opened(pair, **options) as decoder:
        results.append(written(decoder, [*other[:-3], 5]))
    assert [result.stats.num_kept_tokens for result in results] == [0, 2 * BLOCK_ROWS, 2 * BLOCK_ROWS]
    assert [result.token_ids for result in results[:2]] == wanted


def test_two_servers_share_one_folder_that_is_too_small(folders: Any, tmp_path: Path) -> None:
    """At the same time: each removes what the other has just found, and no text is another one."""
    talks = conversations(8, random.Random(3))
    with opened(folders("llama")) as plain:
        wanted = [[written(plain, ids, seed=seed).token_ids for ids, seed in talk] for talk in talks]
    options = {"prompt_cache": tmp_path / "prompts", "prompt_cache_size": "400KB"}

    def serve(order: int) -> int:
        with opened(folders("llama"), **options) as decoder, Engine(decoder) as engine:
            num_kept = 0
            for talk, texts in [*zip(talks, wanted, strict=True)][::order]:
                requests = [Request(ids, Sampling(seed=seed), NUM_NEW) for ids, seed in talk]
                results = [engine.submit(request).result(300) for request in requests]
                assert [result.token_ids for result in results] == texts
                num_kept += sum(result.stats.num_kept_tokens for result in results)
            assert not [line for line in decoder.notes if "prompts" in line], "nothing is told of a block that is gone"
            return num_kept

    with ThreadPoolExecutor(2) as pool:
        assert min(pool.map(serve, (1, -1))) > BLOCK_ROWS
    assert sum(path.stat().st_size for path in (tmp_path / "prompts").iterdir()) < 800_000


def test_rows_are_the_bits_that_were_computed(folders: Any, tmp_path: Path) -> None:
    """And with a wrong row the text would be another, so the tests above can fail."""
    ids = random_ids(2 * BLOCK_ROWS + 5)
    with opened(folders("llama"), prompt_cache=tmp_path) as decoder:
        wanted = written(decoder, ids).token_ids
        states = {layer: {name: rows[:, :, : 2 * BLOCK_ROWS].clone() for name, rows in held.items()}
                  for layer, held in decoder._pool.caches.target.states(2 * BLOCK_ROWS).items()}  # fmt: skip
    with opened(folders("llama"), prompt_cache=tmp_path) as decoder:
        result = written(decoder, ids)
        assert result.stats.num_kept_tokens == 2 * BLOCK_ROWS and result.token_ids == wanted
        for layer, held in decoder._pool.caches.target.states(2 * BLOCK_ROWS).items():
            assert all(rows.equal(states[layer][name]) for name, rows in held.items())
        prefixes = decoder._pool._prefixes
        assert prefixes is not None
        with torch.inference_mode():
            for tensors, _ in prefixes._ram._blocks.values():
                for tensor in tensors.values():
                    tensor.zero_()
        written(decoder, random_ids(100, seed=8)), written(decoder, random_ids(100, seed=9))
        assert written(decoder, ids).token_ids != wanted


def test_only_texts_of_the_same_weights_type_and_version_share_a_folder(folders: Any, tmp_path: Path) -> None:
    ids = random_ids(150)
    with opened(folders("llama"), prompt_cache=tmp_path) as decoder:
        written(decoder, ids)
    files = {*tmp_path.iterdir()}
    target, draft = folders("llama")
    other = save_pair(FAMILIES["llama"](), tmp_path.parent / "other", seed=7)
    for pair, dtype in ((other, "float32"), ((target, draft), "bfloat16")):
        with opened(pair, prompt_cache=tmp_path, dtype=dtype) as decoder:
            assert written(decoder, ids).stats.num_kept_tokens == 0
    assert files < {*tmp_path.iterdir()}, "each has its own beside the others"
    with opened((target, other[1]), prompt_cache=tmp_path) as decoder:
        assert written(decoder, ids).stats.num_kept_tokens == 2 * BLOCK_ROWS, "another draft is no hindrance"
    mark = tmp_path / "offload-prompt-cache.json"
    mark.write_text(json.dumps({"format": "offload prompt cache, version 9"}))
    refused = r"is no offload prompt cache, version 1, but 'offload prompt cache, version 9': name another folder"
    with pytest.raises(UserError, match=refused):
        BlockFolder(tmp_path, 1 << 20, print)
    mark.unlink()
    with pytest.raises(UserError, match=r"holds something else than prompts, such as .*: name an empty folder"):
        BlockFolder(tmp_path, 1 << 20, print)
    (tmp_path.parent / "file").touch()
    with pytest.raises(UserError, match=r"cannot keep prompts in .*file .*: name another folder"):
        BlockFolder(tmp_path.parent / "file", 1 << 20, print)


@pytest.mark.parametrize("damage", ["cut", "flipped", "renamed", "gone", "empty", "unreadable"])
def test_damaged_blocks_are_computed_anew_and_told_once(damage: str, folders: Any, tmp_path: Path) -> None:
    ids = random_ids(200)
    with opened(folders("llama"), prompt_cache=tmp_path) as decoder:
        wanted = written(decoder, ids).token_ids
    blocks = sorted(tmp_path.glob("*.safetensors"))
    contents = [path.read_bytes() for path in blocks]
    for path, content, next_content in zip(blocks, contents, [*contents[1:], contents[0]], strict=True):
        match damage:
            case "cut":
                path.write_bytes(content[:-9])
            case "flipped":
                path.write_bytes(content[:-9] + bytes([content[-9] ^ 4]) + content[-8:])
            case "renamed":
                path.write_bytes(next_content)
            case "gone":
                path.unlink()
            case "empty":
                path.write_bytes(b"")
            case _:
                path.unlink()
                path.mkdir()
    with opened(folders("llama"), prompt_cache=tmp_path) as decoder:
        num_notes = len(decoder.notes)
        result = written(decoder, ids)
        assert (result.stats.num_kept_tokens, result.token_ids) == (0, wanted)
        noted = decoder.notes[num_notes:]
        expected = {"gone": [], "unreadable": ["cannot be read", "no more prompts are kept"]}.get(
            damage, ["is damaged ("]
        )
        assert len(noted) == len(expected) and all(words in line for words, line in zip(expected, noted, strict=True))
    if damage not in ("gone", "unreadable"):
        assert {path.read_bytes() for path in blocks} & {*contents}, "what was looked at is written again"


def test_a_full_disk_is_told_once_and_ends_no_text(
    folders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, os.strerror(28))

    with opened(folders("llama"), prompt_cache=tmp_path) as decoder:
        monkeypatch.setattr(block_folder, "write_tensors", full)
        num_notes = len(decoder.notes)
        first = written(decoder, random_ids(200))
        assert len(first.token_ids) == NUM_NEW and written(decoder, random_ids(200)).stats.num_kept_tokens > 150
        (line,) = decoder.notes[num_notes:]
        assert line.startswith("no more prompts are kept in") and "No space left" in line
    assert not [*tmp_path.glob("*.safetensors"), *tmp_path.glob(".*")]


def test_a_folder_keeps_to_its_size_and_two_programs_share_it(tmp_path: Path) -> None:
    def block(number: int) -> dict[str, torch.Tensor]:
        return {"target.keys.0": torch.full((1, 1, 64, 64), float(number))}

    keys = [bytes([number]) * 20 for number in range(12)]
    most_bytes = 6 * 17_000
    first, second = (BlockFolder(tmp_path, most_bytes, pytest.fail) for _ in range(2))
    for number, key in enumerate(keys):
        assert (first if number % 2 else second).write(key, block(number))
        os.utime(tmp_path / f"{key.hex()}.safetensors", (number, number))
        assert sum(path.stat().st_size for path in tmp_path.glob("*.safetensors")) <= most_bytes
    assert second.look(keys[-1]) and first.look(keys[-2]), "each sees what the other has written"
    block_read = second.read(keys[-1], lambda header: None)
    assert block_read is not None and block_read["target.keys.0"].equal(block(11)["target.keys.0"])
    assert second.read(keys[0], lambda header: None) is None, "the oldest went first"
    assert not first.write(b"x" * 20, {"target.keys.0": torch.zeros(most_bytes)}), "larger than all of it"


def test_what_is_used_least_makes_room_and_a_chain_keeps_its_head() -> None:
    def block(size: int = 100) -> dict[str, torch.Tensor]:
        return {"target.keys.0": torch.zeros(size, dtype=torch.uint8)}

    store = BlockStore(5 * 112)
    first, second = [b"a1", b"a2", b"a3"], [b"b1", b"b2", b"b3", b"b4", b"b5", b"b6"]
    assert all(store.write(key, block(), {*first}) for key in first)
    store.use(first)
    assert [store.write(key, block(), {*second}) for key in second] == [True] * 5 + [False]
    assert all(key in store for key in second[:5]) and store.num_bytes == 5 * 112
    store.use(second[:5])
    assert store.write(b"c", block(), {b"c"}) and second[4] not in store and second[0] in store, "its end went"
    assert not store.write(b"d", block(1000), set()) and store.num_bytes == 5 * 112


def test_names_depend_on_every_token_before_and_on_the_model() -> None:
    ids = random_ids(200)
    chain = TokenChain(b"model", ids, 0)
    assert len(chain.keys) == 3 and chain.keys[:2] == TokenChain(b"model", ids[:130], 0).keys
    assert not {*chain.keys} & {*TokenChain(b"another", ids, 0).keys}
    assert not {*chain.keys} & {*TokenChain(b"model", [ids[0] + 1, *ids[1:]], 0).keys}
    ahead = TokenChain(b"model", ids[:129], 1)
    assert len(ahead.keys) == 2 and len(TokenChain(b"model", ids[:128], 1).keys) == 1, "its last row wants a token more"
    assert ahead.keys[1] != TokenChain(b"model", [*ids[:128], 1 + ids[128]], 1).keys[1]
    points = {chain.point_key(position) for position in range(1, 200)}
    assert len(points | {*chain.keys}) == 199 + 3


def test_nothing_is_kept_where_it_is_not_asked_for(folders: Any) -> None:
    with opened(folders("llama")) as decoder:
        assert decoder._pool._prefixes is None and decoder.plan.prompt_cache_bytes == 0
    with opened(folders("llama"), prompt_cache_ram="auto") as decoder:
        plan = decoder.plan
        assert isinstance(decoder._pool._prefixes, PrefixCache) and plan.total_bytes <= plan.ram_bytes
        assert 0 < plan.prompt_cache_bytes <= plan.ram_bytes / 8
