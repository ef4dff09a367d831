"""Everything that raytf raises on purpose.

    RaytfError
    ├── ConfigError              a flag or argument is wrong
    │   └── RunMismatchError     the run in storage was made with other settings
    ├── DataError                records are missing, corrupt or of the wrong kind
    ├── ExactnessError           exact mode cannot keep its promise for this model or on this machine
    ├── ModelError               the model function returned something that cannot be trained
    │   └── WholeBatchError      it takes whole batches, and no parts of them
    ├── StorageError             storage cannot be reached, read or written
    │   └── DamagedFileError     a file of a run is damaged, or none that raytf has written
    ├── CheckpointError          a checkpoint is damaged or does not fit the model
    ├── RunInUseError            another live process owns the run
    ├── ClusterError             the cluster can never give what was asked for
    ├── NonFiniteLossError       the loss became NaN or infinite
    ├── GpuError                 a node's GPU is missing, broken or taken
    ├── UnsupportedError         TensorFlow or NCCL refuses an operation on these devices
    ├── WorkerLostError          another worker died in the middle of a step
    ├── ProcessDiedError         a parameter server or the coordinator died
    ├── ReplicaError             the workers' weights are not equal any more
    ├── HangError                a worker makes no progress, again and again
    └── JobError                 the job's own code raised

The message of each says what is wrong, what was expected and how to fix it. None of them is retried by Ray Train,
except a `StorageError` in the middle of a run, a `GpuError`, a `WorkerLostError`, a `ProcessDiedError`, a
`ReplicaError`, a `HangError` and, once more, a `JobError` of a run that has made a step: the same code would fail in
the same way again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

#: The package's name on the registry, where `raytf` belongs to somebody else.
DISTRIBUTION = "raytf-train"
#: Bold and coloured text, as Keras has it in errors.
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
#: The message if both are installed in one folder.
FOREIGN = (
    "a package of 2021 that the registry calls raytf is installed in the same folder as "
    f"{DISTRIBUTION}, which is this one. Type: pip uninstall -y raytf {DISTRIBUTION}; then install this again, from "
    "its checkout or wheel"
)


class RaytfError(Exception):
    """Base class; `except raytf.RaytfError` catches all that raytf raises on purpose."""

    #: Whether a fresh worker group may succeed where this one failed.
    retryable = False
    #: Whether the same command may succeed later without a change by the user.
    passes = False
    #: The exception of the program's code that this error explains, as `raytf.training.user.user_code` pickles it.
    original: bytes | None = None

    def __reduce__(self):
        # Ray pickles errors on their way to the driver; extra attributes must survive, whatever __init__ takes.
        return (_rebuild, (type(self), self.args, self.__dict__))

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows in place of a traceback: the message, and the cause where it has another
        one."""
        cause = self.__cause__
        told = [f"{type(self).__name__}: {one_line(self)}"]
        if cause is not None and one_line(cause, 60).removesuffix("...") not in told[0]:
            told.append(f"caused by {type(cause).__name__}: {one_line(cause, 300)}")
        return told


def not_installed(what: str, extra: str, module: str | None) -> ConfigError:
    """Return an error that names the extra to install.

    Args:
        what: needs them, such as `raytf serve`.
        extra: of the released package, which brings them.
        module: that cannot be imported, where that is known.
    """
    needs = module or "a package"
    return ConfigError(f"{what} needs {needs}, which is not installed. Type: pip install '{DISTRIBUTION}[{extra}]'")


def one_line(error: object, limit: int | None = None) -> str:
    """Return the text of another library's error as one line, without colors, cut after a word at a limit."""
    text = " ".join(_STYLE.sub("", str(error)).split())
    if limit is None or len(text) <= limit:
        return text
    kept = text[: limit - 3]
    return f"{kept.rpartition(' ')[0] or kept}..."


def brief(error: Exception, limit: int = 80) -> str:
    """Return the text of another library's error, or an error's kind, for a status line."""
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
    """The run in storage was made with settings that this command changes, and that must not change."""


class DataError(RaytfError, ValueError):
    """Training data is missing, empty, corrupt, or of the wrong dtype, shape or range."""


class ModelError(RaytfError, ValueError):
    """The model function did not return a compiled Keras model that raytf can train."""


class WholeBatchError(ModelError):
    """The model takes whole batches, and no parts of them: its own step may draw as much noise as a batch is long."""


class ExactnessError(RaytfError):
    """Exact mode cannot keep its promise: an operation has a state of its own or no deterministic kernel, or machines
    compute different bits."""


class StorageError(RaytfError, OSError):
    """Storage cannot be reached, read or written.

    Attributes:
        kind: one of `missing`, `denied`, `unreachable`, `full`, `unsupported`, `refused` (by raytf: a name), `damaged`,
            `other`.
    """

    def __init__(self, message: str, kind: str = "other"):
        super().__init__(message)
        self.kind = kind
        # A full disk or a missing right does not fix itself between two attempts.
        self.retryable = kind in ("unreachable", "unsupported", "other")
        self.passes = kind == "unreachable"


class DamagedFileError(StorageError):
    """A file of a run is damaged, or none that raytf has written.

    Attributes:
        file: as a person would look for it.
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
    """The cluster can never give the workers that were asked for; or Ray failed under a run, which `passes`."""

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
    """A GPU that a worker was given is missing, broken or taken by another process. Another node's may do.

    Attributes:
        node: Ray's id of the node; empty where nobody knows.
        is_launch: a kernel failed. One node's GPU may do that, but where another node's does as well, it is the code.
        is_doubtful: it may as well be the node of another rank, or the network between; a surer error goes first.
    """

    retryable = True

    def __init__(self, message: str, node: str = "", is_launch: bool = False, is_doubtful: bool = False):
        super().__init__(message)
        self.node, self.is_launch, self.is_doubtful = node, is_launch, is_doubtful


class UnsupportedError(RaytfError):
    """TensorFlow or NCCL refuses an operation on the devices of this run, and would again."""


class WorkerLostError(RaytfError):
    """Another worker died in the middle of a step; seen only inside workers and by Ray Train's failure policy.

    Attributes:
        unreached: ranks that did not answer while the group met.
    """

    retryable = True
    unreached: frozenset[int] = frozenset()


class ReplicaError(RaytfError):
    """The workers' weights are not equal any more; a new group continues from where they were.

    Attributes:
        ranks: whose weights are wrong, or that compute wrongly; none where nobody can say.
        rank: which of them raised it; None if that is not known.
        computes_wrongly: whether an audit has seen that those ranks compute wrongly.
        nodes: Ray's ids of their nodes, where it is known which: a rank that is to blame may not have ended yet when
            the run hears of it from another one.
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
    """A worker makes no progress; the last of several that hung at the same step."""

    retryable = True


class ProcessDiedError(RaytfError):
    """A process has died without which its group with parameter servers cannot continue."""

    retryable = True


class JobError(RaytfError):
    """The job's own code (model function, callback, augmentation) raised.

    Attributes:
        traceback: the traceback, as text, from the first line of the program's own code on.
        step: global steps done when it was raised; None before training began.
        is_bug: what was raised is a mistake in the code, which another attempt would meet again.
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


#: Exceptions that Python raises for mistakes in code, and that end a program; subclasses of the former come from
#: files and networks, too.
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
