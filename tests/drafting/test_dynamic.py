"""Dynamic trees by definition: the N best of all paths, each scored as if it were the only one, at any pace."""

from collections.abc import Iterator
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from bigrams import NUM_TOKENS, BigramModel
from tiny import VOCAB_SIZE, Pair
from torch import Tensor

from offload.checkpoint.open import open_checkpoint
from offload.drafting.base import DraftCalibration, DraftText
from offload.drafting.draft_model import Draft
from offload.drafting.dynamic import DraftPassPolicy, GrowingTree, grow_forest
from offload.drafting.lookup import NO_GUESSES, Guesses
from offload.drafting.model_drafter import ModelDrafter
from offload.engine.build import resident_model
from offload.engine.load import load
from offload.model.kv_cache import KVCache
from offload.model.tree_model import TreeModel
from offload.rules import ChildSampling
from offload.sampling.sampler import Sampler
from offload.sampling_options import Sampling
from offload.trees.token_tree import TokenTree
from offload.trees.topology import DynamicShape, GrowthSchedule, k_ary, most_rows
from offload.trees.verification import Acceptance

ROOT_AT = 1  # where the root stands
PROMPT = [7, 11, 3, 42, 5]
GREEDY, WARM, NUCLEUS = Sampling(), Sampling(temperature=0.8, seed=3), Sampling(temperature=1.0, top_p=0.8, seed=4)
CASES = [
    (GREEDY, ChildSampling.COUPLED),
    (WARM, ChildSampling.COUPLED),
    (NUCLEUS, ChildSampling.COUPLED),
    (WARM, ChildSampling.TOP_K),
]


def draft_of_bigrams(model: BigramModel) -> Draft:
    return Draft(model, NUM_TOKENS, KVCache(1, 512))  # type: ignore[arg-type]


def grow_best(
    draft: Draft,
    bounds: DynamicShape,
    tokens: list[int],
    sampler: Sampler,
    exponent: float,
    guesses: Guesses = NO_GUESSES,
    policy: DraftPassPolicy | None = None,
) -> TokenTree:
    """One text's tree of the best paths."""
    growing = GrowingTree(draft, bounds.depth, tokens, sampler, exponent, guesses)
    (tree,) = grow_forest([growing], bounds, policy or DraftPassPolicy())
    return tree


def grow_bigrams(model: BigramModel, bounds: DynamicShape, sampler: Sampler, exponent: float) -> TokenTree:
    return grow_best(draft_of_bigrams(model), bounds, [4, 0], sampler, exponent)


def grown(worth: DraftPassPolicy) -> tuple[TokenTree, int]:
    """A large tree of as many passes and nodes as are worth their time; its passes."""
    model, shape = BigramModel(), DynamicShape(64, 6, GrowthSchedule(16, 9, 1.0))
    tree = grow_best(draft_of_bigrams(model), shape, [4, 0], Sampler(WARM, NUM_TOKENS), 1.25, policy=worth)
    return tree, len(model.num_rows)


def path_of(tree: TokenTree, node: int) -> tuple[int, ...]:
    parent = int(tree.topology.parent_N[node])
    return () if parent < 0 else (*path_of(tree, parent), tree.tokens[node])


def best_paths(bounds: DynamicShape, sampler: Sampler, exponent: float) -> set[tuple[int, ...]]:
    """By the definition: f of every path, and the N - 1 largest."""
    score_of: dict[tuple[int, ...], float] = {}
    for depth in range(1, bounds.depth + 1):
        for path in product(range(NUM_TOKENS), repeat=depth):
            log_f, parent = 0.0, 0
            for position, token in enumerate(path, start=ROOT_AT + 1):
                logits_1V = BigramModel().logits_VV[parent][None]
                is_coupled = sampler.drafting is ChildSampling.COUPLED
                score_V = (sampler.perturbed(logits_1V, position) if is_coupled else logits_1V)[0].double().numpy()
                log_f += float(np.log(np.exp(exponent * score_V)[token] / np.exp(exponent * score_V).sum()))
                parent = token
            if log_f > -np.inf:
                score_of[path] = log_f
    return set(sorted(score_of, key=lambda path: -score_of[path])[: bounds.num_nodes - 1])


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("bounds", [DynamicShape(*bounds) for bounds in ((2, 1), (12, 5), (40, 4), (40, 2))], ids=str)
@pytest.mark.parametrize(("sampling", "drafting"), CASES, ids=["greedy", "warm", "nucleus", "topk"])
def test_a_grown_tree_holds_the_best_paths(bounds: DynamicShape, sampling: Sampling, drafting: ChildSampling) -> None:
    model, sampler = BigramModel(), Sampler(sampling, NUM_TOKENS, drafting)
    tree = grow_bigrams(model, bounds, sampler, 1.25)
    paths = [path_of(tree, node) for node in range(tree.num_nodes)]
    assert len(set(paths)) == len(paths), "no two children of a node carry one token"
    assert set(paths[1:]) == best_paths(bounds, sampler, 1.25)
    assert tree.topology.depth <= bounds.depth
    assert sum(model.num_rows) <= most_rows(bounds.num_nodes) + 1, "one is the prompt's"
    assert set(tree.score_of_node) == {0, *tree.row_of_node}


def test_a_pass_has_to_bring_what_the_time_of_whole_steps_has_brought() -> None:
    """The rate of a step that has only begun is too high: it would end trees of costly drafts at their root."""
    worth = DraftPassPolicy(lambda num_rows, widths: 1.0 + 0.125 * len(widths) + num_rows / 64)
    worth.has_grown(64, [8] * 16)
    worth.learn(8)
    # 2 tokens a second; a pass takes 1/8 of one, 64 rows as long as a whole second
    assert worth.pays(0.26, 1, [1]) and not worth.pays(0.24, 1, [1])
    assert worth.pays(0.26, 64, [8] * 15) and not worth.pays(0.24, 64, [8] * 15)
    chances = np.array([0.9, 0.8] + [0.04] * 5 + [0.03] * 70)
    assert worth.num_rows(chances, [1]) == 8
    both = worth.together_with([worth])
    assert both.pays(0.51, 1, [1]) and not both.pays(0.49, 1, [1]), "two texts bring twice as many"


def test_passes_end_where_they_are_not_worth_their_time() -> None:
    """The first ones are hidden; behind them a pass has to bring as much as a step brings in the same time."""

    def passes(tokens_per_step: int, pass_s: float, num_hidden: int) -> int:
        worth = DraftPassPolicy(lambda _, widths: 1.0 + pass_s * max(0, len(widths) - num_hidden))
        worth.has_grown(1, [])
        worth.learn(tokens_per_step)
        return grown(worth)[1]

    all_of_them = passes(0, 1.0, 0)
    assert passes(4, 0.0, 0) == passes(4, 1.0, 64) == all_of_them, "free"
    counts = [passes(4, pass_s, 0) for pass_s in (0.001, 0.02, 0.1, 1.0)]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-2] > counts[-1] == 1
    assert passes(4, 1.0, 5) == 5 and passes(1, 0.1, 0) > passes(8, 0.1, 0)
    # Where rows are dear few are sent, so that the link leaves a pass less time to hide in than a whole tree would.
    worth = DraftPassPolicy(lambda num_rows, widths: max(1.0 + num_rows, 2.0 * len(widths)))
    worth.has_grown(1, [1])
    worth.learn(4)
    assert grown(worth)[1] == 1, "63 rows would have hidden it, and they are not sent"


def test_a_sweep_gets_the_nodes_that_are_worth_their_rows() -> None:
    """Where every row costs, as the experts that it asks for do, far nodes are left out, and the rest is the same."""
    prices = (0.0, 1e-6, 0.02, 0.1, 0.5, 100.0)
    trees = [grown(DraftPassPolicy(lambda num_rows, _, row_s=row_s: 1.0 + row_s * num_rows))[0] for row_s in prices]
    sizes = [tree.num_nodes for tree in trees]
    assert sizes[:2] == [64, 64] and sizes == sorted(sizes, reverse=True) and sizes[2] > sizes[4] > 1 == sizes[5]
    paths = [{path_of(tree, node) for node in range(tree.num_nodes)} for tree in trees]
    assert all(less <= most for most, less in pairwise(paths)), "each has the best of a larger one, with their parents"


@pytest.fixture(scope="module")
def model(pair: Pair) -> Iterator[TreeModel]:
    model = resident_model(open_checkpoint(pair[1]), "float32")
    yield model
    model.close()


def draft_of(model: TreeModel, cache: KVCache | None = None) -> Draft:
    return Draft(model, VOCAB_SIZE, cache or KVCache(model.num_layers, 256))


def worst_gap(model: TreeModel, sampler: Sampler) -> float:
    """Between the scores that nodes were grown by and those of their paths, run alone as committed tokens."""
    tree = grow_best(draft_of(model), DynamicShape(48, 8), PROMPT, sampler, 4.0)
    assert tree.topology.depth >= 4 and len(tree.row_of_node) > 8
    gaps = []
    for node, score_V in tree.score_of_node.items():
        path = [*PROMPT, *path_of(tree, node)]
        alone_1V = sampler.perturbed(draft_of(model).catch_up(path), len(path))
        gaps.append((alone_1V[0] - score_V).abs().max())
    return float(max(gaps))


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_every_row_sees_its_path_alone(model: TreeModel, sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    """And rows that do not see it are caught."""
    assert worst_gap(model, Sampler(sampling, VOCAB_SIZE)) < 1e-4
    run = Draft.run

    def run_blind(draft: Draft, token_W: Tensor, position_U: Tensor, ancestor_WU: Tensor) -> Tensor:
        return run(draft, token_W, position_U, torch.eye(ancestor_WU.shape[1], dtype=torch.bool)[-len(token_W) :])

    monkeypatch.setattr(Draft, "run", run_blind)
    assert worst_gap(model, Sampler(sampling, VOCAB_SIZE)) > 1e-2


def gap_after_commit(model: TreeModel, *, takes_another: bool) -> float:
    """Between what the draft says next after a dynamic tree's deepest path was kept, and what a fresh one says."""
    sampler, drafter = Sampler(GREEDY, VOCAB_SIZE), ModelDrafter(model, VOCAB_SIZE, 256)
    cache = drafter.new_state()
    tree = drafter.propose([DraftText(DynamicShape(48, 8), PROMPT, sampler, cache)])[0]
    rows = tree.row_of_node
    nodes = [tree.num_nodes - 1]
    while nodes[0]:
        nodes.insert(0, int(tree.topology.parent_N[nodes[0]]))
    assert [rows[node] for node in nodes[1:] if node in rows] != list(range(len(nodes) - 1)), "no row has to move"
    if takes_another:
        rows[nodes[1]] = next(row for node, row in rows.items() if node not in nodes)
    drafter.accepted(tree, Acceptance(nodes, [*(tree.tokens[node] for node in nodes[1:]), 9]), sampler, cache)
    text = [*PROMPT, *path_of(tree, nodes[-1]), 9]
    return float((draft_of(model, cache).catch_up(text) - draft_of(model).catch_up(text)).abs().max())


def test_commit_keeps_the_accepted_path_and_wrong_rows_are_caught(model: TreeModel) -> None:
    assert gap_after_commit(model, takes_another=False) < 1e-4
    assert gap_after_commit(model, takes_another=True) > 1e-2


def test_a_fixed_tree_after_a_grown_one_forgets_it(model: TreeModel) -> None:
    """Both kinds share one cache."""
    sampler, drafter = Sampler(GREEDY, VOCAB_SIZE), ModelDrafter(model, VOCAB_SIZE, 256)
    used, tree = drafter.new_state(), k_ary(2, 31)
    (grown,) = drafter.propose([DraftText(DynamicShape(32, 6), PROMPT, sampler, used)])
    drafter.accepted(grown, Acceptance([0], [9]), sampler, used)
    text = DraftText(tree, [*PROMPT, 9], sampler, used)
    (again,), (fresh,) = drafter.propose([text]), drafter.propose([text._replace(state=drafter.new_state())])
    assert again.tokens == fresh.tokens


def test_decoding_teaches_each_kind_of_sampling_by_itself(pair: Pair) -> None:
    with load(*pair, ram="1GiB", context=128, tree="grown:24x6", threads=1) as decoder:
        drafter = decoder.drafter
        assert isinstance(drafter, ModelDrafter)
        for temperature, seed in ((0.0, 0), (0.9, 0), (0.9, 1)):
            decoder.generate(PROMPT, max_new_tokens=30, temperature=temperature, seed=seed)
        assert sorted(sampling.temperature for sampling, _ in drafter._calibration) == [0.0, 0.9]
    # A token that was ruled out teaches nothing.
    sharpness = DraftCalibration()
    start = sharpness.exponent
    for _ in range(50):
        sharpness.learn(torch.tensor([[0.0, -torch.inf, 3.0]]), torch.tensor([1]))
    assert sharpness.exponent == start


@pytest.mark.parametrize("rule", ["match", "topk"])
def test_rules_that_repeat_draws_give_the_same_ids(pair: Pair, rule: str) -> None:
    sampling = {"temperature": 0.8, "top_p": 0.9, "seed": 2, "max_new_tokens": 60}
    with load(*pair, ram="1GiB", context=128, tree="grown:32x8", rule=rule, threads=1) as decoder:
        plain, tree = (decoder.generate(PROMPT, tree=tree, **sampling) for tree in ("none", None))
    assert tree.token_ids == plain.token_ids
    assert tree.stats.tokens_per_sweep > 1.2
    assert tree.as_dict()["stats"]["tree"] == {"num_nodes": 32, "depth": 8, "is_dynamic": True}  # type: ignore[index]


@pytest.mark.parametrize(("num_nodes", "depth"), [(16, 8), (64, 8), (64, 24), (128, 20), (300, 16)])
def test_a_growth_takes_no_more_draft_steps_than_are_planned_for(
    num_nodes: int, depth: int, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths, bounds = list[int](), DynamicShape(num_nodes, depth)
    with load(*pair, "1GiB", f"grown:{num_nodes}x{depth}", context=64, threads=1) as decoder:
        text, run = decoder.begin(PROMPT, Sampling()), Draft.run
        monkeypatch.setattr(Draft, "run", lambda self, *rows: widths.append(len(rows[0])) or run(self, *rows))
        decoder.drafter.propose([DraftText(bounds, text.tokens, text.sampler, text.caches.draft)])[0]
    # A draft that is sure of nothing fills a tree by its rows alone; the packaged pair, below, is sure of much.
    assert bounds.pace.num_parts <= len(widths) + 1 <= len(bounds.draft_widths) + 1
    assert sum(widths) == pytest.approx(sum(bounds.draft_widths), rel=0.4)


NUM_NODES, DEPTH, NUM_NEW = 64, 32, 128
