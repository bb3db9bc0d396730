"""Token trees: topologies, their names, their tokens, the distributions these came from."""
