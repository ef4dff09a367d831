"""Who is alive, what has failed, and what follows: beats, evidence, hangs, stragglers and retries."""
