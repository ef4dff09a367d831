"""A rank's checkpoints: when to save, what to save, and to which tiers."""
