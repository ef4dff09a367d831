"""Finds what a torn-down cluster left behind, and what it costs."""
