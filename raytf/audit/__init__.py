"""Audits of runs: recomputing shards and steps, checking a run's records, and comparing runs."""
