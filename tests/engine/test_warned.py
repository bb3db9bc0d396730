"""What transformers warns of stands in a decoder's notes; a program that calls this package has a stderr of its own."""

import json
import logging
import sys
import threading
from pathlib import Path

import pytest
from shell import process
from tiny import FAMILIES, build, save, save_tokenizer

from offload.engine.load import warned

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
    """Whose config has an end beyond the vocabulary, and a rope of keys that nobody knows."""
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
    assert len(notes) == 2 and any("eos_token_id" in one for one in notes) and any("strange" in one for one in notes)


def test_others_hear_what_they_would_have_heard(capsys: pytest.CaptureFixture[str]) -> None:
    logger, heard, notes = logging.getLogger("transformers"), [], list[str]()
    own, stderr = logging.Handler(), logging.StreamHandler(sys.stderr)
    own.emit = lambda record: heard.append(record.getMessage())
    before, logger.handlers[:] = [*logger.handlers], [own, stderr]
    say = logging.getLogger("transformers.some.part").error
    try:
        with warned(notes):
            say("twice\n said")
            say("twice  said")
            other = threading.Thread(target=say, args=("elsewhere",))
            other.start()
            other.join()
        say("afterwards")
    finally:
        logger.handlers[:] = before
    assert notes == ["transformers: twice said"]
    assert heard == ["twice\n said", "twice  said", "elsewhere", "afterwards"]
    assert capsys.readouterr().err.splitlines() == ["elsewhere", "afterwards"]
