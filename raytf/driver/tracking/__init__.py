"""Trackers of experiments (MLflow, Weights & Biases, TensorBoard, a file): one of their runs for one of ours.

A tracker gets only what is committed, and not what was lost with a worker and computed again: restarts leave neither
gaps nor duplicates. Entry: `follow.tracked`.
"""
