"""How gradients and metrics of a step are encoded for sending: fixed point, packed vectors, digests."""
