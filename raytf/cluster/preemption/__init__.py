"""Notices of preemption: where clouds announce them, who watches, and what Ray is told."""
