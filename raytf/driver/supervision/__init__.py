"""Who is alive, what has failed, and what to do about it: heartbeats, evidence, hangs, stragglers and retries."""
