"""The training step: from a batch's shards to gradients, their sum and the update."""
