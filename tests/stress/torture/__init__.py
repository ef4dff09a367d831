"""Whoever writes checkpoints is killed at every moment of it; nothing may be lost or corrupt."""
