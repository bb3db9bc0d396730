"""The draft rank: it tells exactly the best paths, best first, however far it ran ahead and wherever the root moves."""

import math
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from bigrams import NUM_TOKENS, BigramModel
from in_memory import InMemory, in_memory
from tiny import FAMILIES, VOCAB_SIZE, build, save
from torch import Tensor

from offload.checkpoint.open import open_checkpoint
from offload.distributed.draft import DraftTree, serve_draft
from offload.distributed.orders import Accept, Commit, DraftNodeUpdate, Grow, Guessed, Least, Reset, Stop
from offload.distributed.transport import Channel
from offload.drafting.base import DraftCalibration
from offload.engine.build import resident_model
from offload.model.tree_model import TreeModel
from offload.sampling.sampler import Sampler
from offload.sampling_options import Sampling

LEAST = -6.0  # log f of paths that are looked at
GREEDY, WARM = Sampling(), Sampling(temperature=0.8, seed=3)
Paths = dict[tuple[int, ...], float]


class Fixed(DraftCalibration):
    """Learns nothing, and notes what it was taught."""

    exponent = 1.25  # type: ignore[assignment]

    def __init__(self) -> None:
        self.lessons: list[tuple[Tensor, list[int]]] = []

    def learn(self, score_TV: Tensor, tokens: Sequence[int]) -> None:
        self.lessons.append((score_TV, list(tokens)))


def tree_over(model: object, tokens: Sequence[int], sampling: Sampling = WARM, num_rows: int = 64) -> DraftTree:
    size = model.vocab_size  # type: ignore[attr-defined]
    tree = DraftTree(model, size, 200, num_rows)  # type: ignore[arg-type]
    tree.begin(tokens, Sampler(sampling, size), Fixed())
    return tree


def tell(tree: DraftTree, num_nodes: int, least_f: float = 0.0, least_p: float = 0.0) -> list[DraftNodeUpdate]:
    """What a patient draft answers."""
    while True:
        nodes, to_run = tree.best(num_nodes, least_f, least_p)
        if len(nodes) == num_nodes or not to_run:
            return tree.tell(nodes)
        tree.run(to_run)


class Listener:
    """Knows nodes as a head does: paths from the first root of the text, by number."""

    def __init__(self) -> None:
        self.path_of: dict[int, tuple[int, ...]] = {0: ()}

    def hear(self, updates: Sequence[DraftNodeUpdate]) -> list[tuple[int, ...]]:
        for node in updates:
            assert node.number not in self.path_of and node.parent in self.path_of
            self.path_of[node.number] = (*self.path_of[node.parent], node.token)
        return [self.path_of[node.number] for node in updates]


def all_paths(tokens: Sequence[int], sampling: Sampling = WARM) -> Paths:
    """By the definition: log f of every path below the last token that is not hopeless, best first."""
    sampler, mapping, ends = Sampler(sampling, NUM_TOKENS), Paths(), [((), 0.0)]
    while ends:
        path, log_f = ends.pop()
        logits_1V = BigramModel().logits_VV[[tokens[-1], *path][-1]][None]
        score_V = sampler.perturbed(logits_1V, len(tokens) + len(path))[0].double()
        for token, log_p in enumerate((Fixed.exponent * score_V).log_softmax(0).tolist()):
            if log_f + log_p > LEAST:
                mapping[*path, token] = log_f + log_p
                ends.append(((*path, token), log_f + log_p))
    return dict(sorted(mapping.items(), key=lambda item: -item[1]))


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_the_best_paths_are_told_best_first(sampling: Sampling) -> None:
    tree, head, wanted = tree_over(BigramModel(), [4, 0], sampling), Listener(), all_paths([4, 0], sampling)
    updates = [node for _ in range(6) for node in tell(tree, 5)]
    paths = head.hear(updates)
    assert len({*paths}) == 30 < len(wanted)
    log_f = torch.tensor([wanted[path] for path in paths])
    assert torch.allclose(log_f, torch.tensor(list(wanted.values())[:30]), atol=1e-4)
    p_of = {path: math.exp(wanted[path] - wanted.get(path[:-1], 0.0)) for path in wanted}
    assert [node.p for node in updates] == pytest.approx([p_of[path] for path in paths], abs=1e-4)


def test_cut_offs_hold_for_whole_paths() -> None:
    wanted = all_paths([4, 0], WARM)
    p_of = {path: math.exp(wanted[path] - wanted.get(path[:-1], 0.0)) for path in wanted}
    for least_f, least_p in ((0.05, 0.0), (0.0, 0.3), (0.02, 0.2)):
        paths = Listener().hear(tell(tree_over(BigramModel(), [4, 0]), 25, least_f, least_p))
        meets = [path for path in wanted if math.exp(wanted[path]) >= least_f]
        meets = [path for path in meets if min(p_of[path[: n + 1]] for n in range(len(path))) >= least_p]
        assert paths == meets[:25]


def told_after_moves(model: object, rng: random.Random, size: int) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
    """What a tree has told below its last root, and what a fresh one tells of the same text."""
    tokens = [4, 0]
    tree, head = tree_over(model, tokens), Listener()
    text: tuple[int, ...] = ()
    for _ in range(6):
        head.hear(tell(tree, rng.randrange(1, 12)))
        for _ in range(rng.randrange(0, 3)):
            if to_run := tree.best(64, 0.0, 0.0)[1]:
                tree.run(to_run)
        accepted = [rng.randrange(size) for _ in range(rng.randrange(1, 3))]
        if rng.random() < 0.7:  # a path that was told
            below = [path[len(text) :] for path in head.path_of.values() if path[: len(text)] == text]
            accepted = list(rng.choice([path for path in below if path] or [tuple(accepted)]))
        tree.accept(accepted)
        text += tuple(accepted)
        tokens += accepted
    head.hear(tell(tree, 9))
    below = {path[len(text) :] for path in head.path_of.values() if path[: len(text)] == text and path != text}
    fresh = Listener()
    return below, {*fresh.hear(tell(tree_over(model, tokens), len(below)))}


@pytest.mark.parametrize("seed", range(10))
def test_a_tree_whose_root_moved_is_that_of_a_fresh_one(seed: int, model: TreeModel) -> None:
    """The model hears it too, with four of the seeds: its rows that stay are those of their paths."""
    got, wanted = told_after_moves(BigramModel(), random.Random(seed), NUM_TOKENS)
    assert got == wanted and len(got) >= 9
    if seed < 4:
        got, wanted = told_after_moves(model, random.Random(seed), VOCAB_SIZE)
        assert got == wanted


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TreeModel]:
    """Every token of the text matters to it."""
    directory = save(build(FAMILIES["llama"]()), tmp_path_factory.mktemp("draft"))
    model = resident_model(open_checkpoint(directory), "float32")
    yield model
    model.close()


def test_what_is_accepted_teaches_how_sure_to_be() -> None:
    tree = tree_over(BigramModel(), [4, 0])
    tell(tree, 6)
    calibration, likeliest = tree._calibration, tree.root.children[0]  # type: ignore[index]
    assert isinstance(calibration, Fixed) and likeliest.score_V is not None
    tree.accept([likeliest.token, 2, 1])
    assert [tokens for _, tokens in calibration.lessons][:2] == [[likeliest.token], [2]]
    assert torch.equal(calibration.lessons[1][0][0], likeliest.score_V)
    assert len(calibration.lessons) == 2 + (len(calibration.lessons) > 2), "what was not run teaches nothing"


def test_a_new_text_keeps_what_it_shares(model: TreeModel) -> None:
    tree = tree_over(model, [*range(5, 25)])
    tell(tree, 9)
    again = [*range(5, 20), 3, 8]
    tree.begin(again, Sampler(WARM, VOCAB_SIZE), Fixed())
    assert tree._cache.length == 15 and tree.num_rows == 0
    paths = Listener().hear(tell(tree, 12))
    assert paths == Listener().hear(tell(tree_over(model, again), 12))


@contextmanager
def serving(model: object, num_rows: int = 64) -> Iterator[tuple[InMemory, DraftTree]]:
    """The head's transport, and the tree of the draft rank, which is rank 1."""
    size = model.vocab_size  # type: ignore[attr-defined]
    transports, tree = in_memory(2), DraftTree(model, size, 200, num_rows)  # type: ignore[arg-type]
    thread = threading.Thread(target=serve_draft, args=(transports[1], tree))
    thread.start()
    try:
        yield transports[0], tree
    finally:
        transports[0].send(1, Channel.DRAFT, Stop())
        thread.join(timeout=30)
        assert not thread.is_alive()


def reset(transport: InMemory, tokens: Sequence[int], sampling: Sampling = WARM) -> None:
    transport.send(1, Channel.DRAFT, Reset(0, sampling, tuple(tokens)))


def grow(transport: InMemory, num_nodes: int, least_f: float = 0.0, least_p: float = 0.0) -> None:
    transport.send(1, Channel.DRAFT, Grow(num_nodes, Least(least_f, least_p)))


def answer(transport: InMemory) -> list[DraftNodeUpdate]:
    guessed = transport.receive(1, Channel.RESULT)
    assert isinstance(guessed, Guessed)
    return guessed.nodes


def test_a_question_has_one_answer_and_a_token_nobody_guessed_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.distributed.draft.DraftCalibration", Fixed)
    with serving(BigramModel()) as (transport, _):
        head, text, tokens = Listener(), (), [4, 0]
        reset(transport, tokens)
        grow(transport, 6)
        assert 0 < len(head.hear(answer(transport))) <= 6
        for step in range(4):
            accepted = (step, 2 * step % 5)
            text, tokens = text + accepted, [*tokens, *accepted]
            transport.send(1, Channel.DRAFT, Accept(list(accepted)))
            grow(transport, 4)
            paths = head.hear(answer(transport))
            assert text in head.path_of.values(), "whatever hangs below hangs from it"
            below = {path[len(text) :] for path in head.path_of.values() if path[: len(text)] == text} - {()}
            new = {path[len(text) :] for path in paths} & below
            assert 0 < len(new) <= 4 and below == {*list(all_paths(tokens))[: len(below)]}


def test_it_runs_ahead_while_nobody_asks_but_not_for_ever() -> None:
    model = BigramModel()
    with serving(model, num_rows=40) as (transport, tree):
        reset(transport, [4, 0])
        num_passes = -1
        while num_passes != len(model.num_rows) or tree.num_rows < 5:
            num_passes = len(model.num_rows)
            time.sleep(0.3)
        assert tree.num_rows <= 20
        may_run, forward = threading.Event(), model.forward
        model.forward = lambda *rows, **options: may_run.wait() and forward(*rows, **options)  # type: ignore[method-assign]
        grow(transport, 5)
        assert len(answer(transport)) == 5, "they were there already"
        may_run.set()


def test_an_order_that_is_none_of_a_drafts_ends_it() -> None:
    transports = in_memory(2)
    transports[0].send(1, Channel.DRAFT, Commit([0]))
    with pytest.raises(ValueError, match="rank 1 was told to Commit"):
        serve_draft(transports[1], DraftTree(BigramModel(), NUM_TOKENS, 20, 8))  # type: ignore[arg-type]
