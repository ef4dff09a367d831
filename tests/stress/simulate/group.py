"""A simulated run: a driver with its arbiter, and workers that train. All decisions are the code's own.

`Arbitration`, `Membership`, `Silence` and `reaching_each_other` decide in the driver, `Member`, `MeetingPoint`,
`Waiting`, `transfer` and `Commit` in the workers. What is made up here is what they stand in: sockets, the sum, and
storage. `ray_train` starts workers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

from raytf.checkpoint import naming
from raytf.checkpoint.commit import Commit, Votes
from raytf.distributed.membership.arbiter_messages import Dismiss, encoded, of_arbiter, of_worker
from raytf.distributed.membership.generations import Generation, node_of
from raytf.distributed.membership.member import (
    DismissedError,
    Member,
    RunOverError,
    step_after_broken_transfer,
    transfer,
)
from raytf.distributed.membership.peer_liveness import BEAT_SECONDS, SILENT_SECONDS
from raytf.driver.arbitration import Arbitration, HangUp, Tell
from raytf.driver.monitor.progress import Progress
from raytf.driver.supervision.liveness import ALL_SILENT_SECONDS, Silence
from raytf.errors import WorkerLostError
from raytf.runs.run_log import new_attempt
from raytf.runs.status import Status
from tests.stress.simulate.arithmetic import SHARDS, gradient, own_shards, updated
from tests.stress.simulate.checks import REFUSE_SECONDS, Checks
from tests.stress.simulate.copies import Copied, Copies, CopyFlags
from tests.stress.simulate.hangs import HEAD
from tests.stress.simulate.keepers import Memory
from tests.stress.simulate.lookout import Lookout
from tests.stress.simulate.meeting import Call, Meeting
from tests.stress.simulate.ownership import SimulatedLease
from tests.stress.simulate.ownership_checks import OwnershipChecks
from tests.stress.simulate.ray_train import RayTrain
from tests.stress.simulate.restoring import Restored, Restoring
from tests.stress.simulate.saving import Saved, Saver, SimulatedTier
from tests.stress.simulate.storage import Steps, Store, Task
from tests.stress.simulate.supervision import SupervisionChecks
from tests.stress.simulate.world import Connection, Network, Process, World

#: Seconds between two looks of the arbiter, and looks for which members may be late to leave.
_LOOK_SECONDS, _LEAVE_LOOKS = 0.5, 600
#: Seconds between two tries to connect, and between two looks of a rank that meets.
_TRY_SECONDS = 0.25
#: Steps between two checkpoints, and seconds between two looks at a copy that others wait for.
_SAVE_EVERY, _SETTLE_SECONDS = 4, 0.1


class Flags(NamedTuple):
    """What a rank sends with a step: its part of the gradients, its votes about checkpoints and copies, and whether the
    generation pauses."""

    part: int
    votes: Votes
    pauses: bool
    copies: CopyFlags


class Driver:
    """The driver's process: it owns the run, and its arbiter answers the workers.

    Args:
        run: that it drives.
        number: of drivers so far.
        host: on which it runs.

    Attributes:
        began: when its command was given.
        is_concluding: whether its workers have come to the end of the run.
        attempts: names of the generations that have begun to train, by number.
        earlier: names of the attempts of drivers before it.
        progress: what it knows of checkpoints.
    """

    def __init__(self, run: Run, number: int, host: str):
        self.run, self.number, self.began = run, number, run.world.now
        self.attempts: dict[int, str] = {}
        self.earlier: list[str] = []
        self.progress = Progress((), 0.0)
        self.is_concluding = False
        self.process = Process(run.world, f"driver{number}", host)
        self.lease = SimulatedLease(run, self)
        silence = Silence(SILENT_SECONDS / _LOOK_SECONDS, ALL_SILENT_SECONDS / _LOOK_SECONDS)
        self.arbiter = Arbitration(silence, _LEAVE_LOOKS, SHARDS, REFUSE_SECONDS / _LOOK_SECONDS)
        self.workers: dict[str, Worker] = {}

    def begin(self) -> None:
        """Look after workers, now that the run is this driver's."""
        self.process.after(_LOOK_SECONDS, self._look)

    def saved(self, step: int | None) -> None:
        """Rank 0 has sent a status; `step` is that of the newest checkpoint."""
        self.progress.update(Status(step or 0, 0, 0, 0, 0, checkpoint=step), self.run.world.now)

    def accept(self, worker: Worker) -> None:
        """A worker has connected and is greeted."""
        if worker.member.name in self.workers:
            raise AssertionError("two workers have one name")
        self.workers[worker.member.name] = worker
        self.arbiter.come(worker.member.name)
        worker.link.send(0, self.arbiter.greeting())

    def hear(self, worker: Worker, line: bytes) -> None:
        """A worker has sent a message."""
        if self.workers.get(worker.member.name) is worker:
            self._carry_out(self.arbiter.hear(worker.member.name, of_worker(line)))

    def dismiss(self, names: Sequence[str], after: Sequence[str]) -> None:
        """Have workers leave for good once others have come, as `raytf.driver.ray_train.scaling_policy` does."""
        self.run.notices |= {name: list(after) for name in names}
        self.arbiter.come("departures")
        self._carry_out(self.arbiter.hear("departures", Dismiss(tuple(names), tuple(after))))
        self._carry_out(self.arbiter.lose("departures"))

    def lose(self, worker: Worker) -> None:
        """The connection with a worker has ended."""
        if self.workers.pop(worker.member.name, None) is not None:
            self._carry_out(self.arbiter.lose(worker.member.name))

    def _look(self) -> None:
        for name, worker in self.workers.items():
            if self.run.network.hears(self.process, worker.process):
                self.arbiter.hear_beat(name)
        self._carry_out(self.arbiter.poll())
        self.process.after(_LOOK_SECONDS, self._look)

    def _carry_out(self, commands: Sequence[Tell | HangUp]) -> None:
        for command in commands:
            if isinstance(command, HangUp):
                worker = self.workers.pop(command.name, None)
                if worker is not None:
                    self.run.world.tell(f"the arbiter lets {command.name} go")
                    worker.link.close(0)
                continue
            if "generation" in command.message:
                self.run.checks.began(command.message["generation"], self)
            line = encoded(command.message | {"nonce": "-"})
            for name in command.names:
                if name in self.workers:
                    self.workers[name].link.send(0, line)


class Worker:
    """A worker's process.

    Args:
        run: that it belongs to.
        driver: that has started it.
        name: of the worker; its host is what comes before the last hyphen.
        wanted: how many are started together.
        order: of these.
    """

    def __init__(self, run: Run, driver: Driver, name: str, wanted: int, order: int):
        self.run, self.driver, self.member = run, driver, Member(name)
        self.process = Process(run.world, name, node_of(name))
        self.wanted, self._order, self.started_at = wanted, order, run.world.now
        self.step, self.state, self.has_state_since, self.is_taking = -1, 0, 0.0, False
        #: What it is about: "asking", "meeting", "summing", "restoring", "computing", "ended".
        self.phase = "asking"
        self.why, self.hangs_alone = "", True
        self.generation: Generation | None = None
        self.seconds = run.step_seconds
        self._meetings = 0
        self._tier: SimulatedTier | None = None
        self._copies: Copies | None = None
        #: Step of the newest checkpoint, as far as it is known.
        self._durable: int | None = None
        #: Name of the present generation's attempt, and its saves so far.
        self._attempt, self._serial = "", 0
        self._meeting: Meeting | None = None
        #: Calls of others that wait to be answered.
        self._calls: list[Call] = []
        # The present sum: what it is, what to do with it, what has come of each, and looks at who is awaited.
        self._sum: Any = None
        self._then: Callable[[dict[int, Any]], None] = lambda found: None
        self._parts: dict[Any, dict[int, Any]] = {}
        self._gone: set[int] = set()
        self._lookout: Lookout | None = None
        hear = partial(driver.hear, self), self._hear
        ended = partial(driver.lose, self), self._left_behind
        self.link = Connection(run.network, run.world, (driver.process, self.process), hear, ended)
        run.network.send(self.process, driver.process, driver.accept, self)

    @property
    def address(self) -> str:
        """Where it listens now."""
        return f"{self.member.name}.{self._meetings}:1"

    @property
    def has_state(self) -> bool:
        """Whether it can give its state to others."""
        return self.phase != "ended" and self.process.is_alive and self.step >= 0

    @property
    def rank(self) -> int:
        """Its rank in the present generation."""
        assert self.generation is not None
        return self.generation.members.index(self.member.name)

    @property
    def key(self) -> tuple[int, int]:
        """What the members of the present generation know, and nobody else."""
        return self.driver.number, self.member.number

    def die(self) -> None:
        """The process is gone; its kernel closes what no child holds."""
        child = self.process.has_child
        peers = self._peers()
        sender = Process(self.run.world, self.process.name, self.process.host)  # its kernel
        self.process.die()
        if not child:
            self._hang_up(peers, sender)
            self.link.close(1)
        self._end("killed")

    # -- the arbiter ---------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        self.phase, self._meetings, self._calls = "asking", self._meetings + 1, []
        self.run.listeners[self.address] = self
        if self.member.has_joined:
            self._tell(self.member.leaving(self.address, self.step))
        else:
            self._tell(self.member.joining(self.address, self.wanted, self._order))

    def want(self, wanted: int) -> None:
        """Another number of workers is started together."""
        self.wanted = wanted
        self._tell({"wanted": wanted})

    def _tell(self, message: dict[str, Any]) -> None:
        self.link.send(1, encoded(message))

    def _hear(self, message: dict[str, Any] | bytes) -> None:
        if isinstance(message, dict):  # the greeting
            if message["over"] is not None:
                self._end("the run is over")
            else:
                self._ask()
            return
        news = of_arbiter(message, self.member.name)
        self.member.hear(news)
        if not news.answer or self.phase == "ended":
            return
        if self.phase != "asking":
            if "over" not in news.answer:  # told to all that have joined
                self._end(str(news.answer.get("end", "an answer to no question")))
            return
        try:
            self.generation = self.member.take(news.answer)
        except (RunOverError, DismissedError) as planned:
            self._end(str(planned))
        except WorkerLostError as error:
            self._end(str(error))
        else:
            self.run.world.tell(f"{self.member.name} is rank {self.rank} of generation {self.member.number}")
            self._meet()

    def _left_behind(self) -> None:
        self.member.is_lost = True
        self._end("the connection with the driver's arbiter is lost")

    def _end(self, why: str) -> None:
        if self.phase == "ended":
            return
        peers = self._peers()
        self.phase, self.why = "ended", why
        self.run.world.tell(f"{self.member.name} ends: {why}")
        if self._tier is not None:
            self._tier.give_up()
        if self.process.is_alive:
            self._hang_up(peers, self.process)
            self.link.close(1)
            self.process.die()
        self.run.ended(self)

    # -- meeting -------------------------------------------------------------------------------------------------------

    def _meet(self) -> None:
        self.phase, self._gone = "meeting", set()
        self.is_taking = False
        self._parts, self._sum = {}, None
        self.run.comes_to("meeting", self)
        self._meeting = Meeting(self, self._gone)
        self._look_at_meeting(self._meetings)

    def _look_at_meeting(self, token: int) -> None:
        if token == self._meetings and self.phase == "meeting":
            self.process.after(_TRY_SECONDS, self._look_at_meeting, token)
            self._advance_meeting()

    def be_called(self, call: Call) -> None:
        """Another rank has connected."""
        self._calls.append(call)
        self._advance_meeting()

    def be_answered(self, key: tuple[int, int], rank: int, purpose: int) -> None:
        """A rank that this one has called has answered."""
        if self.phase == "meeting" and key == self.key and self._meeting is not None:
            self._meeting.answered(rank, purpose)
            self._advance_meeting()

    def be_hung_up_on(self, key: tuple[int, int], rank: int) -> None:
        """A rank has hung up."""
        if self.phase in ("asking", "ended") or key != self.key:
            return
        self._gone.add(rank)
        self._advance_meeting()
        if self.phase == "summing" and rank in self.awaited():
            self._broken()

    def _advance_meeting(self) -> None:
        if self.phase != "meeting" or self._meeting is None:
            return
        try:
            has_met = self._meeting.advance(self._calls)
        except OSError as error:
            self._not_met(getattr(error, "ranks", ()))
        else:
            if has_met:
                self._lookout = Lookout(self, self._meeting.processes)
                self._add("seats", None, self._met)
                self.run.comes_to("connected", self)

    def _met(self, seats: dict[int, Any]) -> None:
        """All ranks have told each other where they compute, as `MultiWorkerGroup.meet_again` has them do."""
        self.member.met()
        self.run.checks.met(self)
        self._add("held", Restored(self.step, self.state, self._durable), self._transfer)

    def _not_met(self, unreached: Collection[int], are_connected: bool = False) -> None:
        assert self.generation is not None
        self.run.world.tell(f"{self.member.name} has not met the others; unreached: {sorted(unreached)}")
        try:
            self.member.not_met(self.generation, unreached, are_connected)
        except WorkerLostError as error:
            self._end(str(error))
        else:
            self._leave()

    def _leave(self) -> None:
        if self._tier is not None:
            self._tier.give_up()
        self._hang_up(self._peers(), self.process)
        for call in self._calls:
            self.run.network.send(self.process, call.caller.process, call.caller.be_hung_up_on, call.key, call.called)
        self.run.listeners.pop(self.address, None)
        self._ask()

    def _peers(self) -> list[Worker]:
        if self.generation is None or self.phase in ("asking", "ended"):
            return []
        others, key = map(self.run.listeners.get, self.generation.addresses), self.key
        return [other for other in others if other is not None and other is not self and other.key == key]

    def _hang_up(self, peers: Sequence[Worker], sender: Process) -> None:
        if self.generation is None:
            return
        for peer in peers:
            self.run.network.send(sender, peer.process, peer.be_hung_up_on, self.key, self.rank)

    # -- sums ----------------------------------------------------------------------------------------------------------

    def _add(self, what: Any, part: Any, then: Callable[[dict[int, Any]], None]) -> None:
        """Send a part to all members, and go on once those of all have come."""
        self.phase, self._sum, self._then = "summing", what, then
        send, key, rank = self.run.network.send, self.key, self.rank
        self._parts.setdefault(what, {})[rank] = part
        for peer in self._peers():
            send(self.process, peer.process, peer.be_sent, key, what, rank, part)
        if self._gone and self._gone & self.awaited():
            self._broken()
            return
        assert self._lookout is not None
        self._lookout.begin()
        self.process.after(BEAT_SECONDS, self._look_at_sum, what, key)
        self._check_sum()

    def be_sent(self, key: tuple[int, int], what: Any, rank: int, part: Any) -> None:
        """Another rank's part of a sum has come."""
        if key != self.key or self.phase in ("asking", "ended"):
            return
        self._parts.setdefault(what, {})[rank] = part
        if self.phase == "summing" and what == self._sum:
            self._check_sum()

    def awaited(self) -> set[int]:
        """Return the ranks whose parts of the present sum have not come."""
        assert self.generation is not None
        return set(range(len(self.generation.members))) - self._parts.get(self._sum, {}).keys()

    def _check_sum(self) -> None:
        assert self.generation is not None
        if len(self._parts[self._sum]) == len(self.generation.members):
            parts = self._parts.pop(self._sum)
            self._sum, self.phase = None, "computing"
            self._then(parts)

    def _look_at_sum(self, what: Any, key: tuple[int, int]) -> None:
        """Whether processes that are waited for are lost."""
        if self.phase != "summing" or self._sum != what or key != self.key:
            return
        assert self._lookout is not None
        if self._lookout.look(self.awaited()) is not None:
            self._broken()
        else:
            self.process.after(BEAT_SECONDS, self._look_at_sum, what, key)

    @property
    def overdue(self) -> list[str]:
        """Processes of its host that it waits for although they ended long ago."""
        is_waiting = self.phase == "summing" and self._lookout is not None
        return self._lookout.overdue(self.awaited()) if is_waiting and self._lookout is not None else []

    def _broken(self) -> None:
        """A sum has failed."""
        assert self.generation is not None
        self.run.world.tell(f"{self.member.name} misses a part of {self._sum} after step {self.step}")
        if self._sum == "seats":
            self._not_met((), are_connected=True)
            return
        if isinstance(self._sum, str):
            self.step = step_after_broken_transfer(self.step, self.generation.steps)
        self._leave()

    # -- the state -----------------------------------------------------------------------------------------------------

    def _transfer(self, held: dict[int, Any]) -> None:
        """All have met: those that are behind get the state."""
        assert self.generation is not None
        steps = self.generation.steps
        if max(steps) < 0:
            if self.rank == 0:
                self.phase = "restoring"
                Task(self.run.store, self.process, self._find(self.key))
            else:
                self._add("restored", None, self._restore)
            return
        who = transfer(steps)
        seconds = self.run.world.random.uniform(0.01, 1.0) if self.rank in who.takers else 0.0
        if self.rank in who.takers:
            self.state, self.is_taking = -1, True  # until all of the other one's is there
        self.phase = "computing"
        self.process.after(seconds, self._take, self.key, held[who.giver])

    def _take(self, key: tuple[int, int], held: Restored) -> None:
        if key == self.key and self.phase == "computing":
            self._add("taken", held.step, lambda parts: self._begin(held))

    def _find(self, key: tuple[int, int]) -> Steps:
        """Find the newest state."""
        restoring = Restoring(self)
        yield from restoring.find()
        found = restoring.found
        if key == self.key and self.phase == "restoring" and found is not None:
            self.run.world.tell(f"{self.member.name} restores step {found.step} from {found.name or 'memory'}")
            self.run.checks.restored(self, found.name)
            self._add("restored", found, self._restore)

    def _restore(self, told: dict[int, Any]) -> None:
        self._begin(told[0])

    def _begin(self, found: Restored) -> None:
        """Train from a step on."""
        assert self.generation is not None
        self.step, self.state, self._durable = found.step, found.state, found.durable
        self.has_state_since = self.run.world.now
        self.is_taking = False
        self.run.checks.took(self)
        size, rank = len(self.generation.members), self.rank
        driver, checks, owner = self.driver, self.run.ownership, self.driver.lease.owner
        number = self.member.number
        if number not in driver.attempts:
            driver.attempts[number] = new_attempt(number=(owner["term"], number))
            self.run.attempts.append(driver.attempts[number])
        self._serial, self._attempt = 0, driver.attempts[number]
        place = self.run.world, self.process, self.run.store, rank, size
        told = self._is_over, self._commits, self._has_saved
        saver = Saver(*place, self._attempt, owner["id"], *told, checks.written, checks.deleting)
        self._tier = SimulatedTier(saver)
        self._commit: Commit[Saved] = Commit(self._tier, size)
        self._saved = self.step
        mates = [n for n, name in enumerate(self.generation.members) if node_of(name) == self.process.host]
        self._copies = Copies(self, self._attempt, (mates.index(rank), len(mates)))
        if rank == 0:
            self._tell_durable()
        self._go_on()

    def _go_on(self) -> None:
        if self.step >= self.run.end_step:
            self._add("result", self.state, self._finish)
            return
        self.phase = "computing"
        self.process.after(self.seconds * self.run.world.random.uniform(0.8, 1.2), self._computed, self.key)

    def _computed(self, key: tuple[int, int]) -> None:
        if key != self.key or self.phase != "computing":
            return
        assert self.generation is not None
        step = self.step + 1
        part = gradient(step, own_shards(self.rank, len(self.generation.members)))
        votes = self._commit.votes()
        if self.rank == 0 and self._commit.is_idle and step - self._saved >= _SAVE_EVERY:
            votes += Votes(want=1)
        pauses = self.rank == 0 and self.member.is_pause_wanted
        assert self._copies is not None
        self._add(step, Flags(part, votes, pauses, self._copies.flags(step)), self._update)

    def _update(self, parts: dict[int, Any]) -> None:
        self.step += 1
        self.state = updated(self.state, self.step, sum(flags.part for flags in parts.values()))
        self.run.checks.trained(self)
        total = sum((flags.votes for flags in parts.values()), Votes())
        pauses = self.step < self.run.end_step and any(flags.pauses for flags in parts.values())
        copies, asked = self._copies, [flags.copies for flags in parts.values()]
        assert copies is not None
        copies.hear(sum(flags.unsealed for flags in asked), self.step)
        # A copy in memory must never be older than the state on storage.
        is_wanted = any(flags.wanted for flags in asked) or (self._commit.is_idle and bool(total.want))
        if is_wanted and copies.turns.is_pending(self.step):
            self._settle(self.key, total, pauses)
        else:
            self._updated(total, pauses, is_wanted)

    def _settle(self, key: tuple[int, int], total: Votes, pauses: bool) -> None:
        """Wait until the newest copy is complete on all ranks, or has failed on one."""
        copies = self._copies
        if key != self.key or self.phase != "computing" or copies is None:
            return

        def settled(parts: dict[int, Any]) -> None:
            copies.settled(sum(parts.values()))
            self._updated(total, pauses, is_wanted=True)

        if copies.is_settled:
            self._add(("settled", self.step), int(copies.has_failed), settled)
        else:
            self.process.after(_SETTLE_SECONDS, self._settle, key, total, pauses)

    def _updated(self, total: Votes, pauses: bool, is_wanted: bool) -> None:
        if is_wanted and self._copies is not None:
            self._copies.make(Copied(self.step, self.state, self._durable))
        self._commit.advance(total, self._new_save)
        if pauses:
            self._leave()
        else:
            self._go_on()

    def _commits(self, step: int) -> bool:
        """Tell the driver that a checkpoint is about to be complete; returns whether it has heard it."""
        is_heard = self.run.network.hears(self.process, self.driver.process)
        if is_heard:
            self.driver.progress.commits(step)
        return is_heard

    def _has_saved(self, step: int) -> None:
        self._durable = max(self._durable or 0, step)
        self._tell_durable()

    def _tell_durable(self) -> None:
        if self.run.network.hears(self.process, self.driver.process):
            self.driver.saved(self._durable)

    def _new_save(self) -> Saved:
        self._saved = self.step
        self._serial += 1
        return Saved(self.step, self.state, naming.name_of(self.step, self._attempt, self._serial))

    def _is_over(self) -> bool:
        """Whether another generation trains, as far as the driver says so."""
        is_answered = self.run.network.hears(self.process, self.driver.process)
        return is_answered and max(self.driver.attempts) > self.member.number

    def _finish(self, results: dict[int, Any]) -> None:
        self._tell({"over": self.state})
        self.run.finished(self)
        self._end("the run is over")


class Run:
    """A run with its driver and workers.

    Args:
        world: in which it is.
        network: that carries messages.
        hosts: names of those that workers may be started on.
        workers: that are wanted.
        slots: of each host, for a worker each.
        end_step: after which the run is over.
        step_seconds: of computing a step.

    Attributes:
        noticed: hosts that are about to go.
        memory: the keepers of copies.
        attempts: names of all generations that have begun to train.
    """

    def __init__(
        self,
        world: World,
        network: Network,
        hosts: Sequence[str],
        workers: int,
        slots: int,
        end_step: int,
        step_seconds: float,
    ):
        self.world, self.network, self.hosts, self.target = world, network, list(hosts), workers
        self.slots, self.noticed, self._hosts = slots, set[str](), len(hosts)
        self.end_step, self.step_seconds = end_step, step_seconds
        self.checks, self.supervision = Checks(self), SupervisionChecks(self)
        self.memory, self.attempts = Memory(self, world.memory), list[str]()
        self.store = Store(world, world.storage)
        self.ownership = OwnershipChecks(self)
        #: Who listens at an address.
        self.listeners: dict[str, Worker] = {}
        self.workers: list[Worker] = []
        #: What happens when the next worker begins to meet the others, and when the next one is connected with all.
        self.at: dict[str, list[Callable[[Worker], None]]] = {"meeting": [], "connected": []}
        self.result: int | None = None
        #: Who has notice -> who comes before it leaves.
        self.notices: dict[str, list[str]] = {}
        self._started = 0
        self.has_given_up = False
        #: Of all commands so far. The last one that has taken the run is `driver`.
        self.drivers: list[Driver] = []
        self.driver = self.give_command(HEAD)
        self.train = RayTrain(self, self.driver)

    @property
    def is_over(self) -> bool:
        """Whether the run has its result, or has given up."""
        return self.result is not None or self.has_given_up

    @property
    def living(self) -> list[Worker]:
        """Workers whose processes have not ended."""
        return [worker for worker in self.workers if worker.phase != "ended"]

    def finished(self, worker: Worker) -> None:
        """A rank has come to the end of the run; the driver writes the result."""
        self.checks.finished(worker.state)
        worker.driver.is_concluding = True
        worker.driver.process.do(worker.driver.lease.conclude, partial(setattr, self, "result", worker.state))

    def comes_to(self, moment: str, worker: Worker) -> None:
        """A worker has come to a moment for which faults wait."""
        while self.at[moment]:
            self.at[moment].pop()(worker)

    def give_command(self, host: str) -> Driver:
        """Start a driver on a host, which tries to take the run."""
        driver = Driver(self, len(self.drivers) + 1, host)
        self.drivers.append(driver)
        self.world.tell(f"{driver.process.name} is started on {host}")
        driver.lease.begin()
        return driver

    def owned(self, driver: Driver) -> None:
        """A driver has taken the run."""
        self.driver, self.checks.last_fault = driver, self.world.now
        driver.earlier = list(self.attempts)
        self.train = RayTrain(self, driver)
        for worker in self.living:
            if not worker.driver.process.is_alive:  # Ray ends what belongs to a driver that is gone
                self.train.kill(worker)
        self.supervision.new_driver()
        driver.begin()
        self.train.begin()

    def command_ended(self, driver: Driver, why: str, seconds: float = 5.0) -> None:
        """A driver's process ends or dies, and the same command is given again after some seconds."""
        self.world.tell(f"{driver.process.name} ends: {why}")
        driver.process.die()
        for worker in driver.workers.values():
            worker.link.close(0)
        self.world.after(seconds, self._give_again, driver.process.host)

    def start_worker(self, host: str, wanted: int, order: int) -> Worker:
        """Ray starts a worker on a host, which joins."""
        self.supervision.started(host)
        self._started += 1
        self.workers.append(Worker(self, self.driver, f"{host}-{self._started}", wanted, order))
        return self.workers[-1]

    def ended(self, worker: Worker) -> None:
        """A worker's process has ended."""
        if not worker.process.has_child:  # which also has the socket that listens
            self.listeners.pop(worker.address, None)
        self.checks.ended(worker)
        self.train.ended(worker)

    def give_up(self) -> None:
        """The supervisor makes no further attempt."""
        self.world.tell("the run gives up")
        self.has_given_up = True

    def room(self, hosts: Collection[str]) -> int:
        """How many of the wanted workers some hosts can run."""
        return min(self.target, self.slots * len(hosts))

    def new_host(self) -> str:
        """Return the name of another host, which is there now."""
        self._hosts += 1
        self.hosts.append(f"h{self._hosts - 1}")
        return self.hosts[-1]

    def _give_again(self, host: str) -> None:
        """Give the command again on a host, unless a driver drives the run or tries to on that host."""
        is_there = any(driver.process.is_alive and driver.process.host == host for driver in self.drivers)
        if not (self.is_over or is_there or self.driver.process.is_alive):
            self.give_command(host)
