"""Every order of events of a small group: two workers that train four steps, one that joins, and up to two faults.

    python -m tests.stress.simulate.exhaustive [--steps 4] [--faults 2]

The state of the arbiter's machine and of the members' machines, with the messages on their way, is followed along every
transition that is possible in it: breadth first, each state once. A fault is a death, or that a worker that meets the
others does not reach one of them. There is no clock: what time would bring about, such as that a death is noticed, may
happen at any moment.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import tyro

from raytf.distributed.membership.arbiter_messages import encoded, of_arbiter, of_worker
from raytf.distributed.membership.member import (
    DismissedError,
    Member,
    RunOverError,
    step_after_broken_transfer,
    transfer,
)
from raytf.driver.arbitration import Arbitration, HangUp
from raytf.driver.supervision.liveness import Silence
from raytf.errors import WorkerLostError
from tests.stress.simulate.world import Violation

#: Looks for which nobody is silent here.
_NEVER = 1e9


@dataclass
class Worker:
    """A worker.

    Attributes:
        member: its machine.
        step: that it has finished; -1 without a state.
        phase: "new", "asking", "meeting", "taking", "training", "ended" or "dead".
        generation: that it belongs to.
        is_heard: whether the arbiter still has a connection with it.
    """

    member: Member
    step: int = -1
    phase: str = "new"
    generation: Any = None
    is_heard: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """All that matters of it."""
        if self.phase in ("ended", "dead"):
            return self.phase, self.is_heard
        news = self.member._paused, self.member._broken, self.member._left
        return self.step, self.phase, self.member.number, news, self.member.is_lost, self.is_heard


@dataclass
class State:
    """Of the group.

    Attributes:
        arbiter: its machine.
        workers: by name.
        up, down: lines on their way to the arbiter, and to a worker, by the worker's name; None stands for the end.
        sent: (generation, what) -> name -> whether it wants a pause: parts of sums that were sent.
        faults: that may still happen.
        trained: the last step that some worker has finished.
    """

    arbiter: Arbitration
    workers: dict[str, Worker]
    up: dict[str, list[bytes | None]]
    down: dict[str, list[bytes | None]]
    faults: int
    sent: dict[tuple[int, int], dict[str, bool]] = field(default_factory=dict)
    trained: int = -1

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes two states the same."""
        group = self.arbiter._membership
        places = [sorted((n, p.step) for n, p in each.items()) for each in (group._joining, group._ready)]
        about = group.generation, places, sorted(group._lost), sorted(group._told), group._wanted, group._fled
        apart = sorted((n, sorted(others)) for n, others in group._unreached.items()), sorted(group._cut_off)
        living = [name for name, worker in self.workers.items() if worker.phase not in ("ended", "dead")]
        lines = [(name, tuple(self.up[name])) for name in self.workers]
        told = [(name, tuple(self.down[name])) for name in living]
        oldest = min((self.workers[name].member.number for name in living), default=0)
        sent = sorted((what, sorted(parts.items())) for what, parts in self.sent.items() if what[0] >= oldest)
        keys = [worker.key for worker in self.workers.values()]
        return repr(about), repr(apart), repr(lines), repr(told), repr(sent), repr(keys), self.faults


def beginning(faults: int) -> State:
    """Return the state in which two workers have joined, and are told so."""
    names = ("n1-a", "n2-b", "n3-c")
    state = State(
        Arbitration(Silence(_NEVER, _NEVER), _NEVER),
        {name: Worker(Member(name)) for name in names},
        {name: [] for name in names},
        {name: [] for name in names},
        faults,
    )
    transitions = Transitions(state, 0)
    for name in names[:2]:
        transitions._come(name)
        transitions._hear(name)
    return state


class Transitions:
    """What can happen in a state.

    Args:
        state: is changed.
        steps: of the run.
    """

    def __init__(self, state: State, steps: int):
        self._state, self._steps = state, steps

    def all(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Return each as a text and a call that changes the state."""
        state = self._state
        if state.arbiter._result is not None:
            return  # the run is over
        for name, worker in state.workers.items():
            if state.up[name]:
                yield f"the arbiter hears {name}", partial(self._hear, name)
            if worker.phase in ("ended", "dead"):
                continue
            if state.down[name]:
                yield f"{name} hears the arbiter", partial(self._be_told, name)
            if state.faults and worker.phase != "new":
                yield f"{name} dies", partial(self._die, name)
            if worker.phase == "new":
                yield f"{name} comes", partial(self._come, name)
            if worker.phase == "meeting" and self._all_meet(worker):
                yield f"{name} has met the others", partial(self._met, name)
            if worker.phase == "meeting" and state.faults:
                for other in self._others(worker):
                    yield f"{name} does not reach {other.member.name}", partial(self._not_reach, name, other)
            if worker.phase in ("taking", "training") and self._has_all(worker):
                yield f"{name} has the sum after step {worker.step}", partial(self._summed, name)
            if worker.phase in ("meeting", "taking", "training") and self._misses(worker):
                yield f"{name} misses somebody", partial(self._break, name)

    # -- the arbiter ---------------------------------------------------------------------------------------------------

    def _come(self, name: str) -> None:
        worker = self._state.workers[name]
        worker.is_heard, worker.phase = True, "asking"
        self._state.arbiter.come(name)
        order = sorted(self._state.workers).index(name)
        self._send(name, worker.member.joining(f"{name}:1", 2, order))

    def _send(self, name: str, message: dict[str, Any] | None) -> None:
        if self._state.workers[name].is_heard:
            self._state.up[name].append(None if message is None else encoded(message))

    def _hear(self, name: str) -> None:
        line = self._state.up[name].pop(0)
        arbiter, workers = self._state.arbiter, self._state.workers
        commands = arbiter.lose(name) if line is None else arbiter.hear(name, of_worker(line))
        if line is None:
            workers[name].is_heard = False
        for command in commands:
            if isinstance(command, HangUp):
                workers[command.name].is_heard = False
                self._state.up[command.name].clear()
                self._state.down[command.name].append(None)
                continue
            for each in command.names:
                self._state.down[each].append(encoded(command.message | {"nonce": "-"}))

    def _be_told(self, name: str) -> None:
        worker, line = self._state.workers[name], self._state.down[name].pop(0)
        if line is None:
            worker.member.is_lost = True
            self._end(name)
            return
        news = of_arbiter(line, name)
        worker.member.hear(news)
        if not news.answer:
            return
        if worker.phase != "asking":
            if "over" not in news.answer:
                raise Violation(f"{name} gets an answer to no question: {news.answer}")
            return
        try:
            worker.generation, worker.phase = worker.member.take(news.answer), "meeting"
        except (RunOverError, DismissedError, WorkerLostError):
            self._end(name)

    # -- the members ---------------------------------------------------------------------------------------------------

    def _die(self, name: str) -> None:
        self._state.faults -= 1
        self._state.workers[name].phase = "dead"
        self._send(name, None)

    def _end(self, name: str) -> None:
        self._state.workers[name].phase = "ended"
        self._send(name, None)

    def _others(self, worker: Worker) -> list[Worker]:
        return [self._state.workers[name] for name in worker.generation.members if name != worker.member.name]

    def _all_meet(self, worker: Worker) -> bool:
        number = worker.member.number
        return all(
            other.phase in ("meeting", "taking", "training") and other.member.number == number
            for other in self._others(worker)
        )

    def _misses(self, worker: Worker) -> bool:
        """Whether this worker can notice that somebody is gone."""
        number = worker.member.number
        if worker.member.is_over(number):
            return worker.phase == "meeting" or not self._has_all(worker)
        gone = [
            other
            for other in self._others(worker)
            if other.phase in ("dead", "ended")
            or other.member.number > number
            or (other.phase == "asking" and other.member.number == number)
        ]
        return bool(gone) and (worker.phase == "meeting" or not self._has_all(worker))

    def _what(self, worker: Worker) -> tuple[int, int]:
        """What the present sum is: the transfer, or a step."""
        return worker.member.number, -1 if worker.phase == "taking" else worker.step + 1

    def _has_all(self, worker: Worker) -> bool:
        return set(self._state.sent.get(self._what(worker), ())) >= set(worker.generation.members)

    def _give(self, worker: Worker) -> None:
        is_first = worker.generation.members[0] == worker.member.name
        pauses = worker.phase == "training" and is_first and worker.member.is_pause_wanted
        self._state.sent.setdefault(self._what(worker), {})[worker.member.name] = pauses

    def _met(self, name: str) -> None:
        worker = self._state.workers[name]
        worker.member.met()
        worker.phase = "taking"
        self._give(worker)

    def _summed(self, name: str) -> None:
        worker = self._state.workers[name]
        what = self._what(worker)
        if worker.phase == "taking":
            steps = worker.generation.steps
            giver = transfer(steps).giver
            if max(steps) >= 0 and self._state.trained > max(steps) + 1:
                raise Violation(f"{name} takes step {steps[giver]} although {self._state.trained} was trained")
            worker.step, worker.phase = max(0, steps[giver]), "training"
            self._give_or_end(name)
            return
        workers = self._state.workers.values()
        later = [other for other in workers if other.member.number > what[0] and other.phase == "training"]
        if any(what[1] > other.step + 1 for other in later):
            raise Violation(f"{name} trains step {what[1]} in generation {what[0]}, and others in a later one")
        worker.step += 1
        self._state.trained = max(self._state.trained, worker.step)
        if any(self._state.sent[what].values()) and worker.step < self._steps:
            self._leave(name)
        else:
            self._give_or_end(name)

    def _give_or_end(self, name: str) -> None:
        worker = self._state.workers[name]
        if worker.step < self._steps:
            self._give(worker)
            return
        self._send(name, {"over": worker.step})
        self._end(name)

    def _break(self, name: str) -> None:
        worker = self._state.workers[name]
        if worker.phase == "taking":
            worker.step = step_after_broken_transfer(worker.step, worker.generation.steps)
        elif worker.phase == "meeting":
            self._not_met(worker, [])
            return
        self._leave(name)

    def _not_reach(self, name: str, other: Worker) -> None:
        self._state.faults -= 1
        worker = self._state.workers[name]
        self._not_met(worker, [worker.generation.members.index(other.member.name)])

    def _not_met(self, worker: Worker, unreached: Sequence[int]) -> None:
        try:
            worker.member.not_met(worker.generation, unreached)
        except WorkerLostError:
            self._end(worker.member.name)
        else:
            self._leave(worker.member.name)

    def _leave(self, name: str) -> None:
        worker = self._state.workers[name]
        worker.phase = "asking"
        self._send(name, worker.member.leaving(f"{name}:1", worker.step))


@dataclass(frozen=True)
class Arguments:
    """Follow every order of events of a small group."""

    steps: int = 4
    """Of the run."""
    faults: int = 2
    """At most."""
    most: int = 2_000_000
    """States after which to stop."""


def search(steps: int, faults: int, most: int) -> tuple[int, int]:
    """Follow every transition.

    Returns:
        How many states there are, and in how many of them nothing more can happen.

    Raises:
        Violation: with the shortest sequence of events that leads to it.
    """
    first = beginning(faults)
    waiting, seen, ends = deque([(pickle.dumps(first), ())]), {hash(first.key)}, 0
    while waiting and len(seen) < most:
        packed, path = waiting.popleft()
        names = [name for name, _ in Transitions(pickle.loads(packed), steps).all()]
        if not names:
            ends += 1
            _check_end(pickle.loads(packed), path)
        for place, name in enumerate(names):
            state = pickle.loads(packed)
            call = list(Transitions(state, steps).all())[place][1]
            try:
                call()
            except Exception as error:
                raise Violation("\n".join([*_told(path), name, f"{type(error).__name__}: {error}"])) from error
            key = hash(state.key)
            if key not in seen:
                seen.add(key)
                waiting.append((pickle.dumps(state), (path, name)))
    return len(seen), ends


def _check_end(state: State, path: Any) -> None:
    """Nobody waits for ever."""
    left = {name: w.phase for name, w in state.workers.items() if w.phase not in ("ended", "dead")}
    alive = any(worker.phase != "dead" for worker in state.workers.values())
    is_over = state.arbiter._result is not None
    if left and alive and not is_over and state.arbiter._membership.generation is not None:
        raise Violation("\n".join([*_told(path), f"nothing more can happen, and {left} wait"]))


def _told(path: Any) -> Sequence[str]:
    lines = []
    while path:
        path, name = path
        lines.append(name)
    return lines[::-1]


def tell(arguments: Arguments) -> str:
    """Search, and say what was found."""
    began = time.monotonic()
    states, ends = search(arguments.steps, arguments.faults, arguments.most)
    whole = "all" if states < arguments.most else "the first"
    return f"{whole} {states:,} states, {ends:,} of them ends: no violation, in {time.monotonic() - began:.0f} s"


if __name__ == "__main__":
    print(tell(tyro.cli(Arguments)))
