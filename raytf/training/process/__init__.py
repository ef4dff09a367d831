"""A worker process: its settings, heartbeat, reports to the driver, GPUs, and processes that wait for work."""
