"""What a program in Python meets: what objects show, what arguments and examples do, and notes in place of warnings."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from shell import ROOT, process
from tiny import FAMILIES, build, save, save_tokenizer

import offload
from offload.engine.decoder import Decoder


@pytest.fixture(scope="module")
def decoder(talker: Path) -> Iterator[Decoder]:
    with offload.load(talker, talker, "1GiB", "8x3", context=256, threads=1) as opened:
        yield opened


README, PACKAGE = (ROOT / "README.md").read_text(), offload.__doc__ or ""
EXAMPLES = {
    "README": re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0],
    "package": PACKAGE[PACKAGE.index("import offload") : PACKAGE.index("`load` gives")],
}


@pytest.mark.parametrize("where", EXAMPLES)
def test_the_example_runs_as_it_stands(where: str, talker: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Except for the two folders and the size of the machine."""
    text = EXAMPLES[where].replace("16GiB", "2GiB").replace("8GiB", "2GiB").replace("dynamic:128x20", "dynamic:16x4")
    for name in ("target", "draft"):
        assert f"path/to/{name}" in text
        text = text.replace(f"path/to/{name}", str(talker))
    exec(compile(text, where, "exec"), {})
    assert capsys.readouterr().out.strip()


def test_a_notebook_shows_few_lines_that_say_something(talker: Path) -> None:
    with offload.load(talker, talker, "1GiB", "8x3", context=256, threads=1) as decoder:
        result = decoder.generate("Say", max_new_tokens=12, seed=7)
        chat = offload.Chat(decoder, system="Be brief.")
        run = decoder.run("Say", offload.Sampling(), max_new_tokens=5)
        shown = [
            (decoder, ("rule='match'", "1 GiB of memory", "4 layers: 4 resident", "context 256", "largest tree 8")),
            (result, (repr(result.text), f"{len(result.token_ids)} tokens", "finish_reason='stop'", "seed=7")),
            (chat, ("questions asked: 0, told 'Be brief.'", "temperature=0.0")),
            (run, ("0 tokens so far", "not finished")),
        ]
        seen = [
            repr(shown_value) for shown_value in (*(shown_value for shown_value, _ in shown), result.stats, result.plan)
        ]
    for text, (_, words) in zip(seen, shown, strict=False):
        assert all(word in text for word in words), text
    assert f"Stats({len(result.token_ids)} tokens, the first after " in seen[4] and seen[5] in seen[0]
    assert all(len(text.splitlines()) <= 6 and max(map(len, text.splitlines())) < 120 for text in seen)
    assert repr(decoder).startswith("Decoder(closed)\n")


LOADS = """
import sys
import offload

with offload.load(sys.argv[1], ram="1GiB", context=128, threads=1, profile="none") as decoder:
    decoder.generate("longer than the tokenizer thinks it may be", max_new_tokens=3)
    print(*decoder.notes, sep="\\n")
import transformers
transformers.logging.get_logger("transformers.own").warning("of the program itself")
"""


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """Whose config has an end beyond the vocabulary, and a rope of unknown keys."""
    save(build(FAMILIES["llama"]()), tmp_path)
    save_tokenizer(tmp_path)
    for name, changes in (("config", {"eos_token_id": 100000}), ("tokenizer_config", {"model_max_length": 8})):
        path = tmp_path / f"{name}.json"
        said = {**json.loads(path.read_text()), **changes}
        said.get("rope_parameters", {})["strange"] = 3
        path.write_text(json.dumps(said))
    (tmp_path / "generation_config.json").unlink()
    return tmp_path


def test_warnings_at_load_are_notes_and_stderr_stays_the_programs(odd: Path) -> None:
    outcome = process(odd, python=("-c", LOADS), is_cold=True)
    assert outcome.code == 0 and outcome.err.splitlines() == ["[transformers] of the program itself"]
    notes = [line for line in outcome.out.splitlines() if line.startswith("transformers: ")]
    assert (
        len(notes) == 2 and any("eos_token_id" in note for note in notes) and any("strange" in note for note in notes)
    )
