"""The cluster around a run: notices of preemption, and what is done about them."""
