"""What a tree yields by the product form, summed up node by node."""

from offload.trees.topology import AcceptanceVector, Topology, check_acceptance, path_chances


def expected_tokens(topology: Topology, p: AcceptanceVector) -> float:
    """F(T), the tokens that one pass over the tree is expected to commit (Sequoia, Prop. 3.4), the bonus token too."""
    return float(path_chances(topology, check_acceptance(p)).sum())
