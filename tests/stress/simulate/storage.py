"""Simulated storage, and a rank's part of a checkpoint on it: a tier for `raytf.checkpoint.commit.Commit`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from raytf.checkpoint.tier import Phase, Votes
from tests.stress.simulate.world import Process, World

#: Seconds after which a write counts as failed.
_DEADLINE = 20.0


@dataclass
class Store:
    """What all processes see of storage.

    Attributes:
        owner: incarnation of the driver that owns the run.
        shares: name of a checkpoint -> rank -> state of which it is a share.
        manifests: name of a checkpoint -> (step, number of shares).
        is_out: whether storage refuses.
        is_lossy: whether it loses the answers to writes that were made.
        written: called with the name of a checkpoint when it was committed.
    """

    owner: int = 0
    shares: dict[str, dict[int, int]] = field(default_factory=dict)
    manifests: dict[str, tuple[int, int]] = field(default_factory=dict)
    is_out: bool = False
    is_lossy: bool = False
    written: Callable[[str], None] = lambda name: None

    def newest(self) -> tuple[int, str] | None:
        """Return step and name of the newest checkpoint."""
        return max(((step, name) for name, (step, _) in self.manifests.items()), default=None)


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


class SimulatedTier:
    """A rank's part of the checkpoints of its generation.

    Args:
        world, process: of the rank.
        store: to which it writes.
        rank, world_size: of this worker.
        incarnation: of the driver whose run it is.
    """

    def __init__(self, world: World, process: Process, store: Store, rank: int, world_size: int, incarnation: int):
        self._world, self._process, self._store = world, process, store
        self._rank, self._world_size, self._incarnation = rank, world_size, incarnation
        self._save: Saved | None = None
        #: The write under way: None before the first, then whether it has succeeded, once that is known.
        self._result: bool | None = None
        self._began = 0.0
        self.is_given_up = False

    def begin(self, save: Saved) -> None:
        self._save, self._result, self._began = save, None, self._world.now

        def write() -> None:
            self._store.shares.setdefault(save.name, {})[self._rank] = save.state

        self._write(write, save)

    def vote(self, phase: Phase) -> Votes:
        if self._save is None or phase is Phase.IDLE:
            return Votes()
        if self._result is None:
            return Votes(failed=float(self._world.now - self._began > _DEADLINE))
        if not self._result:
            return Votes(failed=1)
        return Votes(written=1) if phase is Phase.WRITING else Votes(committed=float(self._rank == 0))

    def commit(self) -> bool:
        save = self._save
        if self._rank == 0 and save is not None:
            self._result = None

            def write() -> None:
                self._store.manifests[save.name] = (save.step, self._world_size)
                self._store.written(save.name)

            self._write(write, save)
        return False

    def done(self) -> None:
        self._save = None

    def abort(self) -> None:
        save, self._save = self._save, None
        if self._rank == 0 and save is not None and not self._store.is_out and self._store.owner == self._incarnation:
            self._store.manifests.pop(save.name, None)
            self._store.shares.pop(save.name, None)

    def give_up(self) -> None:
        """The generation is over."""
        self._save, self.is_given_up = None, True

    def _write(self, write: Callable[[], None], save: Saved) -> None:
        seconds = self._world.random.choice((0.05, 0.3, 2.0))
        self._process.after(seconds, self._write_now, write, save)

    def _write_now(self, write: Callable[[], None], save: Saved) -> None:
        is_fenced = self._store.owner != self._incarnation  # as `check_owner`
        if not is_fenced and not self._store.is_out and not self.is_given_up and self._save is save:
            write()
        if self._save is save:
            self._result = not (is_fenced or self._store.is_out or self._store.is_lossy)
