"""Whether a run computed what it says: shards and steps computed again, its records, where two runs differ."""
