"""Settings that make a GPU compute the same bits each time, besides TensorFlow's deterministic kernels; for `--exact`.

Both are read from the environment when a process's first operation runs. cuDNN may choose other kernels if it has less
workspace, so its limit is a fixed number that is small enough to be always available. XLA measures kernels and chooses
the fastest unless xla_gpu_deterministic_ops is set.
"""

from __future__ import annotations

from collections.abc import MutableMapping

#: TensorFlow's variable for the limit of cuDNN's workspace, in MiB (tensorflow/core/kernels/gpu_utils.cc).
WORKSPACE = "TF_CUDNN_WORKSPACE_LIMIT_IN_MB"
WORKSPACE_MIB = 512
#: Keys in a run's identity.
TF32, CUDNN = "TF32", "cuDNN's workspace"
_XLA, _DETERMINISTIC = "XLA_FLAGS", "--xla_gpu_deterministic_ops"


def prepare(environ: MutableMapping[str, str]) -> None:
    """Set the variables for a worker with a GPU, before its first operation. Existing settings are kept."""
    environ.setdefault(WORKSPACE, str(WORKSPACE_MIB))
    flags = environ.get(_XLA, "")
    if _DETERMINISTIC not in flags:
        environ[_XLA] = f"{flags} {_DETERMINISTIC}=true".strip()


def identity(environ: MutableMapping[str, str], tf32: bool) -> dict[str, str]:
    """Return the settings that affect bits, which must be the same when a run is resumed."""
    return {
        TF32: "on" if tf32 else "off",
        CUDNN: f"{environ.get(WORKSPACE, 'any')} MiB",
    }
