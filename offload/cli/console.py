"""What a person sees: bars while waiting, the plan as a picture, the closing figures. All of it goes to stderr."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from offload.calibration.kernel_comparison import Outcome, verdicts
from offload.cli.flags import as_flags
from offload.config import format_bytes
from offload.memory.plan import MemoryPlan, Tier
from offload.stats import Stats
from offload.threads.policy import Modes

if TYPE_CHECKING:  # they bring numpy along, and `offload --help` must not wait for it
    from offload.engine.decoder import Decoder
    from offload.planning.cost_model import Curve, Prediction
    from offload.planning.profile import Profile
    from offload.planning.tree_policy import TreeChoice

_CHOICES_SHOWN, _TREES_SHOWN, _RANKS_SHOWN = 2, 5, 6


class Console:
    """Bars of one run. Nothing is drawn when `is_quiet` or when stderr is not a terminal."""

    def __init__(self, *, is_quiet: bool) -> None:
        self._is_off = is_quiet or not sys.stderr.isatty()
        self._bar: tqdm | None = None
        self._is_quiet, self._label = is_quiet, ""

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    @property
    def hooks(self) -> dict[str, Any]:
        """What loading tells of its progress, and a decoder of its sweeps."""
        return {"on_bytes": self.bytes_landed, "on_layer": self.layer_done}

    def say(self, line: str) -> None:
        """A line for the user."""
        if not self._is_quiet:
            self.clear()
            print(as_flags(line), file=sys.stderr)

    def wait(self, label: str) -> None:
        """Something is under way of which nobody knows how much is left."""
        self._begin(label, None, bar_format="{desc} ...")

    def bytes_landed(self, done_bytes: int, total_bytes: int, label: str = "loading") -> None:
        """Progress of something that is measured in bytes."""
        self._advance(done_bytes, total_bytes, label, unit="B", unit_scale=True)

    def count(self, done: int, total: int, label: str) -> None:
        """Progress of something that is counted."""
        self._advance(done, total, label)

    def expect_prompt(self, plan: MemoryPlan, num_tokens: int) -> None:
        """The next calls of `layer_done` are the sweeps that take in so many tokens."""
        num_layers = len(plan.layer_bytes) * plan.num_prompt_sweeps(num_tokens)
        self._begin("reading the prompt", num_layers, unit="layer")

    def layer_done(self) -> None:
        """One more layer of the expected sweeps has run."""
        if self._bar is not None:
            self._bar.update()

    def clear(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _advance(self, done: int, total: int, label: str, **style: object) -> None:
        if self._bar is None or self._label != label:
            self._begin(label, total, **style)
        assert self._bar is not None, "one has just begun"
        self._bar.update(done - self._bar.n)
        if done >= total:
            self.clear()

    def _begin(self, label: str, total: int | None, **style: object) -> None:
        self.clear()
        self._bar = tqdm(total=total, desc=label, leave=False, disable=self._is_off, file=sys.stderr, **style)
        self._label = label


def plan_line(plan: MemoryPlan, modes: Modes) -> str:
    """The plan in one line."""
    num_threads, num_drafting = modes.sweep.num_threads, modes.draft.num_threads
    threads = f"{num_threads} compute thread{'s' if num_threads > 1 else ''}"
    if num_drafting != num_threads:
        threads += f", {num_drafting} for drafting"
    if not plan.num_slots:
        return f"all {len(plan.layer_bytes)} layers fit into memory, nothing is streamed; {threads}"
    passing = f"pass through {plan.num_slots} slots: {format_bytes(plan.streamed_bytes)} a sweep"
    first = f"{plan.num_resident} of {len(plan.layer_bytes)} layers stay"
    if plan.gpu_bytes is None:
        return f"{first} in memory, the others {passing}; {threads}"
    num_host, num_disk = plan.num_layers_in(Tier.HOST), plan.num_layers_in(Tier.DISK)
    return f"{first} on the GPU, {num_host} in pinned memory and {num_disk} on disk {passing}"


def opening_lines(decoder: "Decoder", choice: "TreeChoice | None") -> str:
    """What a run begins with: what is not as fast as it could be, what lies where, which kernels, which tree."""
    kernels = [kernel_line(decoder.comparisons)] if decoder.comparisons else []
    tree = [choice_lines(choice)] if choice else []
    return "\n".join([*decoder.notes, plan_line(decoder.plan, decoder.threads.start), *kernels, *tree])


def kernel_line(outcomes: Sequence[Outcome]) -> str:
    """Which kernels this GPU runs, each beside what runs without it."""
    found = verdicts(outcomes)
    won, lost = ([one for one in outcomes if found[one.kernel].beats_rival is is_won] for is_won in (True, False))
    used, others = (", ".join(map(_comparison, some)) or "none" for some in (won, lost))
    return f"kernels, ms against without: {used}; left out: {others}"


def _comparison(outcome: Outcome) -> str:
    if outcome.kernel_s is None or outcome.rival_s is None:
        return f"{outcome.kernel} ({outcome.reason})"
    return f"{outcome.kernel} {outcome.kernel_s * 1e3:.3f} : {outcome.rival_s * 1e3:.3f}"


def choice_lines(choice: "TreeChoice") -> str:
    """What tree is used and why; where it was chosen, beside the next best."""
    first = f"{_tree_words(choice.shape.num_nodes, choice.shape.depth, choice.is_dynamic)}: {choice.why}"
    return "\n".join([first, *candidate_rows(choice.candidates[:_CHOICES_SHOWN])])


def _tree_words(num_nodes: int, depth: int, is_dynamic: bool) -> str:
    return f"{'dynamic tree of at most' if is_dynamic else 'tree of'} {num_nodes} nodes, {depth} deep"


def candidate_rows(candidates: Sequence["Prediction"]) -> list[str]:
    """What was predicted for the best few trees."""
    return [
        f"  {c.label:>14}: {c.tokens_per_sweep:5.2f} tokens in {c.step.total_s:.3f} s, "
        f"{c.s_per_token:.4f} s/token; the {c.step.limit} is the slower side"
        for c in candidates
    ]


def profile_lines(tuned: "Profile", candidates: Sequence["Prediction"]) -> str:
    """What a tune has found: acceptance by rank, the curves, and the trees that follow."""
    costs, settings = tuned.costs, tuned.identity
    pairs = list(zip(tuned.acceptance, tuned.standard_error, strict=True))[:_RANKS_SHOWN]
    ranks = "  ".join(f"{p:.3f}±{error:.3f}" for p, error in pairs)
    basis = "over the given text" if tuned.is_teacher_forced else "that the target wrote"
    traced = f"the traces, smoothed by {tuned.smoothing:g}" if tuned.follows_traces else "the product form"
    sampling = f"temperature {settings.temperature:g}, top-p {settings.top_p:g}, top-k {settings.top_k}"
    return "\n".join(
        [
            f"rule {settings.rule}, {sampling}",
            f"acceptance by rank, {tuned.num_tokens} tokens {basis}:",
            f"  {ranks}  all {len(tuned.acceptance)}: {sum(tuned.acceptance):.3f}; trees follow {traced}",
            _curve_line("sweep, computing alone (s)", costs.compute_s),
            _curve_line("one draft step (s)", costs.draft_step_s),
            f"link {costs.link_bytes_per_s / 1e9:.2f} GB/s; at most {tuned.num_threads} compute threads; "
            f"overlap penalty between link and computing {costs.overlap_penalty:g}",
            "trees that --tree auto would choose from here:",
            *candidate_rows(candidates[:_TREES_SHOWN]),
        ]
    )


def _curve_line(label: str, curve: "Curve") -> str:
    points = "  ".join(f"{size}: {second:.4g}" for size, second in zip(curve.sizes, curve.seconds, strict=True))
    return f"{label} by rows: {points}"


def closing_lines(stats: Stats, ram_bytes: int) -> str:
    """Speed, what one sweep yields, the link and memory."""
    if stats.num_new_tokens == 0:
        return "no tokens generated"
    first = f"{stats.num_new_tokens} tokens, the first after {stats.ttft_s:.2f} s"
    peak, budget = format_bytes(stats.peak_rss_bytes), format_bytes(ram_bytes)
    memory = f"peak memory {peak} with the program's own, budget {budget}"
    if stats.peak_device_bytes:
        memory += f", {format_bytes(stats.peak_device_bytes)} on the GPU"
    if not stats.num_sweeps or not stats.tpot_s:
        return f"{first}\n{memory}"
    tree = "no tree"
    if stats.tree_depth:
        tree = _tree_words(stats.tree_num_nodes, stats.tree_depth, stats.is_tree_dynamic)
    stalled = stats.stall_s / stats.sweep_s if stats.sweep_s else 0
    return (
        f"{first}; then {stats.tokens_per_s:.2f} tokens/s, {stats.tokens_per_sweep:.2f} tokens per sweep "
        f"({stats.num_sweeps} sweeps, {tree})\n"
        f"link {stats.link_bytes_per_s / 1e9:.2f} GB/s, {stalled:.0%} of the sweep spent waiting for it; {memory}"
    )


def turn_line(stats: Stats, finish_reason: str) -> str:
    """One answer of a conversation: how long it took, and how much of what was said before had to be read again."""
    how = {"interrupted": ", stopped", "length": ", cut off"}.get(finish_reason, "")
    speed = f", {stats.tokens_per_s:.2f} tokens/s, {stats.tokens_per_sweep:.2f} a sweep" if stats.tpot_s else ""
    read = f"{stats.num_prompt_tokens - stats.num_kept_tokens} of {stats.num_prompt_tokens} tokens read"
    return f"({stats.num_new_tokens} tokens{how}, the first after {stats.ttft_s:.1f} s{speed}; {read})"


def error_line(message: str) -> str:
    """One line; what it quotes from a stranger's file must not steer the terminal."""
    line = " ".join(as_flags(message).split())
    return "offload: " + "".join(char if char.isprintable() else "?" for char in line)


def _speed_row(label: str, stats: Stats) -> str:
    link_gb_per_s = stats.link_bytes_per_s / 1e9
    speed = f"{stats.tokens_per_s:>9.2f} {stats.tokens_per_sweep:>13.2f} {stats.tpot_s:>8.3f}"
    return f"{label:>22} {speed} {link_gb_per_s:>10.2f}"


def comparison_lines(plain: Stats, tree: Stats, num_exact: int, num_near: int) -> str:
    """Both speeds side by side."""
    near = f", {num_near} lie within bf16 rounding of it" if num_near else ""
    head = f"{'':>22} {'tokens/s':>9} {'tokens/sweep':>13} {'s/token':>8} {'link GB/s':>10}"
    kind = "dynamic tree" if tree.is_tree_dynamic else "tree"
    rows = [
        _speed_row("one token per sweep", plain),
        _speed_row(f"{kind} {tree.tree_num_nodes}x{tree.tree_depth}", tree),
    ]
    proof = f"{num_exact} of {num_exact + num_near} tokens are the original model's own draw in float32{near}"
    if not num_exact + num_near:
        proof = "this rule draws afresh, so only the distribution of the tokens is the original model's"
    return "\n".join([head, *rows, f"{tree.tokens_per_s / plain.tokens_per_s:.1f} times as fast; {proof}"])
