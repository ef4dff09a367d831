"""Settings that make a GPU compute the same bits each time, besides TensorFlow's deterministic kernels; for `--exact`.

Both are read from the environment when a process's first operation runs. cuDNN may choose other kernels if it has less
memory to work in, so its limit is a fixed number, small enough to be available; XLA times kernels and takes the fastest
unless it is told not to (openxla, xla_gpu_deterministic_ops).
"""

from __future__ import annotations

from collections.abc import MutableMapping

#: TensorFlow's name for the memory that cuDNN may work in, in MiB (tensorflow/core/kernels/gpu_utils.cc).
WORKSPACE = "TF_CUDNN_WORKSPACE_LIMIT_IN_MB"
WORKSPACE_MIB = 512
#: Keys in a run's identity.
TF32, CUDNN = "TF32", "cuDNN's workspace"
_XLA, _DETERMINISTIC = "XLA_FLAGS", "--xla_gpu_deterministic_ops"


def prepare(environ: MutableMapping[str, str]) -> None:
    """Set what the process of a worker with a GPU needs, before its first operation; variables that are set stay."""
    environ.setdefault(WORKSPACE, str(WORKSPACE_MIB))
    flags = environ.get(_XLA, "")
    if _DETERMINISTIC not in flags:
        environ[_XLA] = f"{flags} {_DETERMINISTIC}=true".strip()


def identity(environ: MutableMapping[str, str], tf32: bool) -> dict[str, str]:
    """Return the settings that affect bits, and so must stay the same when a run is resumed."""
    return {
        TF32: "on" if tf32 else "off",
        CUDNN: f"{environ.get(WORKSPACE, 'any')} MiB",
    }
