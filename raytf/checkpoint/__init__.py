"""Checkpoints: what they hold (format), when and which (policy), and their durable copy (durable)."""
