"""A simulated run: a driver with its arbiter, and workers that train. All decisions are the code's own.

`Arbitration`, `Membership`, `Silence` and `reaching_each_other` decide in the driver, `Member`, `transfer` and `Commit`
in the workers. What is made up here is what they stand in: sockets, the sum, and storage. `ray_train` starts workers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from raytf.checkpoint.commit import Commit
from raytf.checkpoint.tier import Votes
from raytf.distributed.arbiter_messages import Dismiss, of_arbiter, of_worker
from raytf.distributed.heartbeat_sender import BEAT_SECONDS, SILENT_SECONDS
from raytf.distributed.member import DismissedError, Member, RunOverError, step_after_broken_transfer, transfer
from raytf.distributed.membership import Generation, node_of
from raytf.distributed.peer_connections import MEET_SECONDS, REACH_SECONDS
from raytf.distributed.sealed_lines import encoded
from raytf.driver.arbitration import Arbitration, HangUp, Tell
from raytf.driver.silence import ALL_SILENT_SECONDS, Silence
from raytf.errors import WorkerLostError
from tests.stress.simulate.arithmetic import SHARDS, expected, gradient, own_shards, updated
from tests.stress.simulate.checks import Checks
from tests.stress.simulate.ray_train import HEAD, RayTrain
from tests.stress.simulate.storage import Saved, SimulatedTier, Store
from tests.stress.simulate.supervision import SupervisionChecks
from tests.stress.simulate.world import Connection, Network, Process, World

#: Seconds between two looks of the arbiter, and looks for which members may be late to leave.
_LOOK_SECONDS, _LEAVE_LOOKS = 0.5, 600
#: Seconds between two tries to connect, and between two looks of a rank that meets.
_TRY_SECONDS = 0.25
#: Seconds between two looks at a process of the same host.
_PROCESS_SECONDS = 1.0
#: Steps between two checkpoints.
_SAVE_EVERY = 4


class Driver:
    """The driver's process: it owns the run, and its arbiter answers the workers.

    Args:
        run: that it drives.
        number: of drivers so far.
    """

    def __init__(self, run: Run, number: int):
        self.run, self.number = run, number
        self.process = Process(run.world, f"driver{number}", HEAD)
        silence = Silence(SILENT_SECONDS / _LOOK_SECONDS, ALL_SILENT_SECONDS / _LOOK_SECONDS)
        self.arbiter = Arbitration(silence, _LEAVE_LOOKS, SHARDS)
        self.workers: dict[str, Worker] = {}
        run.store.owner = number
        self.process.after(_LOOK_SECONDS, self._look)

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
        """Have workers leave for good once others have come, as `raytf.driver.ray_train.dismissal` does."""
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
        self._carry_out(self.arbiter.look())
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
        #: What it is about: "asking", "meeting", "summing", "computing", "ended".
        self.phase = "asking"
        self.why, self.hangs_alone = "", True
        self.generation: Generation | None = None
        self.seconds = run.step_seconds
        self._meetings = 0
        self._tier: SimulatedTier | None = None
        # The present meeting: ranks that have called this one, and that have answered it.
        self._called: set[int] = set()
        self._answered: set[int] = set()
        self._calling, self._calling_since, self._met_by = 0, 0.0, 0.0
        #: Calls of others: (their generation, their rank, who).
        self._calls: list[tuple[tuple[int, int], int, Worker]] = []
        # The present sum: what it is, what to do with it, what has come of each, and silent looks.
        self._sum: Any = None
        self._then: Callable[[dict[int, Any]], None] = lambda found: None
        self._parts: dict[Any, dict[int, Any]] = {}
        self._gone: set[int] = set()
        self._quiet: dict[int, int] = {}
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
        self.phase, self._met_by = "meeting", self.run.world.now + MEET_SECONDS
        self._called, self._answered, self._gone = set(), set(), set()
        self.is_taking = False
        self._parts, self._sum = {}, None
        self._calling, self._calling_since = 0, self.run.world.now
        token = self._meetings
        self._call(token)
        self.process.after(_TRY_SECONDS, self._look_at_meeting, token)

    def _is_meeting(self, token: int) -> bool:
        return self.phase == "meeting" and token == self._meetings

    def _call(self, token: int) -> None:
        """Call the next rank before this one."""
        if not self._is_meeting(token):
            return
        assert self.generation is not None
        if self._calling == self.rank:
            self._answer()
            return
        called = self.run.listeners.get(self.generation.addresses[self._calling])
        host = node_of(self.generation.members[self._calling])
        if self.run.network.is_cut(self.process.host, host):
            if self.run.world.now - self._calling_since > REACH_SECONDS:
                self._not_met({self._calling})
            else:
                self.process.after(_TRY_SECONDS, self._call, token)
        elif called is None or called.phase == "ended":  # refused
            self.process.after(_TRY_SECONDS, self._call, token)
        else:
            self.run.network.send(self.process, called.process, called.be_called, self.key, self.rank, self)
            self._calling, self._calling_since = self._calling + 1, self.run.world.now
            self.process.after(0.001, self._call, token)

    def be_called(self, key: tuple[int, int], rank: int, caller: Worker) -> None:
        """Another rank has connected."""
        self._calls.append((key, rank, caller))
        if self.phase == "meeting":
            self._answer()

    def _answer(self) -> None:
        """Answer the ranks after this one, once those before it were called."""
        if self._calling < self.rank:
            return
        for key, rank, caller in self._calls:
            if key == self.key:
                self._called.add(rank)
                self.run.network.send(self.process, caller.process, caller.be_answered, key, self.rank)
            else:
                self.run.network.send(self.process, caller.process, caller.be_hung_up_on, key, -1)
        self._calls = []
        self._check_met()

    def be_answered(self, key: tuple[int, int], rank: int) -> None:
        """A rank that this one has called has answered."""
        if self.phase == "meeting" and key == self.key:
            self._answered.add(rank)
            self._check_met()

    def be_hung_up_on(self, key: tuple[int, int], rank: int) -> None:
        """A rank has hung up; -1 for one that took this one for a stranger."""
        if self.phase == "ended" or key != self.key or self.phase == "asking":
            return
        if self.phase == "meeting":
            if rank < self._calling or rank in self._called:  # they are connected
                self._not_met(set())
            return
        self._gone.add(rank)
        if self.phase == "summing" and rank in self._awaited():
            self._broken()

    def _check_met(self) -> None:
        assert self.generation is not None
        size = len(self.generation.members)
        if self.phase != "meeting" or self._calling < self.rank:
            return
        if len(self._called) == size - 1 - self.rank and len(self._answered) == self.rank:
            self.member.met()
            self.run.checks.met(self)
            self._quiet = {}
            self._add("held", (self.step, self.state if self.step >= 0 else None), self._transfer)

    def _look_at_meeting(self, token: int) -> None:
        if not self._is_meeting(token):
            return
        assert self.generation is not None
        if self.member.is_over(self.member.number):
            self._not_met(set())
        elif self.run.world.now > self._met_by:
            missing = set(range(len(self.generation.members))) - {self.rank} - self._called - self._answered
            self._not_met(missing)
        else:
            self.process.after(_TRY_SECONDS, self._look_at_meeting, token)

    def _not_met(self, unreached: set[int]) -> None:
        assert self.generation is not None
        self.run.world.tell(f"{self.member.name} has not met the others; unreached: {sorted(unreached)}")
        try:
            self.member.not_met(self.generation, unreached)
        except WorkerLostError as error:
            self._end(str(error))
        else:
            self._leave()

    def _leave(self) -> None:
        if self._tier is not None:
            self._tier.give_up()
        self._hang_up(self._peers(), self.process)
        self.run.listeners.pop(self.address, None)
        self._ask()

    def _peers(self) -> list[Worker]:
        if self.generation is None or self.phase in ("asking", "ended"):
            return []
        others = [self.run.listeners.get(address) for address in self.generation.addresses]
        return [other for other in others if other is not None and other is not self and other.key == self.key]

    def _hang_up(self, peers: Sequence[Worker], sender: Process) -> None:
        if self.generation is None:
            return
        for peer in peers:
            self.run.network.send(sender, peer.process, peer.be_hung_up_on, self.key, self.rank)

    # -- sums ----------------------------------------------------------------------------------------------------------

    def _add(self, what: Any, part: Any, then: Callable[[dict[int, Any]], None]) -> None:
        """Send a part to all members, and go on once those of all have come."""
        self.phase, self._sum, self._then = "summing", what, then
        self._parts.setdefault(what, {})[self.rank] = part
        for peer in self._peers():
            self.run.network.send(self.process, peer.process, peer.be_sent, self.key, what, self.rank, part)
        if self._gone & self._awaited():
            self._broken()
            return
        self._quiet = dict.fromkeys(self._awaited(), 0)
        self.process.after(BEAT_SECONDS, self._look_at_sum, what, self.key)
        self._check_sum()

    def be_sent(self, key: tuple[int, int], what: Any, rank: int, part: Any) -> None:
        """Another rank's part of a sum has come."""
        if key != self.key or self.phase in ("asking", "ended"):
            return
        self._parts.setdefault(what, {})[rank] = part
        if self.phase == "summing" and what == self._sum:
            self._check_sum()

    def _awaited(self) -> set[int]:
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
        assert self.generation is not None
        for rank in self._awaited():
            host = node_of(self.generation.members[rank])
            peer = self.run.listeners.get(self.generation.addresses[rank])
            is_heard = peer is not None and self.run.network.hears(self.process, peer.process)
            self._quiet[rank] = 0 if is_heard else self._quiet.get(rank, 0) + 1
            here = host == self.process.host
            is_gone = peer is None or not peer.process.is_alive
            looks = _PROCESS_SECONDS if here and is_gone else SILENT_SECONDS
            if self._quiet[rank] * BEAT_SECONDS > looks or (here and self.member.is_broken(self.member.number)):
                self._broken()
                return
        self.process.after(BEAT_SECONDS, self._look_at_sum, what, key)

    def _broken(self) -> None:
        """A sum has failed."""
        assert self.generation is not None
        self.run.world.tell(f"{self.member.name} misses a part of {self._sum} after step {self.step}")
        if isinstance(self._sum, str):
            self.step = step_after_broken_transfer(self.step, self.generation.steps)
        self._leave()

    # -- the state -----------------------------------------------------------------------------------------------------

    def _transfer(self, held: dict[int, Any]) -> None:
        """All have met: those that are behind get the state."""
        assert self.generation is not None
        steps = self.generation.steps
        if max(steps) < 0:
            newest = self.run.store.newest() if self.rank == 0 else None
            self._add("restored", newest, self._restore)
            return
        who = transfer(steps)
        step, state = held[who.giver]
        seconds = self.run.world.random.uniform(0.01, 1.0) if self.rank in who.takers else 0.0
        if self.rank in who.takers:
            self.state, self.is_taking = -1, True  # until all of the other one's is there
        self.phase = "computing"
        self.process.after(seconds, self._take, self.key, step, state)

    def _take(self, key: tuple[int, int], step: int, state: int) -> None:
        if key == self.key and self.phase == "computing":
            self._add("taken", (step, state), lambda parts: self._begin(step, state))

    def _restore(self, told: dict[int, Any]) -> None:
        newest = told[0]
        if newest is None:
            self._begin(0, expected(0))
            return
        step, name = newest
        self.run.checks.restored(self, name)
        self._begin(step, next(iter(self.run.store.shares[name].values())))

    def _begin(self, step: int, state: int) -> None:
        """Train from a step on."""
        assert self.generation is not None
        self.step, self.state, self.has_state_since = step, state, self.run.world.now
        self.is_taking = False
        self.run.checks.took(self)
        size, rank = len(self.generation.members), self.rank
        self._tier = SimulatedTier(self.run.world, self.process, self.run.store, rank, size, self.driver.number)
        self._commit: Commit[Saved] = Commit(self._tier, size)
        self._saved = step
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
        self._add(step, (part, votes, pauses), self._update)

    def _update(self, parts: dict[int, Any]) -> None:
        self.step += 1
        self.state = updated(self.state, self.step, sum(part for part, _, _ in parts.values()))
        self.run.checks.trained(self)
        total = sum((votes for _, votes, _ in parts.values()), Votes())
        self._commit.advance(total, self._new_save)
        if self.step < self.run.end_step and any(pauses for _, _, pauses in parts.values()):
            self._leave()
        else:
            self._go_on()

    def _new_save(self) -> Saved:
        self._saved = self.step
        return Saved(self.step, self.state, f"{self.step:06d}-{self.driver.number}-{self.member.number}")

    def _finish(self, results: dict[int, Any]) -> None:
        self._tell({"over": self.state})
        self.run.finished(self.state)
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
        self.store = Store(written=self.checks.written)
        #: Who listens at an address.
        self.listeners: dict[str, Worker] = {}
        self.workers: list[Worker] = []
        self.result: int | None = None
        #: Who has notice -> who comes before it leaves.
        self.notices: dict[str, list[str]] = {}
        self._drivers = self._started = 0
        self.has_given_up = False
        self.driver = self._new_driver()

    @property
    def is_over(self) -> bool:
        """Whether the run has its result, or has given up."""
        return self.result is not None or self.has_given_up

    @property
    def living(self) -> list[Worker]:
        """Workers whose processes have not ended."""
        return [worker for worker in self.workers if worker.phase != "ended"]

    def finished(self, result: int) -> None:
        """A rank has come to the end of the run."""
        self.checks.finished(result)
        self.result = result

    def restart_driver(self, seconds: float) -> None:
        """The driver's process dies, and the same command is given again after some seconds."""
        driver = self.driver
        driver.process.die()
        for worker in driver.workers.values():
            worker.link.close(0)
        self.world.after(seconds, self._begin_again)

    def start_worker(self, host: str, wanted: int, order: int) -> Worker:
        """Ray starts a worker on a host, which joins."""
        self.supervision.started(host)
        self._started += 1
        self.workers.append(Worker(self, self.driver, f"{host}-{self._started}", wanted, order))
        return self.workers[-1]

    def ended(self, worker: Worker) -> None:
        """A worker's process has ended."""
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

    def _new_driver(self) -> Driver:
        self._drivers += 1
        self.driver = Driver(self, self._drivers)
        self.train = RayTrain(self, self.driver)
        return self.driver

    def _begin_again(self) -> None:
        if not self.is_over and not self.driver.process.is_alive:
            for worker in self.living:  # Ray ends what belongs to a driver that is gone
                self.train.kill(worker)
            self.supervision.new_driver()
            self._new_driver()
