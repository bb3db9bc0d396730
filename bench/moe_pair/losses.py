"""The losses by which target and draft learn.

A target that is trained this shortly would route by token alone. Real mixtures prefer some experts
within a text (`routing` measures it), so routers are to tell texts apart: the entropy of a text's
mean choice lies below that of all texts' by as much as `_TEXT_NATS`, and what goes beyond is not
rewarded.
"""

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM, Qwen3MoeForCausalLM

_TEXT_TOKENS = 128
_TEXT_NATS = 0.8
_TEXT_WEIGHT = 1.0
_LABEL_WEIGHT = 0.5


def target_loss(model: Qwen3MoeForCausalLM, tokens_BS: Tensor) -> Tensor:
    """Return next-token loss in nats, and what is added for the routers.

    Texts have a multiple of `_TEXT_TOKENS`.
    """
    with torch.autocast("cpu", torch.bfloat16):
        out = model(input_ids=tokens_BS, use_cache=False, output_router_logits=True)
    logits = out.logits[:, :-1].flatten(0, 1).float()
    routers = [
        logits_NE.float().unflatten(0, (-1, _TEXT_TOKENS)) for logits_NE in out.router_logits
    ]
    missing = [(_TEXT_NATS - _told_of_text(logits_TSE)).clamp(min=0) for logits_TSE in routers]
    return torch.stack(
        [
            functional.cross_entropy(logits, tokens_BS[:, 1:].flatten()),
            _TEXT_WEIGHT * torch.stack(missing).mean(),
        ]
    )


def _told_of_text(logits_TSE: Tensor) -> Tensor:
    """Return the information between text and expert in nats.

    How far a text's mean choice differs from that of all.
    """
    chosen_TE = logits_TSE.softmax(-1).mean(1)
    return _entropy(chosen_TE.mean(0)) - _entropy(chosen_TE).mean()


def _entropy(share: Tensor) -> Tensor:
    return -(share * (share + 1e-9).log()).sum(-1)


def draft_loss(draft: LlamaForCausalLM, target: Qwen3MoeForCausalLM, tokens_BS: Tensor) -> Tensor:
    """Return KL from the target's distribution, plus its argmax as a label.

    T > 0 accepts by the first, T = 0 by the second.
    """
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            wanted_NV = target(input_ids=tokens_BS, use_cache=False).logits.flatten(0, 1).float()
        got_NV = (
            draft(input_ids=tokens_BS, use_cache=False).logits.flatten(0, 1).float().log_softmax(-1)
        )
    law_NV = wanted_NV.log_softmax(-1)
    kl = functional.kl_div(got_NV, law_NV, log_target=True, reduction="batchmean")
    return kl + _LABEL_WEIGHT * functional.nll_loss(got_NV, wanted_NV.argmax(-1))
