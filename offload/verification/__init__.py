"""Rules of acceptance: which nodes of a tree the target keeps."""
