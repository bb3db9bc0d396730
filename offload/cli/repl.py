"""A conversation at a terminal: questions in, answers out, and what Ctrl-C means in between.

Between a question and the moment its answer is kept, Ctrl-C ends the answer, not the program. It is
noted at once and takes effect where a layer ends: an exception amid the stream's bookkeeping would
lose a slot. A second Ctrl-C ends the program: at once while the model computes, and once the answer
is kept if it is complete. Neither loses what was said.
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
    """The user stopped this answer."""


class InterruptFlag:
    """Turns Ctrl-C into `Stopped`, raised by `check` alone, which is for `load(on_layer=...)`."""

    def __init__(self) -> None:
        self._is_pulled = False
        # the answer is complete: by itself, by `Stopped` or by a second Ctrl-C
        self._is_ended = False
        self._ends_program = False

    def check(self) -> None:
        """Raise `Stopped` if the user asked for it: here it is safe to stop."""
        if self._is_pulled and not self._is_ended:
            self._is_ended = True
            raise Stopped

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Only note the first Ctrl-C within the body; a second one ends the program."""
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
        """From here until `ready` is left, let a second Ctrl-C wait."""
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
        text: its session, if it exists, is continued, and it is written after every answer.
        first: an example question, which fails for reasons that hold for all, such as no chat
            template.
        terminal: echoes nothing until there is a prompt.
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
            # a system prompt given again replaces the kept one
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
    """Answer questions until there are no more, or a command ends the conversation."""
    kept = chat.messages

    def keep() -> None:
        # what could not be written is tried again after the next answer
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
                # silent until the answer is kept, whatever ends it: a line then says so
                with SilentTerminal(), brake.ready(), ExitStack() as ending:
                    ending.callback(keep)
                    pieces = commands.obey(*entry) if entry.command else chat.ask(entry.text)
                    if pieces is not None:
                        _answer(chat, pieces, plan, console, brake)
            except UserError as error:
                print_error(str(error))
    keep()  # an earlier failure that was only reported ends the program now


def _answer(
    chat: Chat,
    pieces: Generator[str, None, None],
    plan: MemoryPlan,
    console: Console,
    brake: InterruptFlag,
) -> None:
    """Print the answer as it comes; whatever ends it, accepted tokens are printed."""
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
