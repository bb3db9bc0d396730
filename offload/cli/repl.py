"""A conversation at a terminal: lines in, answers out, and what Ctrl-C means in between.

While an answer is written, Ctrl-C ends the answer and not the program: it is heard at once and obeyed where a layer
ends, because an exception in the middle of the stream's bookkeeping would lose a slot. A second one ends the program.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib import import_module
from importlib.util import find_spec

from offload.cli.console import Console, Names, error_line, turn_line
from offload.cli.prompt_input import decode
from offload.config import Sampling
from offload.engine.chat import Chat
from offload.engine.load import open_decoder
from offload.engine.request import Request
from offload.errors import ReadError, UserError
from offload.memory.plan import MemoryPlan
from offload.planning.options import LoadOptions

HINT = "Ctrl-C stops an answer, /clear begins anew, /exit or Ctrl-D leaves"


class Stopped(Exception):  # noqa: N818
    """The user has heard enough of this answer."""


class Brake:
    """Turns Ctrl-C into `Stopped`, raised by `check` and nowhere else; `check` is for `load(on_layer=...)`."""

    def __init__(self) -> None:
        self._is_pulled = False

    def check(self) -> None:
        """A moment at which stopping is safe."""
        if self._is_pulled:
            raise Stopped

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Meanwhile the first Ctrl-C only pulls the brake."""
        self._is_pulled, before = False, signal.signal(signal.SIGINT, self._pull)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
            self._is_pulled = False

    def _pull(self, *_: object) -> None:
        if self._is_pulled:
            raise KeyboardInterrupt
        self._is_pulled = True


def converse(
    model: str, draft: str | None, options: LoadOptions, console: Console, sampling: Sampling, *,
    system: str | None, max_new_tokens: int | None,
) -> None:  # fmt: skip
    """Load a model, and answer questions with it until the user leaves. Raises `UserError`."""
    brake = Brake()

    def on_layer() -> None:
        console.layer_done()
        brake.check()

    first, hooks = _any_question(system, sampling), console.hooks._replace(on_layer=on_layer)
    with open_decoder(model, draft, options, first, hooks=hooks) as decoder:
        console.open(Names.of(model, draft), decoder, decoder.tree_choice(sampling))
        console.say(HINT)
        chat = Chat(decoder, sampling, system=system, max_new_tokens=max_new_tokens)
        answer_lines(chat, decoder.plan, console, brake)


def _any_question(system: str | None, sampling: Sampling) -> Request:
    """What is wrong with it, such as a model without a chat template, is wrong with every question."""
    opening = [{"role": "system", "content": system}] if system else []
    return Request([*opening, {"role": "user", "content": "Hello"}], sampling, max_new_tokens=1)


def answer_lines(chat: Chat, plan: MemoryPlan, console: Console, brake: Brake) -> None:
    """Answer line by line until there are no more, or until one is /exit."""
    is_typed = sys.stdin.isatty()
    if is_typed and find_spec("readline"):
        import_module("readline")  # lets `input` edit lines and call earlier ones back
    while True:
        try:
            line = _typed_line() if is_typed else _piped_line()
            if line is None or line.strip() == "/exit":
                return
            if line.strip() == "/clear":
                chat.clear()
            elif line.strip():
                _answer(chat, line, plan, console, brake)
        except UserError as error:
            print(error_line(str(error)), file=sys.stderr)


def _answer(chat: Chat, question: str, plan: MemoryPlan, console: Console, brake: Brake) -> None:
    """Print the answer as it comes; whatever ends it, what was accepted is printed."""
    pieces, num_shown, failure = chat.ask(question), 0, None
    assert chat.turn is not None, "one has just begun"
    console.follow(chat.turn, plan, None)
    with brake.ready(), closing(pieces):
        try:
            for piece in pieces:
                num_shown += len(piece)
                console.text(piece)
        except (Stopped, ReadError) as error:
            failure = error
    result = chat.turn.result()
    console.text(result.text[num_shown:] + "\n")
    console.clear()
    console.say(turn_line(result.stats, result.finish_reason))
    if isinstance(failure, ReadError):
        raise failure


def _typed_line() -> str | None:
    try:
        return decode(os.fsencode(input("> " if sys.stdout.isatty() else "")), "the line")
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:
        print(f"\n{HINT}", file=sys.stderr)
        return ""
    except UnicodeDecodeError:
        raise UserError("a line must be UTF-8: set the terminal to it") from None


def _piped_line() -> str | None:
    raw = sys.stdin.buffer.readline()
    return decode(raw, "standard input").rstrip("\n") if raw else None
