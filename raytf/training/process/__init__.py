"""A worker process: its settings, heartbeat, reports and GPUs, and the warm processes that wait for work."""
