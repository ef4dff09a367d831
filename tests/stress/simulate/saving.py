"""A simulated rank's part of the checkpoints of its generation: a tier for `raytf.checkpoint.commit.Commit`.

It asks who owns the run at the same places as `raytf.checkpoint.durable` and `raytf.checkpoint.cleanup`, and
`raytf.runs.lease_decisions` and `raytf.checkpoint.cleanup` decide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from raytf.checkpoint import cleanup, naming
from raytf.checkpoint.commit import Phase, Votes
from raytf.errors import CheckpointError, RunInUseError, StorageError
from raytf.runs import lease_decisions
from raytf.runs.lease_decisions import Found
from tests.stress.simulate.storage import Request, Steps, Store, Task
from tests.stress.simulate.world import Process, World

#: Seconds after which a write counts as failed.
_DEADLINE = 20.0
#: Seconds that a file takes.
_FILE_SECONDS = (0.0, 0.25, 2.0)
#: Complete checkpoints that stay.
_KEEP = 2


@dataclass(frozen=True)
class Saved:
    """A state to save.

    Attributes:
        step, state: of it.
        name: of the checkpoint.
    """

    step: int
    state: int
    name: str


@dataclass(frozen=True)
class Saver:
    """A rank that saves.

    Attributes:
        world, process: of the rank.
        store: to which it writes.
        rank, world_size: of this worker.
        attempt: name of its generation's.
        owner: the driver's lease by its `id`, in whose name it writes.
        is_over: whether another generation has begun, as the driver says.
        commits: called before a checkpoint is completed, with its step; returns whether the driver has heard it.
        saved: called on rank 0 with the step of a checkpoint once all ranks know that it is complete.
        written, deleting: called with this rank, the lease when it was looked at last, and the name of a checkpoint:
            when that is complete, with whether the driver knows that, and before it is deleted.
    """

    world: World
    process: Process
    store: Store
    rank: int
    world_size: int
    attempt: str
    owner: str
    is_over: Callable[[], bool]
    commits: Callable[[int], bool]
    saved: Callable[[int], None]
    written: Callable[[Saver, Found, str, bool], None]
    deleting: Callable[[Saver, Found, str], None]


class SimulatedTier:
    """A rank's part of the checkpoints of its generation.

    Args:
        saver: the rank.
    """

    def __init__(self, saver: Saver):
        self._saver, self._store = saver, saver.store
        self._save: Saved | None = None
        #: The write under way: None before the first, then whether it has succeeded, once that is known.
        self._result: bool | None = None
        self._began = 0.0
        #: Names of saves that were given up, of those that failed, and of those that are being written.
        self._given_up: set[str] = set()
        self._failed: list[str] = []
        self._writing: set[str] = set()

    def begin(self, save: Saved) -> None:
        self._save, self._began = save, self._saver.world.now
        self._start(save, self._write_share(save))

    def vote(self, phase: Phase) -> Votes:
        if self._save is None or phase is Phase.IDLE:
            return Votes()
        if self._result is None:
            return Votes(failed=float(self._saver.world.now - self._began > _DEADLINE))
        if not self._result:
            return Votes(failed=1)
        return Votes(written=1) if phase is Phase.WRITING else Votes(committed=float(self._saver.rank == 0))

    def commit(self) -> None:
        if self._saver.rank == 0 and self._save is not None:
            self._start(self._save, self._write_manifest(self._save))

    def done(self) -> None:
        save, self._save = self._save, None
        if self._saver.rank == 0 and save is not None:
            self._saver.saved(save.step)
            self._run(self._retain(save.name))

    def abort(self) -> None:
        save, self._save = self._save, None
        if save is None:
            return
        self._given_up.add(save.name)
        if self._saver.rank == 0:
            self._failed.append(save.name)
            self._run(self._remove([name for name in self._failed if name not in self._writing]))

    def give_up(self) -> None:
        """The generation is over."""
        if self._save is not None:
            self._given_up.add(self._save.name)
        self._save = None

    # -- threads -------------------------------------------------------------------------------------------------------

    def _run(self, steps: Steps) -> None:
        Task(self._store, self._saver.process, steps)

    def _start(self, save: Saved, steps: Steps) -> None:
        self._result = None
        self._writing.add(save.name)
        self._run(self._write(save, steps))

    def _write(self, save: Saved, steps: Steps) -> Steps:
        try:
            yield from steps
            result = True
        except (StorageError, RunInUseError, CheckpointError):
            result = False
        self._writing.discard(save.name)
        if self._save is save:
            self._result = result

    def _write_share(self, save: Saved) -> Steps:
        if self._saver.rank == 0:
            yield from self._fence()
        self._check(save)
        yield self._file(partial(self._store.put_share, save.name, self._saver.rank, save.state))

    def _write_manifest(self, save: Saved) -> Steps:
        found = yield from self._fence()
        is_known = self._saver.commits(save.step)
        self._check(save)

        def write() -> None:
            self._store.put_manifest(save.name, save.step, self._saver.world_size)
            self._saver.written(self._saver, found, save.name, is_known)

        yield self._file(write)
        is_whole = yield Request(lambda: 0 in self._store.shares.get(save.name, {}))
        if is_whole and save.name in self._given_up:
            found = yield from self._fence()
        if save.name in self._given_up or not is_whole:
            yield self._deletion(found, save.name)
        self._check(save)

    def _check(self, save: Saved) -> None:
        if save.name in self._given_up:
            raise CheckpointError("given up")

    def _fence(self) -> Any:
        """Return the lease, after a look whether this rank may still write."""
        found = yield Request(self._store.read_lease)
        lease_decisions.check(found, self._saver.owner, "run")
        if self._saver.is_over():
            raise RunInUseError("other workers continue the run")
        return found

    def _file(self, write: Callable[[], None]) -> Request:
        return Request(write, True, self._store.random.choice(_FILE_SECONDS))

    def _deletion(self, found: Found, name: str) -> Request:
        def delete() -> None:
            self._saver.deleting(self._saver, found, name)
            self._store.delete(name)

        return Request(delete, True)

    def _remove(self, names: list[str]) -> Steps:
        try:
            for name in names:
                if not (yield Request(partial(self._store.manifests.__contains__, name))):
                    yield self._deletion(None, name)
        except StorageError:
            pass

    def _retain(self, needed: str) -> Steps:
        try:
            names = yield Request(self._store.list_folders)
            writing = list(self._writing) if self._save is None else [*self._writing, self._save.name]
            complete = yield Request(self._store.list_complete)
            found = yield from self._fence()
            present = self._saver.attempt
            earlier = {naming.attempt_of(name) for name in names if naming.attempt_of(name) < present}
            for old in cleanup.to_delete(
                names, complete, _KEEP, present, needed=[needed], over={present, *earlier}, writing=writing
            ):
                yield self._deletion(found, old)
        except (StorageError, RunInUseError):
            pass
