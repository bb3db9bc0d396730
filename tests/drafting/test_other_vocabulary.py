"""Drafts whose vocabulary differs from the target's in a few tokens: those are never guessed, and more are refused."""

import json
from pathlib import Path

import pytest
from tiny import FAMILIES, VOCAB_SIZE, random_ids, save_pair, save_tokenizer

import offload
from offload.errors import UserError


def renamed(folder: Path, num: int) -> list[int]:
    """Give some unused tokens of a folder's tokenizer other names; return their ids."""
    path = folder / "tokenizer.json"
    settings = json.loads(path.read_text())
    words = settings["model"]["vocab"]
    names = [f"<unused{index}>" for index in range(num)]
    for name in names:
        words[f"<other {name}>"] = words.pop(name)
    path.write_text(json.dumps(settings))
    return [words[f"<other {name}>"] for name in names]


def test_a_few_other_tokens_are_left_out_of_guesses(tmp_path: Path) -> None:
    target, draft = save_pair(FAMILIES["llama"](), tmp_path, noise=0.003)
    for folder in (target, draft):
        save_tokenizer(folder)
    options = {"context": 128, "dtype": "float32", "threads": 1, "profile": "none", "lookup": False}
    ids = renamed(draft, 3)
    with offload.load(target, draft, "1GiB", "32x4", **options) as decoder:
        assert any("never guesses 3 tokens of its vocabulary" in note for note in decoder.notes)
        run = decoder.start(offload.Request(random_ids(9), max_new_tokens=40))
        guessed = set[int]()
        for _ in run:
            passed = run.sequence.last_pass
            guessed |= {*(passed.tokens[1:] if passed else ())}
        assert len(guessed) > 3 and guessed.isdisjoint(ids)
        plain = decoder.generate(random_ids(9), max_new_tokens=40, tree="none")
        assert run.result().token_ids == plain.token_ids
    renamed(target, 0)
    save_tokenizer(draft)
    first = min(renamed(draft, VOCAB_SIZE // 10))
    with pytest.raises(UserError, match=rf"the first has the id {first}: '<unused\d+>' in the target, '<other"):
        offload.load(target, draft, "1GiB", "32x4", **options)
