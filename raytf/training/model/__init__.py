"""The user's model: its losses and metrics, which a step computes shard by shard."""
