"""The tiers to which one rank's checkpoints go, and from which the newest is restored when a run is resumed."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raytf.checkpoint import variables
from raytf.checkpoint.durable import DurableTier, Keep
from raytf.checkpoint.manifest import Checkpoint
from raytf.checkpoint.memory import MemoryTier
from raytf.checkpoint.naming import GroupAttempt
from raytf.checkpoint.restore import Restorer
from raytf.config.identity import beside
from raytf.errors import RunInUseError, RunMismatchError
from raytf.runs.lease import check_owner
from raytf.storage.storage import Storage
from raytf.training import run_identity
from raytf.training.process.monitor_client import MonitorClient
from raytf.training.saving.checkpoint_policy import CheckpointPolicy

if TYPE_CHECKING:
    from raytf.training.session import RankSession

#: For the driver to say whether another group has begun, and to hear of a commit.
_ANSWER_SECONDS = 5.0


@dataclass(frozen=True)
class Tiers:
    """Both tiers of a run's checkpoints.

    Attributes:
        memory: copies in the memory of the run's nodes.
        durable: checkpoints on storage.
        policy: when to save, and which state is the best.
        restorer: reads the newest state from either tier.
    """

    memory: MemoryTier
    durable: DurableTier
    policy: CheckpointPolicy
    restorer: Restorer


def open_tiers(session: RankSession) -> Tiers:
    """Open this rank's tiers; nothing is read yet."""
    job, checkpoints, reporter, place = session.job, session.config.checkpoints, session.reporter, session.place
    start = GroupAttempt(place.attempt, session.group.rank, session.group.world_size, place.earlier, job.lease)
    memory = MemoryTier(
        job.run_uri,
        session.group,
        start,
        0 if session.config.strategy.has_servers else checkpoints.snapshot_every_steps,
        job.monitor.handle,
        reporter.say_here,
        place.on_node,
    )
    policy = CheckpointPolicy.of(checkpoints)
    durable = DurableTier(
        session.storage,
        start,
        Keep(checkpoints.keep, policy.goal),
        reporter.say_here,
        fence=functools.partial(check_current, session.storage, job.lease, place.attempt, job.monitor),
        late=reporter.upload_anew,
        commits=functools.partial(job.monitor.commits, seconds=_ANSWER_SECONDS),
    )
    restorer = Restorer(memory, durable, session.group, reporter.say, place.void)
    return Tiers(memory, durable, policy, restorer)


def check_current(run: Storage, owner: str, attempt: str, monitor: MonitorClient) -> None:
    """Do nothing as long as a run is its owner's, and no other group of workers has taken the place of an attempt.

    A rank that was frozen continues what it had begun: it must not write into folders that the next group has deleted.

    Raises:
        RunInUseError: the run, or its newest attempt, is another one's.
        StorageError: who owns the run cannot be known.
    """
    check_owner(run, owner)
    if monitor.is_over(attempt, _ANSWER_SECONDS):
        raise RunInUseError(
            f"other workers continue run {run.locate('')}: this one was suspended or cut off, and writes no more."
        )


def newest(session: RankSession, tiers: Tiers) -> Checkpoint | None:
    """Return the state from which the run is resumed, the same one on every rank; None for a new run.

    Raises:
        RunMismatchError: the run was made with other settings.
        CheckpointError: there are checkpoints, and none of them can be read.
    """
    checkpoint = tiers.restorer.find(functools.partial(_check_identity, session))
    if checkpoint is None and session.place.earlier:
        session.reporter.say("nothing had been saved when the run ended last: it begins again at step 0")
    return checkpoint


def _check_identity(session: RankSession, checkpoint: Checkpoint) -> None:
    before, now = checkpoint.document.identity, session.identity
    difference = run_identity.resume_mismatch(before, now)
    if difference:
        raise RunMismatchError(
            f"run {session.config.run_name!r} in storage was made with other settings: {difference}. "
            f"Use the same settings as before. {beside(session.config)}"
        )
    if before.get(run_identity.CODE, now[run_identity.CODE]) != now[run_identity.CODE]:
        session.reporter.say(
            "the code of the model, of its loss or of a layer has changed: the run continues with the new code"
        )


def restore(session: RankSession, chosen: Checkpoint) -> None:
    """Restore the model, its optimizer, and the program's variables from a checkpoint."""
    own = {name: value for name, value in chosen.tensors.items() if not name.startswith("callback/")}
    # Earlier versions saved no variables of the program, which then keep the values that the program gives them.
    new = [name for name in session.named if name.startswith(variables.PROGRAM_PREFIX) and name not in own]
    variables.restore({name: v for name, v in session.named.items() if name not in new}, own)
