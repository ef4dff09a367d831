"""Experiment trackers (MLflow, Weights & Biases, TensorBoard, a file), with one tracker run for each raytf run.

A tracker receives only committed steps, not steps that were lost with a worker and computed again, so restarts leave
neither gaps nor duplicates. The entry point is `follow.tracked`.
"""
