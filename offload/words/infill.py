"""What stands around a gap that a model fills: the tokens of families that are trained for it.

No template tells of them, so they are found by their names in the vocabulary, all three or none.
"""

from collections.abc import Container
from typing import NamedTuple


class InfillForm(NamedTuple):
    """The tokens of one form, in the order in which a prompt has them."""

    before: str  # of what stands before the gap
    behind: str  # of what stands behind it
    gap: str = ""  # behind both; empty where what stands before the gap comes last


FORMS = (
    InfillForm("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    InfillForm("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    InfillForm("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    InfillForm("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 -- DeepSeek
    InfillForm("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    InfillForm("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),  # Seed
    InfillForm("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    InfillForm("[PREFIX]", "[SUFFIX]"),  # Codestral
)


def infill_form(vocabulary: Container[str]) -> InfillForm | None:
    """Return the form all of whose tokens are in a vocabulary; None if there is none."""
    fitting = (form for form in FORMS if all(not mark or mark in vocabulary for mark in form))
    return next(fitting, None)


def infilled(form: InfillForm, before: str, behind: str) -> str:
    """Return the prompt for the text between two others."""
    first = f"{form.before}{before}"
    second = f"{form.behind}{behind}"
    return f"{first}{second}{form.gap}" if form.gap else f"{second}{first}"
