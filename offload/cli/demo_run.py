"""The demo's two runs side by side: one token per pass, then with a tree, one pass of which is drawn.

A pass scores a hundred guesses, and a terminal has room for some of them. So the path that was kept
is drawn whole, and beside each of its tokens the likeliest guesses that were not kept.

Invariants: both speeds are told only after every token was found to be the original model's own;
every guess is drawn or counted.
"""

from collections.abc import Callable
from typing import NamedTuple

from offload.checkpoint.packaged import PAIR
from offload.cli.console import Console
from offload.engine.decoder import Decoder
from offload.engine.generation import Generation, Run
from offload.engine.sequence import StepMetrics
from offload.errors import UserError
from offload.reports.proof import draw_gaps, rounding
from offload.sampling_options import Sampling
from offload.stats import Stats
from offload.trees.verification import find_rule
from offload.units import plural

_NUM_PLAIN = 16  # tokens that are written without a tree, at most
_BESIDE = 2  # wrong guesses drawn beside each token of the path
_MOST_CHARS = 24  # of one token
_MARK = "*"
_BLANKS = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥", "\r": "↵"})


class ShownPass(NamedTuple):
    """One pass of a text, and what the target wrote behind the guesses that it kept."""

    number: int  # among the passes of the text, from 1
    num_passes: int
    figures: StepMetrics
    own_token: int  # the root of the next pass

    @property
    def num_kept(self) -> int:
        """Guesses that the target would have written itself."""
        return len(self.figures.accepted) - 1


def usual_pass(passes: list[StepMetrics]) -> ShownPass | None:
    """Return a pass that kept the median number of guesses; None without guesses.

    The last pass is left out: the text may end within it.
    """
    with_guesses = [index for index, trace in enumerate(passes[:-1]) if len(trace.parents) > 1]
    if not with_guesses:
        return None
    by_gain = sorted(with_guesses, key=lambda index: len(passes[index].accepted))
    index = by_gain[len(by_gain) // 2]
    return ShownPass(index + 1, len(passes), passes[index], passes[index + 1].tokens[0])


def tree_lines(shown: ShownPass, text_of: Callable[[int], str]) -> str:
    """Return the drawing of a pass below a legend; `text_of` returns a token's text."""
    figures = shown.figures
    num_below = [0] * len(figures.parents)
    for node in range(len(figures.parents) - 1, 0, -1):  # parents come before their children
        num_below[figures.parents[node]] += 1 + num_below[node]
    guesses = plural(num_below[0], "guess")
    lines = [
        f"pass {shown.number} of {shown.num_passes}, a usual one: of {guesses} the model keeps "
        f"{shown.num_kept} ({_MARK}), and adds a token of its own (+)",
        f"  {_shown_text(text_of(figures.tokens[0]))}",
    ]
    for depth, node in enumerate(figures.accepted):
        is_last = depth == shown.num_kept
        kept = None if is_last else figures.accepted[depth + 1]
        children = [child for child, parent in enumerate(figures.parents) if parent == node]
        wrong = [child for child in children if child not in (0, kept)]
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
    return "\n".join(lines)


def _shown_text(text: str) -> str:
    """Return a token with its blanks to be seen, and nothing in it that steers a terminal."""
    seen = "".join(char if char.isprintable() else "?" for char in text.translate(_BLANKS))
    return seen if len(seen) <= _MOST_CHARS else f"{seen[: _MOST_CHARS - 1]}…"


class DemoResult(NamedTuple):
    """Both runs of the demo and what the proof found."""

    plain: Generation  # one token per pass
    tree: Generation
    num_exact: int  # tokens of both runs that are the float32 draw of the original model
    num_near: int  # tokens that lie within bf16 rounding of it
    # tokens of the tree's text that were found to be those without one; None: not promised here
    num_same: int | None

    @property
    def speedup(self) -> float | None:
        """Times as many tokens per second with a tree; None where the prompt's pass had all."""
        tree = self.tree.stats.tokens_per_s
        plain = self.plain.stats.tokens_per_s
        return tree / plain if tree and plain else None


def compare(
    decoder: Decoder,
    prompt: str,
    sampling: Sampling,
    *,
    num_tree: int,
    show: Callable[[str, Run], None],
) -> DemoResult:
    """Decode the prompt without and with the decoder's tree, and prove every token of both runs.

    With a rule that draws afresh no token is right, and none is proved. `show` receives a heading
    and each run, and must exhaust it. Raises `UserError` where a token is not the original model's.
    """
    num_plain = min(_NUM_PLAIN, num_tree)
    first = f"without guesses, the first {plural(num_plain, 'token')}: one token per pass"
    then = f"with guesses, at most {plural(num_tree, 'token')}: several tokens per pass"
    results: list[Generation] = []
    for heading, num_tokens, tree in ((first, num_plain, "none"), (then, num_tree, None)):
        run = decoder.run(prompt, sampling, max_new_tokens=num_tokens, tree=tree, raw=True)
        show(heading, run)
        results.append(run.result())
        if not results[-1].is_exact:
            disproof = f"`lenience` {results[-1].lenience:g} is not exact"
            raise UserError(f"{disproof}, so nothing can be proved: leave it out")
    plain, grown = results
    if not (sampling.is_greedy or find_rule(plain.rule).repeats_draws):
        return DemoResult(plain, grown, 0, 0, None)
    num_same = None
    if plain.is_invariant:
        num_same = min(len(plain.token_ids), len(grown.token_ids))
        for at in range(num_same):
            if plain.token_ids[at] != grown.token_ids[at]:
                disproof = f"token {at} with a tree is not that without one"
                raise UserError(f"{disproof}: please report this as a bug")
    prompt_ids = decoder.encode(prompt, raw=True)
    gaps = list[float]()
    for result in results:
        gaps += draw_gaps(PAIR / "target", prompt_ids, result.token_ids, sampling)
    if max(gaps) > rounding(sampling):
        disproof = f"a token misses the original model's draw by {max(gaps):.3f}"
        raise UserError(f"{disproof}: please report this as a bug")
    num_exact = sum(gap == 0 for gap in gaps)
    return DemoResult(plain, grown, num_exact, len(gaps) - num_exact, num_same)


def show_run(
    console: Console, decoder: Decoder, heading: str, run: Run, *, is_silent: bool
) -> None:
    """Print one run of the demo as it goes, and draw one of its passes."""
    console.say(f"--- {heading}")
    console.follow(run, decoder.plan, run.sequence.limits.max_new_tokens)
    passes: list[StepMetrics] = []
    try:
        for piece in run:
            if not is_silent:
                console.text(piece)
            last = run.sequence.last_pass
            if last is not None and last not in passes[-1:]:
                passes.append(last)
    finally:
        if not is_silent:
            console.text("\n")
    tokenizer = decoder.tokenizer
    if (shown := usual_pass(passes)) is not None and tokenizer is not None:
        console.say(tree_lines(shown, lambda token: tokenizer.decode([token])))
    console.wait("comparing every token with the model alone")


def comparison_lines(result: DemoResult) -> str:
    """Return both speeds side by side, and what was proved of both texts."""
    tree = result.tree.stats
    kind = "dynamic tree" if tree.is_tree_dynamic else "tree"
    named = f"{kind} {tree.tree_num_nodes}x{tree.tree_depth}"
    # all came at once, those of the tree with the prompt's pass
    fast = "too few tokens to tell how fast: raise -n"
    if result.speedup:
        fast = f"{result.speedup:.1f} times as fast"
    return "\n".join(
        [
            f"{'':>21} {'tokens/s':>9} {'a pass':>8} {'s/token':>8}",
            _speed_row("without guesses", result.plain.stats),
            _speed_row(named if tree.tree_depth else "no tree seemed to pay", tree),
            fast,
            proof_line(result),
        ]
    )


def _speed_row(label: str, stats: Stats) -> str:
    speed = f"{stats.tokens_per_s:>9.2f} {stats.tokens_per_sweep:>8.2f} {stats.tpot_s:>8.3f}"
    return f"{label:>21} {speed}"


def proof_line(result: DemoResult) -> str:
    """Return the result of the comparison, for a reader who has not heard of it."""
    num_proved = result.num_exact + result.num_near
    if not num_proved:
        return "this rule draws afresh: the tokens have the model's distribution, and no text is compared"
    return (
        f"proof: the model alone, held in memory as a whole, writes the same text: all "
        f"{plural(num_proved, 'token')} compared"
    )


def proof_details(result: DemoResult) -> str:
    """Return a line on how exactly the tokens were compared."""
    if not result.num_exact + result.num_near:
        return ""
    details = (
        f"{result.num_exact} tokens are the original model's own draw in float32, "
        f"{result.num_near} lie within bf16 rounding of it"
    )
    if result.num_same is None:
        return details
    return f"{details}\n{result.num_same} tokens that both runs have are the same, bit for bit"
