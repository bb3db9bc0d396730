"""Many processes that run one target: transport, joining, shards, pipeline stages."""
