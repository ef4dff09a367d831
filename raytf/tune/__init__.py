"""A search over a job's flags on Ray Tune. Uses the driver; the entry is `raytf.tune.tuner`."""
