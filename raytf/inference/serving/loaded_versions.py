"""The versions that a replica has in memory; follows the folder of versions while requests are answered."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from http import HTTPStatus

from raytf.errors import ModelError, RaytfError, StorageError
from raytf.inference import versions
from raytf.inference.saved_model import SavedModel
from raytf.inference.serving.errors import Refusal
from raytf.inference.serving.version_policy import Policy
from raytf.inference.versions import Version
from raytf.storage.storage import Storage

#: A version that could not be loaded is tried again after so long, or when its files change.
_RETRY_SECONDS = 30.0


class LoadedVersions:
    """Loaded versions. A new one takes over when it is loaded and warm, and what it replaces goes after that.

    Args:
        uri: folder of versions.
        name: of the model, for messages.
        policy: which versions to serve.
        threads: of TensorFlow.
        say: called with versions that are loaded, dropped or cannot be loaded.
        clock: injected by tests.
    """

    def __init__(
        self,
        uri: str,
        name: str,
        policy: Policy,
        threads: int,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._models, self._name, self._policy, self._threads = Storage(uri), name, policy, threads
        self._say, self._clock = say, clock
        #: Replaced as a whole, never changed: requests read it without a lock.
        self._loaded: dict[int, SavedModel] = {}
        self._known: list[Version] = []
        self._broken: dict[int, tuple[float, Version, str]] = {}
        self._trouble = ""

    def refresh(self) -> None:
        """List the folder, load what is new, drop what is not wanted; where storage fails, nothing changes."""
        try:
            self._known = versions.inspect(self._models, self._known)
        except StorageError as error:
            if self._trouble != str(error):
                self._say(f"the versions cannot be listed: {error}")
            self._trouble = str(error)
            return
        self._trouble = ""
        there = {version.number: version for version in versions.whole(self._known)}
        self._broken = {n: b for n, b in self._broken.items() if self._is_still_broken(b, there.get(n))}
        while True:
            wanted = self._policy.wanted(there, self._broken)
            new = next((number for number in wanted if number not in self._loaded), None)
            if new is None:
                break
            self._load(there[new])
        gone = [number for number in self._loaded if number not in wanted]
        # A folder that is empty for a moment is no reason to stop answering.
        if gone and wanted:
            self._loaded = {number: model for number, model in self._loaded.items() if number in wanted}
            self._say(f"version {', '.join(map(str, sorted(gone)))} is no longer served")

    def get(self, version: int | None) -> tuple[int, SavedModel]:
        """Return the version that was asked for, or the default one.

        Raises:
            Refusal: it is not served.
        """
        loaded = self._loaded
        number = self._policy.answering(list(loaded)) if version is None else version
        if number is None or number not in loaded:
            asked = f"Latest({self._name})" if version is None else f"Specific({self._name}, {version})"
            there = ", ".join(map(str, sorted(loaded))) or "none"
            raise Refusal(HTTPStatus.NOT_FOUND, f"Servable not found for request: {asked}. Versions served: {there}.")
        return number, loaded[number]

    def states(self, version: int | None = None) -> list[tuple[int, str, str]]:
        """Return (version, state, problem) of all, or of one.

        Raises:
            Refusal: there is no such version.
        """
        rows = [(number, "AVAILABLE", "") for number in self._loaded]
        rows += [(number, "END", problem) for number, (_, _, problem) in dict(self._broken).items()]
        rows = sorted((row for row in rows if version in (None, row[0])), reverse=True)
        if not rows:
            text = (
                f"Could not find version {version} of model {self._name}" if version is not None else "No versions yet"
            )
            raise Refusal(HTTPStatus.NOT_FOUND, text)
        return rows

    def follow(self, seconds: float, stop: threading.Event) -> None:
        """Refresh every `seconds` until `stop` is set."""
        while not stop.wait(seconds):
            try:
                self.refresh()
            except Exception as error:  # whatever it is, requests are still answered
                self._say(f"the versions cannot be listed: {type(error).__name__}: {error}")

    def _load(self, version: Version) -> None:
        try:
            began = self._clock()
            model = self._read(version)
            model.warm_up()
        except (RaytfError, OSError) as error:
            self._broken[version.number] = (self._clock(), version, str(error))
            self._say(f"version {version.number} cannot be served: {error}")
            return
        self._loaded = {**self._loaded, version.number: model}
        self._say(f"version {version.number} is served, loaded in {self._clock() - began:.1f} s")

    def _read(self, version: Version) -> SavedModel:
        if self._models.is_local:
            return SavedModel(self._models.locate(version.name), self._threads)
        with tempfile.TemporaryDirectory(prefix="raytf-serve-") as folder:
            versions.download(self._models, version, folder)
            return SavedModel(folder, self._threads)

    def _is_still_broken(self, broken: tuple[float, Version, str], now: Version | None) -> bool:
        at, before, _ = broken
        return now is not None and now.sizes == before.sizes and self._clock() - at < _RETRY_SECONDS


def first_load(shelf: LoadedVersions) -> None:
    """Load what is to be served when a replica starts.

    Raises:
        ModelError: there is nothing to serve; it says why.
    """
    shelf.refresh()
    try:
        shelf.get(None)
    except Refusal as refusal:
        try:
            problems = "; ".join(problem for _, _, problem in shelf.states() if problem)
        except Refusal:
            problems = ""
        raise ModelError(f"no version can be served: {problems or refusal}") from None
