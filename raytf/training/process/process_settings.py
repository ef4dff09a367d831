"""A run's settings of its workers' processes: plain data that the driver and Ray Train's controller send."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessSettings:
    """A run's settings of its workers' processes, applied before any TensorFlow operation.

    Attributes:
        threads: TensorFlow's threads within an operation; 0 lets TensorFlow decide, None gives a process the same share
            of the node's CPUs as it has of the node's GPUs.
        quiet: silence TensorFlow's messages.
        exact: let TensorFlow choose deterministic kernels, and refuse operations that have none.
        jit: compile gradients with XLA. Compiled programs stay on the node for the next group.
        one_worker: the strategy has a single process, which has no cluster and hence no TF_CONFIG.
        logical_devices: number of logical devices into which the CPU is divided.
        is_next_soon: another run may follow at once, as in a notebook: its processes are prepared from the beginning.
    """

    threads: int | None = 0
    quiet: bool = True
    exact: bool = False
    jit: bool = False
    one_worker: bool = False
    logical_devices: int = 1
    is_next_soon: bool = False
