"""Trackers of experiments (MLflow, Weights & Biases, TensorBoard, a file): one of their runs for one of ours.

A tracker gets what is committed: what was computed and then lost with a worker is not told, so that restarts leave
neither gaps nor doubles. Entry: `follow.tracked`.
"""
