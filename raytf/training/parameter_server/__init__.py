"""Training with parameter servers: where the state lives, the step and the coordinator's loop."""
