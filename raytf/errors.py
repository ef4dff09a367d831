"""The errors that raytf raises on purpose.

    RaytfError
    ├── ConfigError              a flag or argument is wrong
    │   └── RunMismatchError     the run in storage has other settings
    ├── DataError                records are missing, corrupt or of the wrong kind
    ├── ExactnessError           exact mode cannot keep its promise for this model or on this machine
    ├── ModelError               the model function returned something that cannot be trained
    │   └── WholeBatchError      the model trains on whole batches only
    ├── StorageError             storage cannot be reached, read or written
    │   └── DamagedFileError     a file of a run is damaged, or was not written by raytf
    ├── CheckpointError          a checkpoint is damaged or does not fit the model
    ├── RunInUseError            another live process owns the run
    ├── ClusterError             the cluster can never provide the requested workers
    ├── NonFiniteLossError       the loss became NaN or infinite
    ├── GpuError                 a node's GPU is missing, broken or taken
    ├── UnsupportedError         TensorFlow or NCCL does not support an operation here
    ├── WorkerLostError          another worker died in the middle of a step
    ├── ProcessDiedError         a parameter server or the coordinator died
    ├── ReplicaError             the workers' weights are no longer equal
    ├── HangError                a worker repeatedly makes no progress
    └── JobError                 the job's own code raised

Each message says what is wrong, what was expected and how to fix it. Ray Train retries only a `StorageError` in the
middle of a run, a `GpuError`, a `WorkerLostError`, a `ProcessDiedError`, a `ReplicaError`, a `HangError` and, after the
first step, a `JobError` that does not look like a bug. After any other error, the same code would fail again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

#: The package's name on the registry, where `raytf` belongs to somebody else.
DISTRIBUTION = "raytf-train"
#: Escape sequences for bold and colored text, which Keras uses in errors.
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
#: The message if both packages are installed in the same folder.
FOREIGN = (
    "the unrelated package raytf of 2021 is installed in the same folder as this package, "
    f"{DISTRIBUTION}. Type: pip uninstall -y raytf {DISTRIBUTION}; then reinstall this package from its checkout or "
    "wheel"
)


class RaytfError(Exception):
    """Base class; `except raytf.RaytfError` catches every error that raytf raises on purpose."""

    #: Whether a fresh worker group may succeed where this one failed.
    retryable = False
    #: Whether the same command may succeed later, without changes by the user.
    passes = False
    #: The exception of the program's code that this error explains, as `raytf.training.user.user_code` pickles it.
    original: bytes | None = None

    def __reduce__(self):
        # Ray pickles errors for the driver. Extra attributes must survive, whatever arguments __init__ takes.
        return (_rebuild, (type(self), self.args, self.__dict__))

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows in place of a traceback: the message, and the cause unless the message
        contains it."""
        cause = self.__cause__
        told = [f"{type(self).__name__}: {one_line(self)}"]
        if cause is not None and one_line(cause, 60).removesuffix("...") not in told[0]:
            told.append(f"caused by {type(cause).__name__}: {one_line(cause, 300)}")
        return told


def not_installed(what: str, extra: str, module: str | None) -> ConfigError:
    """Return an error that names the extra to install.

    Args:
        what: the feature that needs the extra, such as `raytf serve`.
        extra: name of the extra.
        module: the module that cannot be imported, if known.
    """
    needs = module or "a package"
    return ConfigError(f"{what} needs {needs}, which is not installed. Type: pip install '{DISTRIBUTION}[{extra}]'")


def one_line(error: object, limit: int | None = None) -> str:
    """Return the text of another library's error as one line, without colors, cut after a word at `limit`."""
    text = " ".join(_STYLE.sub("", str(error)).split())
    if limit is None or len(text) <= limit:
        return text
    kept = text[: limit - 3]
    return f"{kept.rpartition(' ')[0] or kept}..."


def brief(error: Exception, limit: int = 80) -> str:
    """Return a short text for a status line: the kind of a StorageError, or the error's message."""
    if isinstance(error, StorageError) and error.kind in _KINDS:
        return _KINDS[error.kind]
    text = one_line(error)
    text = text[text.index("AWS Error") :] if "AWS Error" in text else text
    return (text if len(text) <= limit else f"{text[: limit - 3]}...") or type(error).__name__


def _rebuild(cls: type[RaytfError], args: tuple, state: dict) -> RaytfError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigError(RaytfError, ValueError):
    """A flag or an argument is wrong."""


class RunMismatchError(ConfigError):
    """This command changes settings of the run in storage that must not change."""


class DataError(RaytfError, ValueError):
    """Training data is missing, empty, corrupt, or of the wrong dtype, shape or range."""


class ModelError(RaytfError, ValueError):
    """The model function did not return a compiled Keras model that raytf can train."""


class WholeBatchError(ModelError):
    """The model trains on whole batches only: its custom step may draw random numbers for a whole batch."""


class ExactnessError(RaytfError):
    """Exact mode cannot keep its promise: an operation has its own state or no deterministic kernel, or machines
    compute different bits."""


class StorageError(RaytfError, OSError):
    """Storage cannot be reached, read or written.

    Attributes:
        kind: one of `missing`, `denied`, `unreachable`, `full`, `unsupported`, `refused` (raytf refuses a name),
            `damaged`, `other`.
    """

    def __init__(self, message: str, kind: str = "other"):
        super().__init__(message)
        self.kind = kind
        # A full disk or a missing permission is not fixed between two attempts.
        self.retryable = kind in ("unreachable", "unsupported", "other")
        self.passes = kind == "unreachable"


class DamagedFileError(StorageError):
    """A file of a run is damaged, or was not written by raytf.

    Attributes:
        file: the file, in a form that people can find.
        reason: what is wrong with it.
    """

    def __init__(self, file: str, reason: str, fix: str = ""):
        super().__init__(f"{file} is damaged: {reason}.{f' {fix}' if fix else ''}", "damaged")
        self.file, self.reason = file, reason


_KINDS = {
    "denied": "storage denies access",
    "unreachable": "storage cannot be reached",
    "full": "storage is full",
}


class CheckpointError(RaytfError):
    """A checkpoint is damaged, or does not fit the model."""


class RunInUseError(RaytfError):
    """Another live process owns this run."""

    passes = True


class ClusterError(RaytfError):
    """The cluster can never provide the requested workers; or Ray failed during a run, and `passes` is set."""

    def __init__(self, message: str, passes: bool = False):
        super().__init__(message)
        self.passes = passes


class NonFiniteLossError(RaytfError):
    """The training loss became NaN or infinite.

    Attributes:
        step: the global step (1-based) whose loss was not finite.
    """

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step


class GpuError(RaytfError):
    """A worker's GPU is missing, broken or taken by another process. A GPU of another node may work.

    Attributes:
        node: Ray's id of the node; empty if unknown.
        is_launch: whether a kernel failed. If kernels also fail on another node, the code is to blame, not the GPU.
        is_doubtful: whether another rank's node or the network may be to blame; a more certain error takes precedence.
    """

    retryable = True

    def __init__(self, message: str, node: str = "", is_launch: bool = False, is_doubtful: bool = False):
        super().__init__(message)
        self.node, self.is_launch, self.is_doubtful = node, is_launch, is_doubtful


class UnsupportedError(RaytfError):
    """TensorFlow or NCCL does not support an operation on the devices of this run; a retry would fail, too."""


class WorkerLostError(RaytfError):
    """Another worker died in the middle of a step. Only workers and Ray Train's failure policy see this error.

    Attributes:
        unreached: ranks that did not respond while the group met.
    """

    retryable = True
    unreached: frozenset[int] = frozenset()


class ReplicaError(RaytfError):
    """The workers' weights are no longer equal; a new group continues from a step at which they were.

    Attributes:
        ranks: ranks with wrong weights or wrong computations; empty if it is unknown which ranks are wrong.
        rank: the rank that raised the error; None if unknown.
        computes_wrongly: whether an audit has proved that `ranks` compute wrongly.
        nodes: Ray's ids of the nodes of `ranks`, if known: another rank may report the error before the rank to blame
            has exited.
    """

    retryable = True

    def __init__(
        self,
        message: str,
        ranks: list[int],
        rank: int | None = None,
        computes_wrongly: bool = False,
        nodes: Sequence[str] = (),
    ):
        super().__init__(message)
        self.ranks, self.rank, self.computes_wrongly, self.nodes = ranks, rank, computes_wrongly, tuple(nodes)


class HangError(RaytfError):
    """A worker made no progress for too long; `fit` raises this only after several hangs at the same step."""

    retryable = True


class ProcessDiedError(RaytfError):
    """A parameter server or the coordinator died, so its group cannot continue."""

    retryable = True


class JobError(RaytfError):
    """The job's own code (model function, callback, augmentation) raised an exception.

    Attributes:
        traceback: the traceback, as text, starting at the first line of the program's own code.
        step: completed global steps when it was raised; None before training starts.
        is_bug: whether the exception shows a mistake in the code, which would recur in another attempt.
    """

    step: int | None = None

    def __init__(self, message: str, traceback: str = "", error: BaseException | None = None):
        super().__init__(message)
        self.traceback = traceback
        self.is_bug = type(error) in _BUGS

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows in place of a traceback: the message, and where the program failed."""
        places = self.traceback.split("\n  File ")[1:]
        places = [place for place in places if "site-packages" not in place] or places
        told = [f"{type(self).__name__}: {one_line(self)}"]
        return [*told, "  File " + "\n".join(places[-1].splitlines()[:2])] if places else told


#: Exceptions that Python raises for mistakes in code, or to end a program. Their subclasses are left out, because files
#: and networks raise these, too.
_BUGS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    IndexError,
    KeyError,
    ModuleNotFoundError,
    NameError,
    KeyboardInterrupt,
    NotImplementedError,
    SystemExit,
    TypeError,
    UnboundLocalError,
    ValueError,
    ZeroDivisionError,
)
