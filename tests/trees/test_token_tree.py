"""Token trees by their definition: who is whose child, who lies on whose path, on random shapes."""

import dataclasses

import numpy as np
import pytest
import torch

from offload.trees.token_tree import Draw, TokenTree, ancestors, children_of
from offload.trees.topology import Topology, best_first, chain, k_ary, sequences


def random_topology(seed: int, num_nodes: int = 30) -> Topology:
    """Parents that never fall: level order follows."""
    rng = np.random.default_rng(seed)
    parents = [-1]
    for node in range(1, num_nodes):
        parents.append(int(rng.integers(max(0, parents[-1]), node)))
    return Topology.from_parents(parents)


TREES = [*map(random_topology, range(8)), chain(5), k_ary(3, 13), sequences(3, 4), best_first((0.25,) * 4, 9, 3)]


def path_to_root(topology: Topology, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = int(topology.parent_N[node])
    return path


@pytest.mark.parametrize("topology", TREES, ids=range(len(TREES)))
def test_ancestors_and_children_are_what_parents_say(topology: Topology) -> None:
    # Ancestors are the nodes on the path to the root.
    ancestor_NN = ancestors(topology)
    assert ancestor_NN.dtype == torch.bool
    for node in range(topology.num_nodes):
        assert sorted(path_to_root(topology, node)) == ancestor_NN[node].nonzero()[:, 0].tolist()
    assert (ancestor_NN.sum(1) - 1).tolist() == topology.depth_N.tolist(), "a path is as long as its depth"
    # Children are listed in the order of their ranks.
    children = children_of(topology)
    assert sorted(child for own in children for child in own) == list(range(1, topology.num_nodes))
    for node, own in enumerate(children):
        assert all(topology.parent_N[child] == node for child in own)
        assert [int(topology.rank_N[child]) for child in own] == list(range(len(own)))
        assert own == list(range(own[0], own[0] + len(own))) if own else True, "siblings stand together"


def test_the_first_child_with_a_token_is_found() -> None:
    tree = TokenTree(Topology.from_parents([-1, 0, 0, 0, 1, 1]), torch.tensor([9, 4, 7, 4, 7, 7]))
    assert tree.num_nodes == 6 and tree.tokens == [9, 4, 7, 4, 7, 7]
    assert (tree.child(0, 4), tree.child(0, 7), tree.child(0, 9)) == (1, 2, None)
    assert (tree.child(1, 7), tree.child(1, 4), tree.child(3, 7), tree.child(5, 7)) == (4, None, None, None)
    # Children are remembered by shape, tokens must not be.
    shape = k_ary(2, 3)
    one, two = TokenTree(shape, torch.tensor([0, 1, 2])), TokenTree(shape, torch.tensor([0, 2, 1]))
    assert (one.child(0, 1), two.child(0, 1)) == (1, 2)
    # Children without a distribution are point masses.
    tree = TokenTree(k_ary(2, 5), torch.tensor([9, 4, 7, 4, 6]))
    assert [(o.child, o.token, o.draw, o.probs_V) for o in tree.offers(0)] == [
        (1, 4, Draw.POINT_MASS, None),
        (2, 7, Draw.POINT_MASS, None),
    ]
    assert list(tree.offers(4)) == []
    # A tree is what it was built as.
    with pytest.raises(AssertionError, match="one token per node"):
        TokenTree(chain(3), torch.tensor([1, 2, 3]))
    tree = TokenTree(chain(1), torch.tensor([1, 2]))
    with pytest.raises(dataclasses.FrozenInstanceError):
        tree.token_N = torch.tensor([3, 4])  # type: ignore[misc]
