"""Supervision: heartbeats, evidence, hangs, stragglers, diagnosis and retries."""
