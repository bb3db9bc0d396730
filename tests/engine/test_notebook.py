"""What Python shows of objects and says of arguments, and the examples of README and package, run as they stand."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shell import ROOT

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
    """But for the two folders and the size of the machine."""
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
            (run, ("0 tokens so far", "'interrupted'")),
        ]
        seen = [repr(one) for one in (*(one for one, _ in shown), result.stats, result.plan)]
    for text, (_, words) in zip(seen, shown, strict=False):
        assert all(word in text for word in words), text
    assert f"Stats({len(result.token_ids)} tokens, the first after " in seen[4] and seen[5] in seen[0]
    assert all(len(text.splitlines()) <= 6 and max(map(len, text.splitlines())) < 120 for text in seen)
    assert repr(decoder).startswith("Decoder(closed)\n")


@pytest.mark.parametrize(
    ("given", "words"),
    [({"sampling": 0.7}, "`sampling` must be a Sampling, got 0.7"), ({"system": 5}, "`system` must be text, got 5")],
)
def test_a_chat_names_its_arguments_at_once(given: dict[str, Any], words: str, decoder: Decoder) -> None:
    with pytest.raises(offload.UserError, match=words):
        offload.Chat(decoder, **given)
