"""What Python shows of objects and says of arguments, and the examples of README and package, run as they stand."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from reciting import PIECES
from shell import ROOT
from tiny import save_reciter

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


BAD: dict[str, tuple[Callable[[Decoder], Any], str]] = {
    "temperature": (lambda d: d.generate("a", temperature="a"), "`temperature` must be a number, got 'a'"),  # type: ignore[arg-type]
    "top_p": (lambda d: d.generate("a", top_p=None), "`top_p` must be a number, got None"),  # type: ignore[arg-type]
    "seed": (lambda d: d.generate("a", seed=-5), r"`seed` must lie in \[0, 2\^63\), got -5: choose another"),
    "max_new_tokens": (lambda d: d.generate("a", max_new_tokens=-1), "`max_new_tokens` must be 0 or more, got -1"),
    "stop": (lambda d: d.generate("a", stop=5), "`stop` must be text, got 5"),  # type: ignore[arg-type]
    "stops": (lambda d: d.generate("a", stop=["b", 5]), "`stop` must be text"),  # type: ignore[list-item]
    "Chat sampling": (lambda d: offload.Chat(d, 0.7), "`sampling` must be a Sampling, got 0.7"),  # type: ignore[arg-type]
    "Chat system": (lambda d: offload.Chat(d, system=5), "`system` must be text, got 5"),  # type: ignore[arg-type]
    "Chat tokens": (lambda d: offload.Chat(d, max_new_tokens=-1), "`max_new_tokens` must be 0 or more, got -1"),
    "load threads": (lambda d: offload.load("x", threads="2"), "`threads` must be a whole number, got '2'"),  # type: ignore[arg-type]
    "load context": (lambda d: offload.load("x", context=1.5), "`context` must be a whole number, got 1.5"),  # type: ignore[arg-type]
    "load tree": (lambda d: offload.load("x", tree=5), "`tree` must be text, got 5: such as 64x16"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_argument_at_once(case: str, decoder: Decoder) -> None:
    ask, words = BAD[case]
    with pytest.raises(offload.UserError, match=words):
        ask(decoder)


def test_a_chat_without_a_template_is_refused_when_it_is_made(tmp_path: Path) -> None:
    mute = save_reciter(tmp_path, PIECES)
    with (
        offload.load(mute, ram="1GiB", threads=1) as decoder,
        pytest.raises(offload.UserError, match="no chat template"),
    ):
        offload.Chat(decoder)
