"""Batches that the driver's program makes while workers train: it makes them, they ask for them by their step."""
