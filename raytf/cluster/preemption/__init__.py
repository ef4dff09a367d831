"""Preemption notices: polls the cloud's metadata service for them, and has Ray drain the node."""
