"""The texts that a soak asks for: a small table, so that each is written again in many ways.

Invariant: a text depends on its request alone: any process, tree, memory or neighbours give the
same.
"""

from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from offload.bench.harness.prompts import prompts
from offload.engine.decoder import Decoder
from offload.sampling_options import Sampling

CONTEXT = 256
NUM_WISHES = 48
TEMPLATE = "{% for m in messages %}# {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}# assistant:"
_PROMPT_CHARS = (40, 300)
_LENGTHS = (1, 4, 16, 16, 48)
_TEMPERATURES = (0.0, 0.8)


class Wish(NamedTuple):
    text: str
    is_chat: bool
    sampling: Sampling
    num_new: int

    def ids(self, decoder: Decoder) -> list[int]:
        if self.is_chat:
            return decoder.encode(self.messages)
        return decoder.encode(self.text, raw=True)

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self.text}]

    @property
    def body(self) -> dict[str, Any]:
        asked = {"messages": self.messages} if self.is_chat else {"prompt": self.text}
        sampling = {"temperature": self.sampling.temperature, "seed": self.sampling.seed}
        return {**asked, **sampling, "max_tokens": self.num_new}


def wishes() -> list[Wish]:
    """Return the table, the same on every call."""
    rng = Random("wishes")
    texts = [prompt.text for prompt in prompts(["code"], NUM_WISHES)]
    return [
        Wish(
            texts[number % len(texts)][: rng.randint(*_PROMPT_CHARS)],
            rng.random() < 0.3,
            Sampling(temperature=rng.choice(_TEMPERATURES), seed=rng.randrange(3)),
            rng.choice(_LENGTHS),
        )
        for number in range(NUM_WISHES)
    ]


def with_template(target: Path, folder: Path) -> Path:
    """Return the model in another folder, its files linked, with a chat template.

    The packaged pair has none.
    """
    folder.mkdir()
    for path in target.iterdir():
        if path.is_file():
            (folder / path.name).symlink_to(path.resolve())
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder
