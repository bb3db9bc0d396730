"""Tune the packaged pair on questions and answers, so that a chat opens without a model of one's own.

`python -m offload.bench.chat_pair.make OUT` writes `OUT/target` and `OUT/draft`, which the package
carries as `offload/chat_pair`. Both begin as the packaged pair of code and keep some of its text,
so the pair also goes on writing code. Invariant: a run that is cut goes on where it was.
"""

import json
import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedModel

from offload.bench.chat_pair.questions import (
    Dialogue,
    code_dialogues,
    dialogue_text,
    library_dialogues,
    written_dialogues,
)
from offload.bench.harness.screen import Screen
from offload.bench.moe_pair.corpus import library_ids, windows
from offload.bench.moe_pair.losses import next_token_loss
from offload.bench.moe_pair.training import (
    Course,
    distillation_loss,
    packaged,
    train,
    write_rounded,
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
# how often each kind is told in one telling of everything
_TOLD = ((written_dialogues, 10), (code_dialogues, 1), (library_dialogues, 1))
_NUM_TELLINGS = 3


def make_chat_pair(out: Path, screen: Screen) -> None:
    """Tune both models, or go on; write them and what they have learned."""
    out.mkdir(parents=True, exist_ok=True)
    screen.wait("reading the standard library")
    batch = partial(_batch, _told_ids(), library_ids(held_out=False))
    target = packaged("target")
    train(
        target,
        lambda step: next_token_loss(target, batch(step)),
        _TARGET,
        out / "target.state",
        partial(screen.count, label="tuning the target"),
    )
    _write(target, out / "target")  # rounds it, so that the draft learns from what is stored
    draft = packaged("draft")
    train(
        draft,
        lambda step: _draft_loss(draft, target, batch(step)),
        _DRAFT,
        out / "draft.state",
        partial(screen.count, label="tuning its draft"),
    )
    _write(draft, out / "draft")
    shares = {
        kind.__name__.removesuffix("_dialogues"): share_learned(target, kind()) for kind, _ in _TOLD
    }
    screen.clear()
    print(json.dumps({"share_of_answers_known_by_heart": shares}))


def share_learned(model: LlamaForCausalLM, dialogues: list[Dialogue], num_asked: int = 12) -> float:
    """Return the share of first questions whose greedy answer is the one that was learned."""
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target", trust_remote_code=False)
    asked = dialogues[:: max(1, len(dialogues) // num_asked)]
    num_right = 0
    for one in asked:
        ids = torch.tensor([tokenizer(f"{_END}Q: {one.questions[0]}\nA:\n")["input_ids"]])
        with torch.no_grad():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=160, do_sample=False
            )
        said = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        num_right += said.strip() == one.answer
    return num_right / len(asked)


def _told_ids() -> Tensor:
    """Return ids of everything that is told, several times in another order."""
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target", trust_remote_code=False)
    kinds = [(dialogues(), times) for dialogues, times in _TOLD]
    told = [one for dialogues, times in kinds for one in dialogues * times]
    texts = [dialogue_text(told, seed, _END) for seed in range(_NUM_TELLINGS)]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return torch.tensor([token for text in ids for token in text])


def _batch(told: Tensor, code: Tensor, step: int) -> Tensor:
    """Return (windows, tokens) of questions and answers, and some of the code that was learned."""
    answers = windows(told, _STEP_TOKENS - _CODE_TOKENS, _WINDOW, step)
    return torch.cat([answers, windows(code, _CODE_TOKENS, _WINDOW, step)])


def _draft_loss(draft: LlamaForCausalLM, target: LlamaForCausalLM, tokens_BS: Tensor) -> Tensor:
    with torch.no_grad():
        wanted_NV = target(input_ids=tokens_BS, use_cache=False).logits.flatten(0, 1)
    got_NV = draft(input_ids=tokens_BS, use_cache=False).logits.flatten(0, 1)
    return distillation_loss(got_NV, wanted_NV)


def _write(model: PreTrainedModel, folder: Path) -> None:
    """Round the model to bf16 and store it with the tokenizer and the chat template."""
    write_rounded(model, folder, ["tokenizer.json"])
    # what it half knows comes out better near the likeliest token
    more = {
        "generation_config.json": {"do_sample": True, "temperature": 0.3},
        "tokenizer_config.json": {"chat_template": TEMPLATE},
    }
    for name, settings in more.items():
        config = json.loads((PAIR / "target" / name).read_text()) | settings
        (folder / name).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    with Screen(is_quiet=False) as shown:
        make_chat_pair(Path(sys.argv[1]), shown)
