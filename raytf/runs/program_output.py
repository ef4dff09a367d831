"""Text, warnings and log records of the program's own code, sent from a worker to the program."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

#: The warning registry of each file, as Python keeps one for each module.
_shown: dict[str, dict[Any, Any]] = {}


@dataclass(frozen=True)
class Printed:
    """Text that the program's code printed.

    Attributes:
        text: the text as printed, including line feeds.
        is_error: whether it was written to standard error.
    """

    text: str
    is_error: bool = False

    def __str__(self) -> str:
        return self.text.rstrip("\n")

    def deliver(self) -> None:
        """Write the text to the program's current `sys.stdout` or `sys.stderr`."""
        stream = sys.stderr if self.is_error else sys.stdout
        stream.write(self.text)
        stream.flush()


@dataclass(frozen=True)
class Warned:
    """A warning that the program's code issued.

    Attributes:
        body: pickle of (warning, file, line); the program may define the warning's class.
        load: unpickles the body.
    """

    body: bytes
    load: Callable[[bytes], tuple[Warning, str, int]]

    def deliver(self) -> None:
        """Issue the warning in this process, whose filters decide whether it is shown.

        Raises:
            Warning: a filter turns the warning into an error.
        """
        message, file, line = self.load(self.body)
        # The category and the module's name follow from the warning and the file.
        warnings.warn_explicit(message, type(message), file, line, registry=_shown.setdefault(file, {}))


@dataclass(frozen=True)
class Logged:
    """A record that the program's code logged.

    Attributes:
        record: the attributes of the `logging.LogRecord` that can be sent, with the formatted message.
    """

    record: Mapping[str, Any]

    @classmethod
    def of(cls, record: logging.LogRecord) -> Logged:
        names = ("name", "levelno", "levelname", "pathname", "filename", "module", "lineno", "funcName", "created")
        error = record.exc_text
        if record.exc_info and not error:
            error = logging.Formatter().formatException(record.exc_info)
        made = {"msg": record.getMessage(), "exc_text": error, "stack_info": record.stack_info}
        return cls({name: getattr(record, name) for name in names} | made)

    def __str__(self) -> str:
        return str(self.record["msg"])

    def deliver(self) -> None:
        """Log the record in this process, whose loggers decide how to handle it."""
        record = logging.makeLogRecord(dict(self.record))
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)


def log_levels() -> dict[str, int]:
    """Return the levels of this process's loggers by name, without unset levels and the loggers of Ray and raytf."""
    loggers = {name: each for name, each in logging.root.manager.loggerDict.items() if isinstance(each, logging.Logger)}
    named = {name: each.level for name, each in loggers.items() if each.level and not is_own(name)}
    return {"root": logging.root.level} | named


def is_own(logger: str) -> bool:
    """Return whether a logger is Ray's or raytf's."""
    return logger.partition(".")[0] in ("ray", "raytf")


class Explained(str):
    """A line from raytf that a program shows only once.

    Args:
        topic: the topic of the line; only the first line of each topic is shown.
    """

    topic: str

    def __new__(cls, text: str, topic: str) -> Self:
        made = super().__new__(cls, text)
        made.topic = topic
        return made

    def as_warning(self) -> Explained:
        return Explained(f"WARNING: {self}", self.topic)

    def __reduce__(self) -> tuple[type[Explained], tuple[str, str]]:
        return Explained, (str(self), self.topic)


#: Output that a worker sends to the driver besides raytf's own lines.
ProgramOutput = Printed | Warned | Logged
