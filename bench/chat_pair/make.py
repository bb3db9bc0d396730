"""Tune the packaged pair on questions and answers, so that a chat opens without a model of one's
own.

`python -m offload.bench.chat_pair.make OUT` writes `OUT/target` and `OUT/draft`, which the package
carries as `offload/chat_pair`. Both begin as the packaged pair and keep some of its text, so they
also go on writing code. Questions come from a page of dialogues beside this file and from
docstrings of the standard library: an answer is text that a person wrote. Invariant: a run that is
cut goes on where it was; the same Python gives the same dialogues in the same order.
"""

import ast
import inspect
import json
import random
import re
import sys
import sysconfig
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM

from offload.bench.harness.prompts import read_source
from offload.bench.harness.tables import Screen
from offload.bench.pairs.training import (
    Course,
    draft_loss,
    library_ids,
    next_token_loss,
    packaged,
    teach,
    windows,
)
from offload.checkpoint.packaged import PAIR

# of one question and what was said before it; `offload chat` and the page render it
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] }}"
    "{% elif message['role'] == 'system' %}{{ '<|endoftext|>Note: ' + message['content'] }}"
    "{% else %}{{ '<|endoftext|>Q: ' + message['content'] + '\\nA:\\n' }}{% endif %}"
    "{% endfor %}"
)
_END = "<|endoftext|>"
_STEP_TOKENS = 1024
_CODE_TOKENS = 256
_WINDOW = 128
_TARGET = Course(240, 2e-3)
_DRAFT = Course(150, 2e-3)
_NUM_TELLINGS = 3
_NUM_ASKED = 12
_MODULES = (
    "bisect builtins copy functools glob heapq itertools json math os.path random re shutil"
    " statistics string textwrap time"
)
_WHAT = ("What does {} do?", "What is {}?", "Explain {}", "Tell me what {} does")
_HOW = ("How do I {}?", "How can I {} in Python?")
_WRITE = ("Write a function to {}.", "Write code to {}.")
_VERBS = (
    "add apply append assign build call change check close compute convert copy count create decode"
    " delete divide encode execute extend find format generate get insert iterate join load make"
    " merge move open parse pop print push put query quote raise read register remove rename replace"
    " reset return run select send serialize set shuffle sort split stop test truncate update wrap"
    " write yield"
)
_SENTENCE_CHARS = range(12, 130)
_CODE_CHARS = range(60, 420)
_SIGNATURE_CHARS = 40


class Dialogue(NamedTuple):
    questions: tuple[str, ...]
    answer: str


def written_dialogues() -> list[Dialogue]:
    """Return the dialogues of the page: a line of questions with bars between, then the answer."""
    text = Path(__file__).with_name("dialogues.txt").read_text(encoding="utf-8")
    dialogues: list[Dialogue] = []
    for asked, answer in re.findall(r"^(.+ \| .+)\n((?:(?!.+ \| ).*\n)+)", text, re.MULTILINE):
        questions = [question.strip() for question in asked.split(" | ")]
        bare = [question.rstrip("?.").lower() for question in questions]
        dialogues.append(Dialogue(tuple(dict.fromkeys([*questions, *bare])), answer.strip()))
    return dialogues


def library_dialogues() -> list[Dialogue]:
    """Return the docstrings of functions of the standard library that people ask for."""
    by_question = dict[str, Dialogue]()
    for module_name in _MODULES.split():
        # functions say that they are of the module that is written in C
        home = {"os.path": "posixpath"}.get(module_name, f"_{module_name}")
        module = import_module(module_name)
        for name in sorted(vars(module)):
            value = getattr(module, name)
            is_own = getattr(value, "__module__", None) in (module_name, None, home)
            if name.startswith("_") or not callable(value) or not is_own:
                continue
            full = name if module_name == "builtins" else f"{module_name}.{name}"
            for dialogue in _of_callable(full, value):
                by_question.setdefault(dialogue.questions[0], dialogue)
    return list(by_question.values())


def _of_callable(name: str, value: Any) -> Iterator[Dialogue]:
    sentence = _first_sentence(inspect.getdoc(value) or "")
    if len(sentence) not in _SENTENCE_CHARS or (isinstance(value, type) and "rror" in name):
        return
    try:
        signature = re.sub(r" -> .*|, /|\s*<[^>]*>", "", str(inspect.signature(value)))
        signature = signature if len(signature) <= _SIGNATURE_CHARS else "(...)"
    except (ValueError, TypeError):
        signature = "()"
    called = f"`{name}{signature}`"
    asked = (*(form.format(name) for form in _WHAT), _WHAT[0].format(f"`{name}`"))
    yield Dialogue(asked, f"{called}: {sentence}")
    wish = _as_wish(sentence)
    if wish:
        yield Dialogue(tuple(form.format(wish) for form in _HOW), f"Use {called}.")


def _first_sentence(doc: str) -> str:
    paragraph = " ".join(doc.split("\n\n")[0].split())
    sentence = re.split(r"(?<=[a-z)'])\.(?:\s|$)", paragraph)[0].rstrip(".")
    is_plain = sentence.isascii() and ">>>" not in sentence and "->" not in sentence
    return f"{sentence}." if is_plain and sentence[:1].isupper() else ""


def _as_wish(sentence: str) -> str:
    """Return the wish of a person who needs it; nothing where it is no order."""
    first, _, rest = sentence.rstrip(".").partition(" ")
    word = first.lower()
    if word not in _VERBS.split() or "," in rest or len(rest) > 70:
        return ""
    return f"{'get' if word in ('return', 'yield') else word} {rest}"


def code_dialogues() -> list[Dialogue]:
    """Return short functions of the standard library with what their docstrings ask for."""
    by_wish = dict[str, Dialogue]()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        source = read_source(path)
        for node in ast.parse(source).body:
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            wish = _as_wish(_first_sentence(ast.get_docstring(node) or ""))
            code = ast.get_source_segment(source, node) or ""
            if wish and len(code) in _CODE_CHARS and code.isascii():
                asked = tuple(form.format(wish) for form in _WRITE)
                by_wish.setdefault(wish, Dialogue(asked, f"```python\n{code}\n```"))
    return list(by_wish.values())


# how often each kind is told in one telling of everything
_TOLD = ((written_dialogues, 10), (code_dialogues, 1), (library_dialogues, 1))


def make_chat_pair(out: Path, screen: Screen) -> None:
    out.mkdir(parents=True, exist_ok=True)
    screen.wait("reading the standard library")
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target", trust_remote_code=False)
    # everything that is told, several times in another order, as the chat template has it
    dialogues = [dialogue for kind, times in _TOLD for dialogue in kind() * times]
    turns = [
        f"{_END}Q: {question}\nA:\n{it.answer}" for it in dialogues for question in it.questions
    ]
    texts = ["".join(random.Random(n).sample(turns, len(turns))) for n in range(_NUM_TELLINGS)]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    corpus = torch.tensor([token for text in ids for token in text])
    library = library_ids(held_out=False)

    def batch(step: int) -> Tensor:
        """Return (windows, tokens) of answers, and some of the code that was learned."""
        answers = windows(corpus, _STEP_TOKENS - _CODE_TOKENS, _WINDOW, step)
        return torch.cat([answers, windows(library, _CODE_TOKENS, _WINDOW, step)])

    target = packaged("target")
    teach(target, next_token_loss, batch, _TARGET, out / "target", screen)
    loss = partial(draft_loss, target)
    teach(packaged("draft"), loss, batch, _DRAFT, out / "draft", screen)
    # what it half knows comes out better near the likeliest token
    files = {
        "generation_config.json": {"do_sample": True, "temperature": 0.3},
        "tokenizer_config.json": {"chat_template": TEMPLATE},
    }
    for file, settings in files.items():
        config = json.loads((PAIR / "target" / file).read_text()) | settings
        for name in ("target", "draft"):
            text = json.dumps(config, indent=2, sort_keys=True) + "\n"
            (out / name / file).write_text(text)
    shares = {
        kind.__name__.removesuffix("_dialogues"): share_learned(target, kind()) for kind, _ in _TOLD
    }
    screen.clear()
    print(json.dumps({"share_of_answers_known_by_heart": shares}))


def share_learned(model: LlamaForCausalLM, dialogues: list[Dialogue]) -> float:
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target", trust_remote_code=False)
    asked = dialogues[:: max(1, len(dialogues) // _NUM_ASKED)]
    num_right = 0
    for dialogue in asked:
        ids = torch.tensor([tokenizer(f"{_END}Q: {dialogue.questions[0]}\nA:\n")["input_ids"]])
        options = {
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": 160,
            "do_sample": False,
        }
        with torch.no_grad():
            out = model.generate(ids, **options)
        said = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        num_right += said.strip() == dialogue.answer
    return num_right / len(asked)


if __name__ == "__main__":
    with Screen(is_quiet=False) as shown:
        make_chat_pair(Path(sys.argv[1]), shown)
