"""A search over a job's flags on Ray Tune. Knows the driver; the entry is `raytf.tune.tuner`."""
