"""Whether a run computed what it says: shards and steps computed again, its chain of records, and where two runs differ."""
