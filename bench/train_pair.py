"""Train the demo pair: a small Llama target and a smaller draft distilled from it, on the standard library's own
source.

Why it exists: acceptance is only realistic when draft and target were trained, and the demo and the benches must run
where no model hub can be reached. The corpus is what every Python installation carries; the result ships as
`offload/demo_pair`. Invariant: files whose hash falls into the held-out share are never seen in training, so benches
may prompt with them.

    python -m offload.bench.train_pair --out offload/demo_pair        about an hour on two cores
    python -m offload.bench.train_pair --out offload/demo_pair --start offload/demo_pair --draft-steps 700
"""

import hashlib
import math
import random
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
HELD_OUT_PERCENT = 3
TOKENS_PER_STEP = 8192
Loss = Callable[[Tensor], Tensor]


def corpus_files(*, held_out: bool) -> list[Path]:
    """The standard library's .py files of this interpreter, split by a hash of the relative path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.rglob("*.py") if not {"site-packages", "lib2to3", "idlelib"} & set(p.parts))
    return [p for p in files if _is_held_out(p.relative_to(root)) == held_out]


def _is_held_out(relative: Path) -> bool:
    return hashlib.sha256(str(relative).encode()).digest()[0] * 100 < HELD_OUT_PERCENT * 256


def read_source(path: Path) -> str:
    """A few test files are deliberately not UTF-8: what does not decode is dropped."""
    return path.read_text(encoding="utf-8", errors="ignore")


def train_tokenizer(files: list[Path]) -> PreTrainedTokenizerFast:
    """Byte-level BPE of `VOCAB_SIZE` entries; id 0 separates documents."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(map(read_source, files), vocab_size=VOCAB_SIZE, special_tokens=[END_OF_TEXT])
    ends = {"eos_token": END_OF_TEXT, "bos_token": END_OF_TEXT, "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, **ends)


def encode_corpus(tokenizer: PreTrainedTokenizerFast, files: list[Path]) -> Tensor:
    """All files as one run of token ids, in random order, separated by the end-of-text token."""
    files = random.Random(0).sample(files, len(files))
    ids = tokenizer([read_source(p) for p in files], add_special_tokens=False)["input_ids"]
    return torch.tensor([token for document in ids for token in (0, *document)])


def llama(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int) -> LlamaForCausalLM:
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads,
             "num_key_value_heads": kv_heads, "head_dim": 32, "vocab_size": VOCAB_SIZE}  # fmt: skip
    others = {"max_position_embeddings": 1024, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(**sizes, **others, rms_norm_eps=1e-5))


def batches(ids: Tensor, num_steps: int, seed: int) -> Iterator[Tensor]:
    """Random windows: 256 tokens long at first, 1,024 for the last quarter, so that late positions are trained too."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(num_steps):
        length = 256 if step < 0.75 * num_steps else 1024
        starts = torch.randint(0, len(ids) - length, (TOKENS_PER_STEP // length,), generator=generator)
        yield torch.stack([ids[s : s + length] for s in starts])


def next_token_loss(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=tokens, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


def distillation_loss(draft: LlamaForCausalLM, target: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """KL from the target's distribution plus its argmax as a label: T > 0 accepts by the first, T = 0 by the second."""
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            wanted = target(input_ids=tokens, use_cache=False).logits.flatten(0, 1).float()
        got = draft(input_ids=tokens, use_cache=False).logits.flatten(0, 1).float()
    log_q = got.log_softmax(-1)
    kl = torch.nn.functional.kl_div(log_q, wanted.log_softmax(-1), log_target=True, reduction="batchmean")
    return kl + 0.5 * torch.nn.functional.nll_loss(log_q, wanted.argmax(-1))


def optimise(model: LlamaForCausalLM, data: Iterator[Tensor], loss_of: Loss, num_steps: int, peak_lr: float) -> None:
    """AdamW, short warm-up, cosine decay to a twentieth."""
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=peak_lr, betas=(0.9, 0.95))
    for step, tokens in zip(tqdm(range(num_steps), mininterval=5), data, strict=False):
        warmup, cosine = min(1.0, (step + 1) / 60), 0.525 + 0.475 * math.cos(math.pi * step / num_steps)
        for group in optimiser.param_groups:
            group["lr"] = peak_lr * warmup * cosine
        loss_of(tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)


@torch.no_grad()
def target_text(target: LlamaForCausalLM, ids: Tensor, num_batches: int, seed: int) -> Tensor:
    """What the target itself writes (greedy, T = 0.6, T = 1 in turn): there its draft will have to guess."""
    generator, rows = torch.Generator().manual_seed(seed), []
    ways = [{"do_sample": False}, {"do_sample": True, "temperature": 0.6, "top_k": 0}, {"do_sample": True, "top_k": 0}]
    for batch in tqdm(range(num_batches), desc="target writes", mininterval=5):
        starts = torch.randint(0, len(ids) - 64, (128,), generator=generator)
        prompt = torch.stack([ids[s : s + 48] for s in starts])
        limits = {"attention_mask": torch.ones_like(prompt), "max_length": 256, "min_length": 256}
        with torch.autocast("cpu", torch.bfloat16):
            rows.append(target.generate(prompt, **limits, **ways[batch % 3]))
    return torch.cat(rows)


def distillation_batches(ids: Tensor, written_RS: Tensor, num_steps: int) -> Iterator[Tensor]:
    """Alternate corpus windows with rows that the target wrote."""
    generator = torch.Generator().manual_seed(3)
    for step, window in enumerate(batches(ids, num_steps, seed=2)):
        if window.shape[1] > written_RS.shape[1] or step % 2:
            yield window
        else:
            yield written_RS[torch.randint(0, len(written_RS), (TOKENS_PER_STEP // 256,), generator=generator)]


@torch.no_grad()
def report(target: LlamaForCausalLM, draft: LlamaForCausalLM, ids: Tensor) -> dict[str, float]:
    """Held-out figures: loss of both, and how often the draft's k-th guess is the target's argmax."""
    rows = ids[: len(ids) // 256 * 256].view(-1, 256)[:64]
    wanted, guess = (model(input_ids=rows).logits for model in (target, draft))
    hits = guess.topk(4, -1).indices == wanted.argmax(-1, keepdim=True)
    losses = {
        f"{name}_loss": next_token_loss(model, rows).item() for name, model in (("target", target), ("draft", draft))
    }
    return losses | {f"rank_{k + 1}": hits[..., k].float().mean().item() for k in range(4)}


def main(
    out: Annotated[Path, typer.Option(help="folder to write target/ and draft/ into")],
    start: Annotated[Path | None, typer.Option(help="pair whose target stays and whose draft learns on")] = None,
    target_steps: Annotated[int, typer.Option(min=1)] = 1300,
    draft_steps: Annotated[int, typer.Option(min=1)] = 1100,
    written_batches: Annotated[int, typer.Option(min=3, help="batches of 128 texts that the target writes")] = 20,
) -> None:
    """Train target and draft, or let the draft of an earlier pair learn on."""
    torch.manual_seed(0 if start is None else 1)
    started = time.perf_counter()
    files = corpus_files(held_out=False)
    tokenizer = train_tokenizer(files) if start is None else AutoTokenizer.from_pretrained(start / "target")
    ids = encode_corpus(tokenizer, files)
    held_out = encode_corpus(tokenizer, corpus_files(held_out=True))
    print(f"{len(files)} files, {len(ids):,} tokens, {len(held_out):,} held out")
    if start is None:
        target, draft = llama(192, 512, 6, 6, 3), llama(128, 352, 2, 4, 2)
        data = batches(ids, target_steps, seed=1)
        optimise(target, data, lambda tokens: next_token_loss(target, tokens), target_steps, 4e-3)
        target = target.eval().to(torch.bfloat16).float()  # what the draft learns from is what will be stored
    else:
        target, draft = (LlamaForCausalLM.from_pretrained(start / n, dtype=torch.float32) for n in ("target", "draft"))
    written = target_text(target.eval(), ids, written_batches, seed=7 if start is None else 8)
    data = distillation_batches(ids, written, draft_steps)
    peak_lr = 4e-3 if start is None else 2e-3
    optimise(draft, data, lambda tokens: distillation_loss(draft, target, tokens), draft_steps, peak_lr)
    for name, model in (("target", target), ("draft", draft)):
        model.eval().to(torch.bfloat16).save_pretrained(out / name)
        tokenizer.save_pretrained(out / name)
    print(report(target.float(), draft.float(), held_out), f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    typer.run(main)
