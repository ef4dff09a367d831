"""Audits of runs: shards and steps computed again, checks of a run's records, and differences between runs."""
