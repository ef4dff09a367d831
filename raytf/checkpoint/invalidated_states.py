"""States of a run that are no longer valid ("void"), because a machine that took part in them computed wrongly.

A note in the run's folder lists the last valid steps, each with the attempts whose later states are void. The driver's
monitor has it, too, so that groups can start without storage. Void copies are skipped, and void checkpoints deleted.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from raytf.checkpoint import manifest, naming
from raytf.storage import untrusted_json
from raytf.storage.storage import Storage

FILE = "void.json"
_SHAPE = untrusted_json.record(
    {
        "states": untrusted_json.each(
            untrusted_json.record({"after": untrusted_json.whole, "attempts": untrusted_json.each(untrusted_json.text)})
        )
    }
)


@dataclass(frozen=True)
class VoidStates:
    """Steps, and names of the attempts whose states after that step are no longer valid."""

    entries: tuple[tuple[int, frozenset[str]], ...] = ()

    def holds(self, step: int, attempt: str) -> bool:
        """Return whether the state of a step that an attempt made is void."""
        return any(step > after and attempt in attempts for after, attempts in self.entries)

    def among(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if self.holds(naming.split_name(name)[0], naming.attempt_of(name))]

    @classmethod
    def of(cls, entries: Sequence[tuple[int, Sequence[str]]]) -> VoidStates:
        return cls(tuple((after, frozenset(attempts)) for after, attempts in entries))

    def plain(self) -> list[tuple[int, list[str]]]:
        return [(after, sorted(attempts)) for after, attempts in self.entries]

    def and_after(self, step: int, attempts: Collection[str]) -> VoidStates:
        return VoidStates((*self.entries, (step, frozenset(attempts))))


def read(run: Storage) -> VoidStates:
    """Return the void states in a run's note; none if it has no note.

    Raises:
        DamagedFileError: the note cannot be parsed.
        StorageError: storage fails.
    """
    note = untrusted_json.read(run, FILE, _SHAPE)
    states = [] if note is None else note["states"]
    return VoidStates.of([(entry["after"], entry["attempts"]) for entry in states])


def write(run: Storage, states: VoidStates) -> None:
    """Replace the note in a run's folder."""
    entries = [{"after": after, "attempts": attempts} for after, attempts in states.plain()]
    run.put(FILE, json.dumps({"states": entries}).encode())


def sweep(run: Storage, states: VoidStates) -> list[str]:
    """Delete void checkpoints, and return their names."""
    gone = states.among(manifest.list_complete(run))
    for name in gone:
        manifest.delete(run, name)
    return gone
