"""Chooses the versions to serve, and keeps them in a replica's memory as the folder of versions changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

from raytf.errors import ConfigError, ModelError, RaytfError, StorageError
from raytf.inference import versions
from raytf.inference.serving.limits import Refusal
from raytf.inference.versions import Version, number_of
from raytf.storage.storage import Storage

if TYPE_CHECKING:
    from raytf.inference.saved_model import SavedModel

#: Seconds after which a version that could not be loaded is tried again; sooner if its files change.
_RETRY_SECONDS = 30.0


@dataclass(frozen=True)
class Policy:
    """The versions to load.

    Attributes:
        newest: how many of the newest versions to load; None for all.
        named: versions to load in any case.
        default: the version for requests that name none; None for the newest loaded one.
    """

    newest: int | None = 1
    named: tuple[int, ...] = ()
    default: int | None = None

    @classmethod
    def of(cls, text: str, default: int | None = None) -> Policy:
        """Return the policy for `latest`, `latest:N`, `all`, or versions such as `1,3`.

        Raises:
            ConfigError: the text is none of these, or the default is not among the versions.
        """
        word, colon, count = text.partition(":")
        if word == "all" and not colon:
            return cls(None, (), default)
        if word == "latest" and (not colon or number_of(count)):
            return cls(number_of(count) if colon else 1, (), default)
        numbers = [number_of(part.strip()) for part in text.split(",")]
        if None not in numbers:
            named = tuple(sorted({number for number in numbers if number is not None}, reverse=True))
            if default is not None and default not in named:
                raise ConfigError(f"--version {default} is not among --versions {text}. Add it there.")
            return cls(0, named, default)
        raise ConfigError(f"--versions {text}: expected latest, latest:N, all, or versions such as 1,3.")

    def wanted(self, there: Collection[int], broken: Collection[int] = ()) -> list[int]:
        """Return the versions to serve, the newest first.

        Args:
            there: complete versions.
            broken: versions that could not be loaded; an older version is served instead of each.
        """
        good = sorted(set(there) - set(broken), reverse=True)
        chosen = set(good if self.newest is None else good[: self.newest])
        chosen |= {number for number in good if number in self.named or number == self.default}
        return sorted(chosen, reverse=True)

    @property
    def required(self) -> set[int]:
        """The versions that must exist when the server starts."""
        return {*self.named, *([] if self.default is None else [self.default])}

    def answering(self, loaded: Sequence[int]) -> int | None:
        """Return the version for requests that name none, or None if it is not loaded."""
        if self.default is not None:
            return self.default if self.default in loaded else None
        return max(loaded, default=None)


def bounds(flag: str, text: str) -> tuple[int, int]:
    """Return (MIN, MAX) from a flag's value, which is N or MIN:MAX.

    Raises:
        ConfigError: the value is neither.
    """
    low, colon, high = text.partition(":")
    fewest, most = number_of(low), number_of(high if colon else low)
    if not fewest or not most or fewest > most:
        raise ConfigError(f"{flag} {text}: expected a number such as 2, or the fewest and the most such as 1:4.")
    return fewest, most


class LoadedVersions:
    """The loaded versions of a model. An old version is dropped only after its replacement is loaded and warm.

    Args:
        uri: folder of versions.
        name: name of the model, for messages.
        policy: which versions to serve.
        threads: number of TensorFlow's threads.
        say: called with a line for each version that is loaded or dropped, or that cannot be loaded.
    """

    def __init__(self, uri: str, name: str, policy: Policy, threads: int, say: Callable[[str], None]):
        self._models, self._name, self._policy, self._threads, self._say = Storage(uri), name, policy, threads, say
        #: Replaced as a whole, never changed: requests read it without a lock.
        self._loaded: dict[int, SavedModel] = {}
        self._known: list[Version] = []
        self._broken: dict[int, tuple[float, Version, str]] = {}
        self._trouble = ""

    def load_first(self) -> None:
        """Load the first versions when a replica starts.

        Raises:
            ModelError: the default version cannot be served; the message says why.
        """
        self.refresh()
        try:
            self.get(None)
        except Refusal as refusal:
            problems = "; ".join(problem for _, _, problem in self._broken.values())
            raise ModelError(f"no version can be served: {problems or refusal}") from None

    def refresh(self) -> None:
        """List the folder, load new versions and drop old ones. If storage fails, nothing changes."""
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
        # A folder may be empty for a moment, so the last version stays.
        if gone and wanted:
            self._loaded = {number: model for number, model in self._loaded.items() if number in wanted}
            self._say(f"version {', '.join(map(str, sorted(gone)))} is no longer served")

    def get(self, version: int | None) -> tuple[int, SavedModel]:
        """Return the number and the model of this version, or of the default one.

        Raises:
            Refusal: the version is not served.
        """
        loaded = self._loaded
        number = self._policy.answering(list(loaded)) if version is None else version
        if number is None or number not in loaded:
            asked = f"Latest({self._name})" if version is None else f"Specific({self._name}, {version})"
            there = ", ".join(map(str, sorted(loaded))) or "none"
            raise Refusal(HTTPStatus.NOT_FOUND, f"Servable not found for request: {asked}. Versions served: {there}.")
        return number, loaded[number]

    def states(self, version: int | None = None) -> list[tuple[int, str, str]]:
        """Return (version, state, problem) of all versions, or of one.

        Raises:
            Refusal: there is no such version.
        """
        rows = [(number, "AVAILABLE", "") for number in self._loaded]
        rows += [(number, "END", problem) for number, (_, _, problem) in dict(self._broken).items()]
        rows = sorted((row for row in rows if version in (None, row[0])), reverse=True)
        if not rows:
            missing = f"Could not find version {version} of model {self._name}"
            raise Refusal(HTTPStatus.NOT_FOUND, "No versions yet" if version is None else missing)
        return rows

    def follow(self, seconds: float, stop: threading.Event) -> None:
        while not stop.wait(seconds):
            try:
                self.refresh()
            except Exception as error:  # requests must be answered in any case
                self._say(f"the versions cannot be listed: {type(error).__name__}: {error}")

    def _load(self, version: Version) -> None:
        from raytf.inference.saved_model import SavedModel  # which imports TensorFlow

        began = time.monotonic()
        try:
            with versions.local_copy(self._models, version) as folder:
                model = SavedModel(folder, self._threads)
            model.warm_up()
        except (RaytfError, OSError) as error:
            self._broken[version.number] = (time.monotonic(), version, str(error))
            self._say(f"version {version.number} cannot be served: {error}")
            return
        self._loaded = {**self._loaded, version.number: model}
        self._say(f"version {version.number} is served, loaded in {time.monotonic() - began:.1f} s")

    def _is_still_broken(self, broken: tuple[float, Version, str], now: Version | None) -> bool:
        at, before, _ = broken
        return now is not None and now.sizes == before.sizes and time.monotonic() - at < _RETRY_SECONDS
