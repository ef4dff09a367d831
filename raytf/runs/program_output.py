"""What the program's own code prints and warns of in a worker, on its way to the program."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

#: Locations from which a warning was shown, by file, as Python keeps them for each module.
_shown: dict[str, dict[Any, Any]] = {}


@dataclass(frozen=True)
class Printed:
    """Text that code of the program printed.

    Attributes:
        text: as it was written, line feeds included.
        is_error: whether it was written to standard error.
    """

    text: str
    is_error: bool = False

    def __str__(self) -> str:
        return self.text.rstrip("\n")

    def deliver(self) -> None:
        """Write the text to what the program has as `sys.stdout` or `sys.stderr` now."""
        stream = sys.stderr if self.is_error else sys.stdout
        stream.write(self.text)
        stream.flush()


@dataclass(frozen=True)
class Warned:
    """A warning that code of the program raised.

    Attributes:
        body: pickle of (warning, file, line); its class may be one of the program's.
        load: unpickles it.
    """

    body: bytes
    load: Callable[[bytes], tuple[Warning, str, int]]

    def deliver(self) -> None:
        """Warn in this process, whose filters decide what is shown.

        Raises:
            Warning: a filter turns the warning into an error.
        """
        message, file, line = self.load(self.body)
        # The category and the module's name follow from the warning and the file.
        warnings.warn_explicit(message, type(message), file, line, registry=_shown.setdefault(file, {}))


class Explained(str):
    """A line of raytf's that is shown once in a program, however often it is said.

    Args:
        text: the line.
        topic: what it explains; of lines of one topic only the first is shown.
    """

    topic: str

    def __new__(cls, text: str, topic: str) -> Self:
        made = super().__new__(cls, text)
        made.topic = topic
        return made

    def as_warning(self) -> Explained:
        """Return the line as a warning."""
        return Explained(f"WARNING: {self}", self.topic)

    def __reduce__(self) -> tuple[type[Explained], tuple[str, str]]:
        return Explained, (str(self), self.topic)


#: What a worker sends to the driver besides lines of raytf's own.
ProgramOutput = Printed | Warned
