"""The command `tune`."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from offload.cli import flags
from offload.cli.app import app
from offload.cli.console import Console
from offload.cli.libraries import libraries
from offload.cli.run_lines import candidate_rows
from offload.cli.terminal import fitted
from offload.options import ModelChoice, ModelOptions, OutputOptions, TuneOptions
from offload.sampling_options import Sampling

if TYPE_CHECKING:
    from offload.planning.acceptance import DynamicYield
    from offload.planning.cost_model import Curve, Prediction
    from offload.planning.profile import Profile

_TREES_SHOWN = 5
_RANKS_SHOWN = 6


@flags.command(
    app,
    epilog="""Examples:

    offload tune -m Llama-3.1-70B -d Llama-3.2-1B --text book.txt

    offload tune -m big -d small --text a.py --text b.py --temp 0.6 --top-p 0.9""",
)
def tune(
    models: ModelChoice,
    model_options: ModelOptions,
    sampling: Sampling,
    trace: TuneOptions,
    output: OutputOptions,
) -> None:
    """Measure a pair of models on this machine, so that --tree auto chooses by what is true here."""
    from offload.engine.precheck import check_setup
    from offload.planning.load_options import LoadOptions
    from offload.planning.profile import tuning_text

    for path in trace.text:
        tuning_text(path)
    model, draft = models.names()
    assert draft is not None, "its flag is required here"
    named = {"model": model, "draft": draft, "tree": model_options.tree or "auto"}
    options = LoadOptions.from_options(model_options, **named)
    # a tune sets its own tree
    check_setup(options, needs_context=False)
    with Console(output, *model_options.budgets) as console, libraries(console):
        from offload.planning.profile import format_json
        from offload.reports.tune import tune as measure

        tuned = measure(
            options,
            trace.text,
            sampling,
            num_tokens=trace.tokens,
            hooks=console.hooks,
        )
    table = f"{profile_lines(tuned.profile, tuned.choice.candidates)}\nsaved in {tuned.path}"
    print(format_json(tuned.profile.as_dict()) if output.as_json else fitted(table, sys.stdout))


def profile_lines(tuned: "Profile", candidates: Sequence["Prediction"]) -> str:
    """Return the results of a tune: acceptance by rank, the curves, and the resulting trees."""
    costs = tuned.costs
    identity = tuned.identity
    pairs = list(zip(tuned.acceptance, tuned.standard_error, strict=True))[:_RANKS_SHOWN]
    ranks = "  ".join(f"{p:.3f}±{error:.3f}" for p, error in pairs)
    sampling = (
        f"temperature {identity.temperature:g}, top-p {identity.top_p:g}, top-k {identity.top_k}"
    )
    return "\n".join(
        [
            f"rule {identity.rule}, {sampling}",
            f"acceptance by rank, {tuned.num_tokens} tokens that the target wrote:",
            f"  {ranks}  all {len(tuned.acceptance)}: {sum(tuned.acceptance):.3f}",
            *map(_yield_line, tuned.dynamic_yields),
            _curve_line("pass, computing alone (s)", costs.compute_s),
            _curve_line("one draft step (s)", costs.draft_step_s),
            f"link {costs.link_bytes_per_s / 1e9:.2f} GB/s; at most {tuned.num_threads} compute threads",
            "trees that --tree auto would choose from here:",
            *candidate_rows(candidates[:_TREES_SHOWN]),
        ]
    )


def _yield_line(counted: "DynamicYield") -> str:
    tree = f"dynamic:{counted.num_nodes}x{counted.depth}"
    return f"{tree}: {counted.tokens_per_sweep:.2f} tokens per pass, in {counted.num_sweeps} passes"


def _curve_line(label: str, curve: "Curve") -> str:
    points = zip(curve.sizes, curve.seconds, strict=True)
    return f"{label} by rows: {'  '.join(f'{size}: {second:.4g}' for size, second in points)}"
