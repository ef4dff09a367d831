"""What a run decides about its workers' processes: plain data, which the driver and Ray Train's controller send."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessSettings:
    """What a run decides about the processes of its workers, before any TensorFlow operation.

    Attributes:
        threads: TensorFlow's threads within an operation; 0 leaves it to TensorFlow, None is what the node has for what
            a process was given of its GPUs.
        quiet: silence TensorFlow's messages.
        exact: have TensorFlow choose deterministic kernels, and refuse operations that have none.
        jit: XLA compiles; what it compiled stays on the node for the next group.
        one_worker: the strategy is one of one process, which has no cluster and hence no TF_CONFIG.
        logical_devices: parts of the CPU that count as devices.
    """

    threads: int | None = 0
    quiet: bool = True
    exact: bool = False
    jit: bool = False
    one_worker: bool = False
    logical_devices: int = 1
