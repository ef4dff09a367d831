"""What a tracker is, and which one a flag names."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from raytf.driver.tracking.points import Point
from raytf.errors import ConfigError

#: Names of trackers -> (the package that each needs, how to get it).
PACKAGES = {
    "mlflow": ("mlflow", "pip install mlflow"),
    "wandb": ("wandb", "pip install wandb"),
    "tensorboard": ("tensorboard", "pip install tensorboard"),
}
#: What the name of a file ends with.
FILE_SUFFIX = ".jsonl"


class Tracker(Protocol):
    """A run of a tracker. Whatever its library raises is left to the caller."""

    def open(self, key: str, name: str, parameters: Mapping[str, str]) -> None:
        """Begin, or go on with what an earlier start of the run began.

        Args:
            key: of the run: the same in all of its starts, and another one for every other run.
            name: of the run, for people.
            parameters: its settings, by the names of their flags.
        """
        ...

    def told(self, names: Iterable[str]) -> dict[str, int]:
        """The last step that it was told of, for some names of numbers; without those that it does not know."""
        ...

    def tell(self, points: Sequence[Point]) -> None:
        """Tell it numbers of further steps."""
        ...

    def keep(self, files: Mapping[str, bytes]) -> None:
        """Give it files, by name."""
        ...

    def close(self, is_finished: bool) -> None:
        """End, for now or for good."""
        ...


@contextlib.contextmanager
def written(files: Mapping[str, bytes]) -> Iterator[list[str]]:
    """Paths of some files by name, for libraries that take no bytes; they are gone after the `with` statement."""
    with tempfile.TemporaryDirectory(prefix="raytf-track-") as folder:
        for name, data in files.items():
            Path(folder, name).write_bytes(data)
        yield [os.path.join(folder, name) for name in files]


def check(track: str | None) -> None:
    """Refuse a tracker that is not known or not installed.

    Raises:
        ConfigError: says what to install, or which ones there are.
    """
    if track is None or track.endswith(FILE_SUFFIX):
        return
    if track not in PACKAGES:
        raise ConfigError(
            f"--track {track} is not known. Expected {', '.join(PACKAGES)}, or a file whose name ends with "
            f"{FILE_SUFFIX}."
        )
    package, how = PACKAGES[track]
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"--track {track} needs {package}, which is not installed: {how}")
