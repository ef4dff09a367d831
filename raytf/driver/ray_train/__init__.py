"""Ray Train, filled in for TensorFlow: the backend, the scaling policy, the failure policy and warm workers."""
