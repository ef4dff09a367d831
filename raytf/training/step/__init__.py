"""The training step: computes gradients of a batch's shards, sums them, and applies the update."""
