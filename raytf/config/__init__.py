"""The settings of a run: their types and checks, the resources that they request, and the command line.

The entry is `TrainConfig`. The package imports neither Ray nor TensorFlow.
"""

from raytf.config.train_config import Flags, TrainConfig, WorkerFlags

__all__ = ["Flags", "TrainConfig", "WorkerFlags"]
