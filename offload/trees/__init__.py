"""Topologies, their names, token trees, proposals, and the rules that verify them."""
