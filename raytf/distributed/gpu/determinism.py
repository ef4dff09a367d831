"""What makes a GPU compute the same bits each time, beside TensorFlow's deterministic kernels; for `--exact`.

Both are read from the environment when a process's first operation runs. cuDNN may take other kernels where it has less
memory to work in, so what it may ask for is one number, and small enough to be had; XLA times kernels and takes the
fastest unless it is told not to (openxla, xla_gpu_deterministic_ops).
"""

from __future__ import annotations

from collections.abc import MutableMapping

#: What TensorFlow asks for the memory that cuDNN may work in (tensorflow/core/kernels/gpu_utils.cc), its unit is MiB.
WORKSPACE = "TF_CUDNN_WORKSPACE_LIMIT_IN_MB"
WORKSPACE_MIB = 512
#: In a run's identity.
TF32, CUDNN = "TF32", "cuDNN's workspace"
_XLA, _DETERMINISTIC = "XLA_FLAGS", "--xla_gpu_deterministic_ops"


def prepare(environ: MutableMapping[str, str], jit: bool) -> None:
    """Set what a worker's process needs that has a GPU, before its first operation; what is set already stays.

    Args:
        jit: XLA compiles.
    """
    environ.setdefault(WORKSPACE, str(WORKSPACE_MIB))
    flags = environ.get(_XLA, "")
    if jit and _DETERMINISTIC not in flags:
        environ[_XLA] = f"{flags} {_DETERMINISTIC}=true".strip()


def identity(environ: MutableMapping[str, str], tf32: bool) -> dict[str, str]:
    """What of it decides about bits, and so must stay when a run is resumed.

    Args:
        tf32: whether TensorFlow may multiply float32 with 10 bits after the point.
    """
    return {
        TF32: "on" if tf32 else "off",
        CUDNN: f"{environ.get(WORKSPACE, 'any')} MiB",
    }
