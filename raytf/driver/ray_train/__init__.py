"""Ray Train adapted to TensorFlow: the backend, the scaling policy, the failure policy and warm workers."""
