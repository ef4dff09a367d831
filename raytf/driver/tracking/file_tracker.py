"""A local file with a line of JSON for each step, of one run or of several."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from raytf.driver.tracking.points import Point
from raytf.errors import ConfigError


class FileTracker:
    """Lines {"run", "key", "step", and the numbers}, after one with the run's settings.

    Args:
        path: of the file.
    """

    def __init__(self, path: str):
        self._path = os.path.expanduser(path)
        self._key, self._name = "", ""
        self._told: dict[str, int] = {}

    def open(self, key: str, name: str, parameters: Mapping[str, str]) -> None:
        self._key, self._name, is_new = key, name, True
        os.makedirs(os.path.dirname(os.path.abspath(self._path)), exist_ok=True)
        with open(self._path, "a+", encoding="utf-8") as file:
            file.seek(0)
            lines = file.read().splitlines(keepends=True)
            if lines and not lines[-1].endswith("\n"):  # of a start that was killed
                file.truncate(sum(len(line.encode()) for line in lines[:-1]))
                lines.pop()
            for number, line in enumerate(lines, 1):
                row = self._row(number, line)
                if row.pop("key", None) == key:
                    is_new = False
                    step = row.pop("step", 0)
                    self._told.update(dict.fromkeys(row, step))
        if is_new:
            self._write([{"parameters": dict(parameters)}])

    def _row(self, number: int, line: str) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise ConfigError(f"--track {self._path}: line {number} is not one that raytf wrote. Give another file.")
        return row

    def told(self, names: Iterable[str]) -> dict[str, int]:
        return self._told

    def tell(self, points: Sequence[Point]) -> None:
        self._write([{"step": point.step, **point.values} for point in points])

    def _write(self, rows: Sequence[Mapping[str, object]]) -> None:
        lines = [json.dumps({"run": self._name, "key": self._key, **row}) + "\n" for row in rows]
        with open(self._path, "a", encoding="utf-8") as file:
            file.write("".join(lines))

    def keep(self, files: Mapping[str, bytes]) -> None:
        """A file has room for numbers alone."""

    def close(self, is_finished: bool) -> None:
        """Nothing is open between two calls."""
