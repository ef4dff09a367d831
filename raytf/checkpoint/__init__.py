"""Checkpoints: what they hold (format, codec), when and which (policy), and their durable copy (durable)."""
