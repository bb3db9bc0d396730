"""Prompts that every machine has: code, prose and chat-like questions, without a network; or files of the user's.

| name | what |
|---|---|
| code | beginnings of standard library files that the packaged pair was not trained on |
| prose | licences, and descriptions that installed packages bring along |
| chat | questions that were written for this file, in eight kinds |
| a file | text is one prompt; `.jsonl` has one a line: Spec-Bench and MT-Bench (`turns`), `prompt` or `text` |

Invariant: the same machine gives the same prompts in the same order, and no prompt twice.
"""

import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from offload.errors import UserError

if TYPE_CHECKING:
    from offload.engine.decoder import Decoder

LICENCES = Path("/usr/share/common-licenses")
_CHARS = 1200  # of a text: more than enough for 128 tokens
_LEAST_CHARS, _MOST_BYTES = 2000, 60_000  # of a file: shorter ones are stubs, longer ones tables

_CHAT = (
    ("reasoning", "Two trains leave at the same hour from towns 300 km apart and drive towards each other at 70 and 80"
     " km/h. Where do they meet, and how would the answer change if one left half an hour later?"),
    ("writing", "Write a short letter to a neighbour who practises the trumpet at night. Be kind, propose two hours"
     " that would suit both of you, and end with an invitation."),
    ("coding", "Write a Python function that merges two sorted lists without the standard library, then explain in two"
     " sentences why its running time is linear."),
    ("extraction", "List every person and every year in this text: The bridge was begun by Anna Holm in 1887, halted in"
     " 1890 for want of money, and finished by her nephew Karl in 1903."),
    ("roleplay", "You are the keeper of a lighthouse in a storm. Tell the coast guard over the radio what you see, what"
     " you hear and what you need, in the order of importance."),
    ("maths", "A tank is filled by one pipe in six hours and emptied by another in nine. Both are opened when it is"
     " half full. When does it run over? Show every step."),
    ("science", "Why does ice float on water, and what would a lake look like in winter if it did not? Answer for a"
     " curious twelve-year-old."),
    ("summary", "Summarise in three points what a town has to think of before it closes its centre to cars: shops,"
     " deliveries, buses, people who cannot walk far, and the streets around it."),
)  # fmt: skip


class Prompt(NamedTuple):
    """One text to go on from."""

    name: str  # unique within a bench, such as code/argparse.py
    text: str
    is_chat: bool = False  # a question: it belongs into a chat template where the model has one


def prompts(sources: Iterable[str], num_each: int, *, chars: int = _CHARS) -> list[Prompt]:
    """`num_each` prompts from every source, spread evenly over what it has; fewer where it has fewer.

    Raises:
        UserError: a source that is neither a set nor a file, has no text, or cannot be read.
    """
    found = [prompt for source in sources for prompt in _spread(_texts(source), num_each)]
    return [prompt._replace(text=prompt.text[:chars]) for prompt in found]


def encoded(decoder: "Decoder", prompt: Prompt, num_tokens: int) -> list[int]:
    """Token ids: a text cut to `num_tokens`, a question whole where a chat template surrounds it."""
    if prompt.is_chat and decoder.tokenizer is not None and decoder.tokenizer.chat_template:
        return decoder.encode(prompt.text)
    return decoder.encode(prompt.text, raw=True)[:num_tokens]


def _texts(source: str) -> list[Prompt]:
    texts = list(SETS[source]()) if source in SETS else list(_from_file(Path(source)))
    if not texts:
        raise UserError(f"--prompts {source} gives no prompt on this machine: name a text or .jsonl file")
    return list({prompt.text: prompt for prompt in texts}.values())


def _code() -> Iterator[Prompt]:
    from offload.bench.train_pair import corpus_files, read_source

    for path in corpus_files(held_out=True):
        if 4000 < path.stat().st_size < _MOST_BYTES:
            yield Prompt(f"code/{path.name}", read_source(path))


def _prose() -> Iterator[Prompt]:
    licences = sorted(LICENCES.iterdir()) if LICENCES.is_dir() else []
    for path in (*licences, Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt"):
        if path.is_file() and not path.is_symlink() and path.stat().st_size >= _LEAST_CHARS:
            yield Prompt(f"prose/{path.name}", path.read_text(encoding="utf-8", errors="replace"))
    described = {str(found.metadata["Name"]): found.read_text("METADATA") or "" for found in distributions()}
    for name, metadata in sorted(described.items()):
        text = metadata.partition("\n\n")[2].strip()  # headers, a blank line, the description
        if len(text) >= _LEAST_CHARS:
            yield Prompt(f"prose/{name}", text)


def _chat() -> Iterator[Prompt]:
    yield from (Prompt(f"chat/{kind}", question, is_chat=True) for kind, question in _CHAT)


def _from_file(path: Path) -> Iterator[Prompt]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UserError(f"--prompts must be {', '.join(SETS)} or a file, cannot read {path} ({reason})") from None
    if path.suffix != ".jsonl":
        yield from [Prompt(path.name, text)] if text.strip() else []
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield Prompt(f"{path.name}:{number}", _question(line, f"{path.name}:{number}"), is_chat=True)


def _question(line: str, place: str) -> str:
    """The first turn of a line of Spec-Bench or MT-Bench, or its `prompt` or `text`."""
    try:
        entry: Any = json.loads(line)
    except ValueError:
        raise UserError(f"{place} is not JSON: give one object a line") from None
    turns = entry.get("turns") if isinstance(entry, dict) else None
    text = turns[0] if isinstance(turns, list) and turns else None
    if text is None and isinstance(entry, dict):
        text = entry.get("prompt") or entry.get("text")
    if not isinstance(text, str) or not text.strip():
        raise UserError(f'{place} has no question: it needs "turns", "prompt" or "text"')
    return text


def _spread(found: list[Prompt], num: int) -> list[Prompt]:
    num = min(num, len(found))
    return [found[index * len(found) // num] for index in range(num)]


SETS: dict[str, Callable[[], Iterator[Prompt]]] = {"code": _code, "prose": _prose, "chat": _chat}
