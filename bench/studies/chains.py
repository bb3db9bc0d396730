"""What gamma guesses yield beside Leviathan et al.'s formulas (2211.17192, tables 2 and 4).

Tokens per pass and alpha do not depend on streaming, so they are measured on the packaged pair as
it is, by the paper's own rule, which is `specinfer` on a chain. What a pass takes is measured with
the target inflated and streamed, lengths in turns. c is a draft step over a pass without guesses;
the expected gain is Theorem 3.8 for that alpha and c.
"""

from collections import deque
from collections.abc import Sequence
from itertools import product
from statistics import mean, median
from time import perf_counter
from typing import NamedTuple

from offload.bench.harness.command import Bench, command, say_link, say_table
from offload.bench.harness.gate import Written
from offload.bench.harness.prompts import Prompt, encoded
from offload.bench.harness.record import Row
from offload.bench.harness.setting import Setting, find_setting, resident_pair
from offload.planning.chains import tokens_per_run, wall_clock_gain
from offload.stats import RunningMean
from offload.trees.topology import chain
from offload.units import Sampling, parse_size

RULE = "specinfer"
CONTEXT = 256
PROMPT_TOKENS = 64
LEAST_RAM_BYTES = 260_000_000


class Effort(NamedTuple):
    """How much is measured."""

    num_prompts: int
    # tokens of every run
    num_tokens: int
    lengths: tuple[int, ...]
    num_steps: int  # streamed, of every length and prompt
    temperatures: tuple[float, ...] = (0.0, 1.0)


FULL = Effort(8, 160, (1, 2, 3, 5, 7, 10, 14), 6)
QUICK = Effort(3, 48, (1, 3, 7), 3)


class Yield(NamedTuple):
    """What chains of one length have yielded."""

    temperature: float
    gamma: int
    alpha: RunningMean
    tokens_per_pass: float


class Times(NamedTuple):
    """Medians of streamed steps with one length."""

    step_s: float
    draft_s: float


def measured_yields(
    effort: Effort, prompts: Sequence[Prompt], written: list[Written]
) -> list[Yield]:
    """Return yields by temperature and length, over all prompts."""
    found = []
    with resident_pair(None).open(
        f"chain:{max(effort.lengths)}", rule=RULE, context=CONTEXT
    ) as decoder:
        texts = [encoded(decoder, prompt, PROMPT_TOKENS) for prompt in prompts]
        for temperature, gamma in product(effort.temperatures, effort.lengths):
            alpha = RunningMean()
            accepted = list[int]()
            for seed, ids in enumerate(texts):
                sampling = Sampling(temperature=temperature, seed=seed)
                run = decoder.run(
                    ids, sampling, max_new_tokens=effort.num_tokens, tree=f"chain:{gamma}"
                )
                deque(run, maxlen=0)
                result = run.result()
                alpha += result.stats.first_guess
                # the end of the text cuts the last
                accepted += result.stats.accepted_per_sweep[:-1]
                written.append(Written(ids, result.token_ids, sampling, RULE))
            found.append(Yield(temperature, gamma, alpha, mean(accepted)))
    return found


def measured_times(
    setting: Setting, effort: Effort, prompt: Prompt, written: list[Written]
) -> dict[int, Times]:
    """Return times by length, 0 among them.

    Lengths take turns, so that other load of this machine is shared among them.
    """
    samples: dict[int, list[Times]] = {gamma: [] for gamma in (0, *effort.lengths)}
    with setting.open(f"chain:{max(effort.lengths)}", context=CONTEXT) as decoder:
        ids = encoded(decoder, prompt, PROMPT_TOKENS)
        text = decoder.begin(ids, Sampling())
        decoder.step(text)
        for gamma in [*samples] * effort.num_steps:
            stats = text.set_shape(chain(gamma))
            started = perf_counter()
            decoder.step(text)
            samples[gamma].append(Times(perf_counter() - started, stats.draft_s))
        written.append(Written(ids, text.new_ids, Sampling(), decoder.rule.name))
    return {
        gamma: Times(*(median(one) for one in zip(*seen, strict=True)))
        for gamma, seen in samples.items()
    }


def rows_of(yields: Sequence[Yield], times: dict[int, Times]) -> list[Row]:
    """Return each yield beside what the formulas make of its alpha.

    All lengths of a temperature estimate alpha together.
    """
    plain = times[0]
    longest = max(times)
    rows = list[Row]()
    cost = (times[longest].draft_s / longest) / plain.step_s
    for one in yields:
        alpha = sum(
            (other.alpha for other in yields if other.temperature == one.temperature), RunningMean()
        )
        assert alpha.mean is not None, "guesses were verified"
        predicted = tokens_per_run(alpha.mean, one.gamma)
        step_s = times[one.gamma].step_s
        rows.append(
            {
                **{
                    "temperature": one.temperature,
                    "gamma": one.gamma,
                    "c": cost,
                    "alpha": alpha.as_dict(),
                },
                **{
                    "predicted_tokens_per_pass": predicted,
                    "tokens_per_pass": one.tokens_per_pass,
                    "step_s": step_s,
                },
                "predicted_gain": wall_clock_gain(alpha.mean, one.gamma, cost),
                "gain": one.tokens_per_pass * plain.step_s / step_s,
            }
        )
    return rows


@command("chains", "size quick")
def main(bench: Bench) -> None:
    """Chains beside the formulas of speculative decoding; eight minutes on two cores, under one
    with --quick.
    """
    size = bench.given("size")
    effort = QUICK if bench.quick else FULL
    size = "500MB" if bench.quick and size == "2GB" else size
    ram = max(LEAST_RAM_BYTES, parse_size(size, "--size") // 4)
    setting = find_setting(None, None, size, str(ram), bench.screen)
    written = list[Written]()
    ceiling, (prompts, names) = say_link(setting), bench.prompts(effort.num_prompts)
    yields = measured_yields(effort, prompts, written)
    times = measured_times(setting, effort, prompts[0], written)
    proof = bench.prove(setting, written)
    rows = [bench.row(row) for row in rows_of(yields, times)]
    say_table(
        ["T, gamma", "alpha", "+-", "tokens/pass", "expected", "gain", "expected"],
        map(_cells, rows),
    )
    settings = {**setting.as_dict(), "prompts": names, "rule": RULE}
    bench.finish(rows, settings=settings, ceiling={"bytes_per_s": ceiling}, proof=proof)


def _cells(row: Row) -> list[str]:
    alpha = row["alpha"]
    error = alpha["standard_error"] or float("nan")
    figures = ("tokens_per_pass", "predicted_tokens_per_pass", "gain", "predicted_gain")
    known = [f"{alpha['mean']:.3f}", f"{error:.3f}", *(f"{row[name]:.2f}" for name in figures)]
    return [f"{row['temperature']:g}, {row['gamma']}", *known]
