"""Benchmarks of checkpoints, on storage and in memory."""
