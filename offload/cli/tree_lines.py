"""The tree of one pass as lines of text: what was guessed, what was kept, and what was not.

A pass scores a hundred guesses, and a terminal has room for some of them. So the path that was kept
is drawn whole, and beside each of its tokens the likeliest guesses that were not kept. Invariant:
every guess is drawn or counted.
"""

from collections.abc import Callable
from typing import NamedTuple

from offload.cli.progress import plural
from offload.engine.sequence import PassFigures

_BESIDE = 2  # wrong guesses drawn beside each token of the path
_MOST_CHARS = 24  # of one token
_MARK = "*"
_BLANKS = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥", "\r": "↵"})


class ShownPass(NamedTuple):
    """One pass of a text, and what the target wrote behind the guesses that it kept."""

    number: int  # among the passes of the text, from 1
    num_passes: int
    figures: PassFigures
    own_token: int  # the root of the next pass

    @property
    def num_guesses(self) -> int:
        """Nodes of the tree but for its root."""
        return len(self.figures.parents) - 1

    @property
    def num_kept(self) -> int:
        """Guesses that the target would have written itself."""
        return len(self.figures.accepted) - 1


def usual_pass(passes: list[PassFigures]) -> ShownPass | None:
    """Return the pass that kept as many guesses as most did, by the median; None without guesses.

    The last pass is left out: the text may end within it.
    """
    with_guesses = [index for index, one in enumerate(passes[:-1]) if len(one.parents) > 1]
    if not with_guesses:
        return None
    by_gain = sorted(with_guesses, key=lambda index: len(passes[index].accepted))
    index = by_gain[len(by_gain) // 2]
    return ShownPass(index + 1, len(passes), passes[index], passes[index + 1].tokens[0])


def tree_lines(shown: ShownPass, text_of: Callable[[int], str]) -> str:
    """Return the drawing of a pass, with what it means in its first line.

    Args:
        text_of: the text of a token.
    """
    head = (
        f"pass {shown.number} of {shown.num_passes}, a usual one: of "
        f"{plural(shown.num_guesses, 'guess').replace('guesss', 'guesses')} the model keeps "
        f"{shown.num_kept} ({_MARK}), and adds a token of its own (+)"
    )
    figures = shown.figures
    num_below = _num_below(figures.parents)
    lines = [f"  {_shown_text(text_of(figures.tokens[0]))}"]
    for depth, node in enumerate(figures.accepted):
        is_last = depth == shown.num_kept
        kept = None if is_last else figures.accepted[depth + 1]
        wrong = [
            child
            for child, parent in enumerate(figures.parents)
            if parent == node and child not in (0, kept)
        ]
        indent = "  " + "   " * depth
        for child in wrong[:_BESIDE]:
            text = _shown_text(text_of(figures.tokens[child]))
            behind = f"  and {num_below[child]} behind it" if num_below[child] else ""
            lines.append(f"{indent}├─ {text}{behind}")
        if rest := wrong[_BESIDE:]:
            num_rest = len(rest) + sum(num_below[child] for child in rest)
            lines.append(f"{indent}├─ {num_rest} more")
        token = shown.own_token if kept is None else figures.tokens[kept]
        lines.append(f"{indent}└{'+' if is_last else _MARK} {_shown_text(text_of(token))}")
    return "\n".join([head, *lines])


def _num_below(parents: list[int]) -> list[int]:
    """Return how many nodes lie below each; parents come before their children."""
    num_below = [0] * len(parents)
    for node in range(len(parents) - 1, 0, -1):
        num_below[parents[node]] += 1 + num_below[node]
    return num_below


def _shown_text(text: str) -> str:
    """Return a token with its blanks to be seen, and nothing in it that steers a terminal."""
    seen = "".join(char if char.isprintable() else "?" for char in text.translate(_BLANKS))
    return seen if len(seen) <= _MOST_CHARS else f"{seen[: _MOST_CHARS - 1]}…"
