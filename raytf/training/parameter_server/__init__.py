"""Training with parameter servers: the state on the servers, the step, and the coordinator's executor."""
