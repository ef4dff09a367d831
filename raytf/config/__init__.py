"""The settings of a run: what they are, which go together, what they ask of a cluster, and the command line.

Knows `raytf.errors` and `raytf.storage.uris`; no Ray, no TensorFlow, no data. The entry is `TrainConfig`.
"""

from raytf.config.train_config import Flags, TrainConfig, WorkerFlags

__all__ = ["Flags", "TrainConfig", "WorkerFlags"]
