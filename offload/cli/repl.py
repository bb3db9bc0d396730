"""A conversation at a terminal: questions in, answers out, and what Ctrl-C means in between.

From a question until its answer is kept, Ctrl-C ends the answer and not the program: it is heard at
once and obeyed where a layer ends, because an exception in the middle of the stream's bookkeeping
would lose a slot. A second one ends the program, at once while the model computes, and once the
answer is kept where it has come to its end: what was asked and said is lost by neither.
"""

import signal
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager

from offload.cli.chat_input import ChatInput, SilentTerminal
from offload.cli.console import Console
from offload.cli.loading import Loading
from offload.cli.run_lines import turn_line
from offload.cli.slash_commands import LEAVE, SlashCommands, go_on
from offload.cli.terminal import print_error
from offload.engine.chat import Chat
from offload.engine.request import Request
from offload.errors import UserError
from offload.machine import rss_bytes
from offload.memory.plan import MemoryPlan
from offload.options import TextOptions

HINT = "Ctrl-C stops an answer, /help lists commands, /bye or Ctrl-D leaves"


class Stopped(Exception):  # noqa: N818
    """The user has heard enough of this answer."""


class InterruptFlag:
    """Turns Ctrl-C into `Stopped`, raised by `check` alone, which is for `load(on_layer=...)`."""

    def __init__(self) -> None:
        self._is_pulled = False
        # the answer has come to its end, by itself, by `Stopped` or by a second Ctrl-C
        self._is_ended = False
        self._ends_program = False

    def check(self) -> None:
        """Raise `Stopped` if it was asked for: this is a moment at which stopping is safe."""
        if self._is_pulled and not self._is_ended:
            self._is_ended = True
            raise Stopped

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Let the first Ctrl-C only be noted meanwhile; a second one ends the program."""
        self._is_pulled = self._is_ended = self._ends_program = False
        before = signal.signal(signal.SIGINT, self._pull)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
            self._is_pulled = False
            if self._ends_program:
                raise KeyboardInterrupt

    def end(self) -> None:
        """Let a second Ctrl-C wait, from here on, until `ready` is left."""
        self._is_ended = True

    def _pull(self, *_: object) -> None:
        if self._is_pulled and self._is_ended:
            self._ends_program = True
        elif self._is_pulled:
            self._is_ended = True
            raise KeyboardInterrupt
        self._is_pulled = True


def converse(
    loading: Loading,
    console: Console,
    text: TextOptions,
    first: Request,
    terminal: SilentTerminal,
) -> None:
    """Load a model, and answer questions with it until the user leaves. Raises `UserError`.

    Args:
        text: its session is gone on from where it is there, and written after every answer.
        first: a question with all that is wrong with every question, such as no chat template.
        terminal: is silent until there is a prompt.
    """
    own_bytes = rss_bytes()
    brake = InterruptFlag()
    with loading.open(console, first, check=brake.check) as decoder:
        chat = Chat(
            decoder,
            first.sampling,
            system=text.system,
            max_new_tokens=text.max_new_tokens,
            stop=text.stop,
            think=text.think,
        )
        if first.session is not None:
            line = go_on(chat, first.session, console)
            # one that was given again holds
            chat.system = text.system or chat.system
            console.say(line)
        console.say(HINT)
        terminal.end()
        commands = SlashCommands(chat, console, own_bytes, text.session)
        answer_questions(chat, commands, decoder.plan, console, brake)


def answer_questions(
    chat: Chat,
    commands: SlashCommands,
    plan: MemoryPlan,
    console: Console,
    brake: InterruptFlag,
) -> None:
    """Answer question by question until there are no more, or a command ends it."""
    kept = chat.messages

    def keep() -> None:
        # what could not be written is tried again at the next answer
        nonlocal kept
        if commands.session is not None and chat.messages != kept:
            with console.keeping("the session"):
                chat.save(commands.session)
            kept = chat.messages

    with ChatInput(HINT) as entries:
        while True:
            try:
                entry = entries.read()
                if entry is None or entry.command in LEAVE:
                    break
                if not entry.command and not entry.text.strip():
                    continue
                # silent until the answer is kept, however it ends: a line tells of that
                with SilentTerminal(), brake.ready(), ExitStack() as ending:
                    ending.callback(keep)
                    pieces = commands.obey(*entry) if entry.command else chat.ask(entry.text)
                    if pieces is not None:
                        _answer(chat, pieces, plan, console, brake)
            except UserError as error:
                print_error(str(error))
    keep()  # what failed before, while there was room to say so, ends the program now


def _answer(
    chat: Chat,
    pieces: Generator[str, None, None],
    plan: MemoryPlan,
    console: Console,
    brake: InterruptFlag,
) -> None:
    """Print the answer as it comes; whatever ends it, what was accepted is printed."""
    assert chat.turn is not None, "one has just begun"
    console.follow(chat.turn, plan, chat.max_new_tokens)
    num_before = console.num_written
    try:
        with closing(pieces):
            failure = console.write(pieces)
            brake.end()
        result = chat.turn.result()
        console.text(result.text[console.num_written - num_before :] + "\n")
    finally:
        console.clear()
    console.say(turn_line(result.stats, result.finish_reason))
    if failure is not None and not isinstance(failure, Stopped):
        raise failure
