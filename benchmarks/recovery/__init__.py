"""Faults: the time from one to the next new step, goodput under traces of them, and a run's start."""
