"""How gradients and metrics of a step look while they travel: fixed point, packed vectors, digests."""
