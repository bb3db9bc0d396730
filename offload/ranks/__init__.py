"""Many processes that run one target together: messages between them, who computes what, and what a head decides."""
