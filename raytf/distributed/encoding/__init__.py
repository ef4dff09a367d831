"""The form in which gradients and metrics of a step travel: fixed point, packed vectors, digests."""
