"""Google Cloud Storage: pyarrow's file system, made from a URI's options. It is not asked for conditional writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow.fs as pafs


@dataclass(frozen=True)
class Gcs:
    """How to reach Google Cloud Storage.

    Attributes:
        options: of the URI.
    """

    options: dict[str, str]

    def file_system(self) -> pafs.FileSystem:
        """A file system that has read the credentials just now."""
        arguments: dict[str, Any] = dict(self.options)
        if "anonymous" in arguments:
            arguments["anonymous"] = arguments["anonymous"].lower() in ("1", "true", "yes")
        return pafs.GcsFileSystem(**arguments)

    def objects(self) -> None:
        """Nothing that writes by version."""
