"""Commands of a conversation: lines that begin with a slash."""

import sys
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

from offload.cli.console import Console
from offload.cli.prompt_input import read_prompt
from offload.cli.run_lines import memory_line, turn_line
from offload.cli.sampling import sampling_words
from offload.cli.terminal import fitted
from offload.declaration import listed, options_at, renamed, synonyms_at
from offload.engine.chat import Chat
from offload.errors import UserError, did_you_mean
from offload.options import PathLike, TextOptions
from offload.sampling_options import Sampling
from offload.units import plural

LEAVE = ("/bye", "/exit", "/quit")
_SAMPLING = options_at("chat", Sampling)
_TEXT = options_at("chat", TextOptions)
_NAMES = [*_SAMPLING, *_TEXT]
_SHORT = {"temp": "temperature", "n": "max-tokens", **synonyms_at("chat", Sampling)}
_HELP = f"""\
/help            show this list
/clear           forget the conversation, but for the system prompt
/system TEXT     give the model instructions before the first question; without TEXT: show them
/save FILE       keep the conversation and its cache; without FILE: in that of --session
/load FILE       go on with a conversation that was kept
/read FILE       ask what is in a file of UTF-8 text
/retry           write another answer to the last question
/undo            forget the last question and its answer
/set NAME VALUE  {listed(_NAMES, "or")}; alone: show what is set
/stats           show the figures of the last answer
/bye             leave; so do /exit, /quit and Ctrl-D
\"""             begins and ends a question of several lines; a pasted one needs no quotes"""


class SlashCommands:
    """Everything that can be done in a conversation except asking.

    Args:
        own_bytes: memory of the program itself, before it loaded a model.
        session: the file that keeps every answer, and the default of /save and /load.

    Attributes:
        session: as given; None after /load of another file, so that this one is not overwritten.
    """

    def __init__(
        self,
        chat: Chat,
        console: Console,
        own_bytes: int = 0,
        session: Path | None = None,
    ) -> None:
        self._chat = chat
        self._own_bytes = own_bytes
        self.session = session
        # the file of `--session`; it keeps answers again once it is loaded again
        self._named = session
        self._console = console
        self._table: dict[str, Callable[[str], Any]] = {
            "/help": lambda _: self._say(_HELP),
            "/clear": lambda _: self._clear(),
            "/system": self._system,
            "/save": self._save,
            "/load": self._load,
            "/read": self._read,
            "/retry": lambda _: self._retry(),
            "/undo": lambda _: self._say(f"forgotten: {chat.undo()}"),
            "/set": self._set,
            "/stats": lambda _: self._stats(),
        }

    def obey(self, command: str, text: str) -> Generator[str, None, None] | None:
        """Run a command; return the answer if it asks the model. Raises `UserError` if unknown."""
        if command not in self._table:
            known = [*self._table, LEAVE[0]]
            remedy = ": a question that begins with / needs a space before it"
            meant = did_you_mean(command, known) or remedy
            raise UserError(f"commands are {' '.join(known)}, got {command}{meant}")
        pieces: Generator[str, None, None] | None = self._table[command](text)
        return pieces

    def _say(self, lines: str) -> None:
        print(fitted(lines, sys.stderr), file=sys.stderr)

    def _clear(self) -> None:
        self._chat.clear()
        but = ", but for the system prompt" if self._chat.system else ""
        too = f"; {self.session} begins anew" if self.session else ""
        self._say(f"the conversation is forgotten{but}{too}")

    def _save(self, name: str) -> None:
        path = self._file(name)
        with self._console.keeping("the session"):
            self._chat.save(path)
        self._say(f"kept in {path}")

    def _load(self, name: str) -> None:
        """Continue the conversation in a file; answers are kept in the session's own file alone."""
        path = self._file(name)
        before = self.session
        # Not while another conversation replaces this one: ending the program now would write the
        # other to the first file.
        self.session = None
        try:
            line = go_on(self._chat, path, self._console)
        except UserError:
            self.session = before
            raise
        if self._named is not None and path.resolve() == self._named.resolve():
            self.session = self._named
        self._say(line)
        if before is not None and self.session is None:
            self._say(
                f"{before} stays as it is, and answers are kept no more: /save FILE keeps them"
            )

    def _file(self, name: str) -> Path:
        if not name and self.session is not None:
            return self.session
        if not name:
            raise UserError("a file is needed, got none: name one, such as talk.session")
        return Path(name).expanduser()

    def _read(self, name: str) -> Generator[str, None, None]:
        if not name:
            raise UserError("a file is needed, got none: name one, such as notes.txt")
        return self._chat.ask(read_prompt(None, Path(name).expanduser()))

    def _retry(self) -> Generator[str, None, None]:
        before = self._chat.turn
        pieces = self._chat.retry()
        is_whole = before is not None and before.is_finished
        samplings = [self._chat.sampling, *([before.sequence.sampler.sampling] if before else [])]
        if is_whole and not any(sampling.temperature for sampling in samplings):
            self._say("greedy, so the answer will be the same: /set temperature 0.7 draws another")
        return pieces

    def _system(self, text: str) -> None:
        if text:
            self._chat.system = text
            self._say("the system prompt is set: answers heed it from the next one on")
        else:
            self._say(self._chat.system or "no system prompt")

    def _set(self, text: str) -> None:
        """Change one setting, or none for an empty text, and show all. Raises `UserError`."""
        name, _, value = text.partition(" ")
        name = name.lower().replace("_", "-")
        name = _SHORT.get(name, name)
        value = value.strip()
        chat = self._chat
        if name in _SAMPLING:
            setting = _SAMPLING[name]
            new_value = _number(name, setting.kind, value)
            try:
                chat.sampling = replace(chat.sampling, **{setting.name: new_value})
            except UserError as error:
                raise UserError(renamed(str(error), {setting.name: name})) from None
        elif name in _TEXT:
            setting = _TEXT[name].for_command("chat")
            new_value = value or None
            if setting.kind is int:
                new_value = _number(name, int, value, least=setting.least or 0)
            setattr(chat, setting.name, new_value)
        elif name:
            meant = did_you_mean(name, _NAMES) or ": try /set temperature 0.7"
            raise UserError(f"/set knows {', '.join(_NAMES)}, got {name}{meant}")
        length = "as long as there is room"
        if chat.max_new_tokens:
            length = f"at most {chat.max_new_tokens} tokens"
        stop = f", stop {chat.stop!r}" if chat.stop else ""
        self._say(f"{sampling_words(chat.sampling)}, seed {chat.sampling.seed}; {length}{stop}")

    def _stats(self) -> None:
        if self._chat.turn is None:
            raise UserError("nothing was answered yet: ask something first")
        result = self._chat.turn.result()
        stats = result.stats
        num_used = stats.num_prompt_tokens + stats.num_new_tokens
        used = f"{num_used} of {result.plan.context} positions used"
        is_decimal = self._console.is_decimal
        memory = memory_line(stats, result.plan, self._own_bytes, is_decimal=is_decimal)
        self._say(f"{turn_line(stats, result.finish_reason)}\n{used}; {memory}")


def go_on(chat: Chat, path: PathLike, console: Console) -> str:
    """Continue the conversation in a file; return a line about it. Raises `UserError`."""
    console.wait("reading the session")
    try:
        chat.load(path)
    finally:
        console.clear()
    asked = [message["content"] for message in chat.messages if message["role"] == "user"]
    last = f", the last one asked was {asked[-1]!r:.60}" if asked else ""
    return f"going on with {path}: {plural(len(asked), 'question')}{last}"


def _number(name: str, kind: type, value: str, *, least: float = float("-inf")) -> Any:
    try:
        number = kind(value)
    except ValueError:
        number = None
    if number is None or number < least:
        kind_words = "a whole number" if kind is int else "a number"
        above = f" of at least {least}" if least > 0 else ""
        remedy = f"try /set {name} {1 if kind is int else 0.7}"
        raise UserError(f"{name} must be {kind_words}{above}, got {value!r}: {remedy}")
    return number
