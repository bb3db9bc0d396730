"""The embedded default: a real run on any machine, without a network, a GPU or a model of one's
own.

The target of a packaged pair is inflated to about a gigabyte without changing what it computes,
allowed a quarter of that in memory, and decodes first one token per pass, then with a tree. Both
speeds are printed only after every token was found to be the original model's own.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from offload.checkpoint.hub import checkpoint_of_config
from offload.checkpoint.inflate import inflated_config
from offload.checkpoint.packaged import PAIR, inflated_target
from offload.checkpoint.safetensors import open_checkpoint
from offload.checkpoint.sizes import model_shape
from offload.cli.console import Console
from offload.cli.progress import plural
from offload.engine.decoder import Decoder
from offload.engine.generation import Generation, Run
from offload.engine.hooks import Progress
from offload.engine.load import open_decoder
from offload.engine.request import Request
from offload.engine.text import load_tokenizer
from offload.errors import UserError
from offload.memory.plan import MemoryPlan
from offload.memory.planner import ModelFiles, least_budget, plan_memory
from offload.options import CHAT_PAIR
from offload.planning.options import LoadOptions
from offload.reports.proof import draw_gaps, rounding
from offload.stats import Stats
from offload.trees.spec import parse_tree
from offload.trees.verification import find_rule
from offload.units import Sampling, require

_CONTEXT = 512
_CHAT_BYTES = 10**9
_CHAT_CONTEXT = 1024


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
        """How many times more tokens per second the tree gives; None where they came with the
        prompt's.
        """
        tree = self.tree.stats.tokens_per_s
        plain = self.plain.stats.tokens_per_s
        return tree / plain if tree and plain else None


def demo_options(ram: str | int, tree: str, **options: Any) -> LoadOptions:
    """How the demo loads: on the CPU, since any GPU would hold the target, and nothing would
    stream.
    """
    looks_up = True if parse_tree(tree).kind in ("best", "dynamic") else None
    return LoadOptions(
        ram=ram, tree=tree, context=_CONTEXT, device="cpu", lookup=looks_up, **options
    )


def budget(size_bytes: int, ram: str | int | None, tree: str, rule: str) -> str | int:
    """What a target of that size may take: a quarter of it, or the least that works. Raises
    `UserError`.

    Args:
        ram: what was asked for instead.
    """
    plan = _planned(PAIR, size_bytes, tree, context=_CONTEXT, rule=rule)
    if ram is None:
        return max(size_bytes // 4, least_budget(lambda size: plan(ram=size)))
    try:
        plan(ram=ram)
    except UserError as error:  # and no --context can be lowered
        raise UserError(str(error).partition(" or lower `context`")[0]) from None
    return ram


def _planned(pair: Path, size_bytes: int, tree: str, **how: Any) -> Callable[..., MemoryPlan]:
    """Return what plans memory for a pair whose target is inflated to that size."""
    target = checkpoint_of_config(
        inflated_config(pair / "target", size_bytes), pair / "target" / "config.json"
    )
    spec = parse_tree(tree)
    num_nodes = 1 if spec.is_chosen else spec.num_nodes * how.get("parallel", 1)
    files = ModelFiles(target, open_checkpoint(pair / "draft"))
    return partial(plan_memory, files, dtype="auto", num_nodes=num_nodes, **how)


def packaged_chat(options: LoadOptions, progress: Progress) -> tuple[str, LoadOptions]:
    """Return the packaged target that answers questions, inflated, and how it is loaded.

    It streams: a quarter of it is allowed in memory, or the least that works. What the user has
    named stays as it is. Raises `UserError`.
    """
    named: dict[str, Any] = {
        "device": options.device if options.device != "auto" else "cpu",
        "context": options.context or _CHAT_CONTEXT,
    }
    if options.ram is None:
        how = {"context": named["context"], "rule": options.rule, "parallel": options.parallel}
        plan = _planned(CHAT_PAIR, _CHAT_BYTES, options.tree, **how)
        named["ram"] = max(_CHAT_BYTES // 4, least_budget(lambda size: plan(ram=size)))
    folder = inflated_target(_CHAT_BYTES, progress, CHAT_PAIR / "target", "chat")
    return str(folder), replace(options, **named)


def check(request: Request) -> None:
    """Refuse what cannot run before a target is made for it. Raises `UserError`."""
    require(
        request.max_new_tokens > 1,
        "two speeds need -n of 2 or more",
        request.max_new_tokens,
        "try -n 96",
    )
    vocab_size = model_shape(open_checkpoint(PAIR / "target")).vocab_size
    request.ids(load_tokenizer(PAIR / "target"), vocab_size, _CONTEXT)


def compare(
    decoder: Decoder,
    prompt: str,
    sampling: Sampling,
    *,
    num_plain: int,
    num_tree: int,
    show: Callable[[str, Run], None],
) -> DemoResult:
    """Decode the prompt without and with the decoder's tree, and prove every token of both runs.

    With a rule that draws afresh no single token is right, and none is proved. `show` receives a
    heading and each run, and must exhaust it. Raises `UserError` where a token is not the original
    model's.
    """
    results: list[Generation] = []
    for heading, num_tokens, tree in (
        (
            f"without guesses, the first {plural(num_plain, 'token')}: one token per pass",
            num_plain,
            "none",
        ),
        (
            f"with guesses, at most {plural(num_tree, 'token')}: several tokens per pass",
            num_tree,
            None,
        ),
    ):
        run = decoder.run(prompt, sampling, max_new_tokens=num_tokens, tree=tree, raw=True)
        show(heading, run)
        results.append(run.result())
        if not results[-1].is_exact:
            raise UserError(
                f"`lenience` {results[-1].lenience:g} is not exact, so nothing can be proved: leave it out"
            )
    if not (sampling.is_greedy or find_rule(results[0].rule).repeats_draws):
        return DemoResult(results[0], results[1], 0, 0, None)
    prompt_ids = decoder.encode(prompt, raw=True)
    num_same = _require_same_text(*results) if results[0].is_invariant else None
    gaps = [
        gap
        for result in results
        for gap in draw_gaps(PAIR / "target", prompt_ids, result.token_ids, sampling)
    ]
    if max(gaps) > rounding(sampling):
        raise UserError(
            f"a token misses the original model's draw by {max(gaps):.3f}: please report this as a bug"
        )
    num_exact = sum(gap == 0 for gap in gaps)
    return DemoResult(results[0], results[1], num_exact, len(gaps) - num_exact, num_same)


def _require_same_text(plain: Generation, tree: Generation) -> int:
    """The number of tokens that both have. Raises `UserError` where one differs."""
    pairs = list(zip(plain.token_ids, tree.token_ids, strict=False))
    at = next((index for index, (one, other) in enumerate(pairs) if one != other), None)
    if at is not None:
        raise UserError(
            f"token {at} with a tree is not that without one: please report this as a bug"
        )
    return len(pairs)


def open_demo(
    target: Path, options: LoadOptions, console: Console, request: Request | None = None
) -> Decoder:
    """The inflated target with its packaged draft."""
    return open_decoder(target, PAIR / "draft", options, request, hooks=console.hooks)


def comparison_lines(found: DemoResult) -> str:
    """Both speeds side by side, and what was proved of both texts."""
    plain = found.plain.stats
    tree = found.tree.stats
    head = f"{'':>20} {'tokens/s':>9} {'a pass':>8} {'s/token':>8}"
    kind = "dynamic tree" if tree.is_tree_dynamic else "tree"
    rows = [
        _speed_row("without guesses", plain),
        _speed_row(f"{kind} {tree.tree_num_nodes}x{tree.tree_depth}", tree),
    ]
    # all came at once, those of the tree with the prompt's pass
    fast = "too few tokens to tell how fast: raise -n"
    if found.speedup:
        fast = f"{found.speedup:.1f} times as fast"
    return "\n".join([head, *rows, fast, proof_line(found)])


def proof_line(found: DemoResult) -> str:
    """What the comparison has shown, for somebody who has not heard of it."""
    num_proved = found.num_exact + found.num_near
    if not num_proved:
        return "this rule draws afresh: the tokens have the model's distribution, and no text is compared"
    return (
        f"proof: the model alone, held in memory as a whole, writes the same text: all "
        f"{plural(num_proved, 'token')} compared"
    )


def proof_details(found: DemoResult) -> str:
    """How exactly the tokens were compared."""
    if not found.num_exact + found.num_near:
        return ""
    lines = [
        f"{found.num_exact} tokens are the original model's own draw in float32, "
        f"{found.num_near} lie within bf16 rounding of it"
    ]
    if found.num_same is not None:
        lines.append(f"{found.num_same} tokens that both runs have are the same, bit for bit")
    return "\n".join(lines)


def _speed_row(label: str, stats: Stats) -> str:
    return f"{label:>20} {stats.tokens_per_s:>9.2f} {stats.tokens_per_sweep:>8.2f} {stats.tpot_s:>8.3f}"
