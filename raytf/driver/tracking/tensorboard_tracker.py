"""TensorBoard: event files in the run's own folder, which each start of the run writes from the first step on."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from raytf.driver.tracking.points import Point
from raytf.storage.storage import Storage

#: Below the run's folder.
FOLDER = "tensorboard/steps"


class TensorBoardTracker:
    """Scalars for TensorBoard.

    Args:
        run: its folder.
    """

    def __init__(self, run: Storage):
        self._run = run
        self._folder = tempfile.TemporaryDirectory(prefix="raytf-track-")
        self._writer: Any = None

    def open(self, key: str, name: str, parameters: Mapping[str, str]) -> None:
        from tensorboard.compat.proto import summary_pb2, tensor_pb2, types_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        for old in self._run.list(FOLDER):
            self._run.delete(f"{FOLDER}/{old}")
        self._writer = EventFileWriter(self._folder.name)
        metadata = summary_pb2.SummaryMetadata(plugin_data=summary_pb2.SummaryMetadata.PluginData(plugin_name="text"))
        text = "\n".join(f"    {line}" for line in json.dumps(dict(parameters), indent=1).splitlines())
        tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[text.encode()])
        self._add(0, summary_pb2.Summary.Value(tag="settings", metadata=metadata, tensor=tensor))

    def told(self, names: Iterable[str]) -> dict[str, int]:
        return {}

    def tell(self, points: Sequence[Point]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        for point in points:
            self._add(point.step, *(Summary.Value(tag=n, simple_value=value) for n, value in point.values.items()))
        self._write()

    def _add(self, step: int, *values: Any) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        self._writer.add_event(
            event_pb2.Event(step=step, wall_time=time.time(), summary=summary_pb2.Summary(value=values))
        )

    def _write(self) -> None:
        self._writer.flush()
        for file in Path(self._folder.name).iterdir():
            self._run.put(f"{FOLDER}/{file.name}", file.read_bytes())

    def keep(self, files: Mapping[str, bytes]) -> None:
        """It has no files, and lies in a run's folder, where they are."""

    def close(self, is_finished: bool) -> None:
        self._writer.close()
        self._folder.cleanup()
