"""How a rank starts: its place in an attempt, the memory that it needs, and how it joins others."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from raytf.config.train_config import TrainConfig
from raytf.distributed import ranks
from raytf.errors import ConfigError, WorkerLostError
from raytf.training import startup
from raytf.training.session import RankSession


class Group:
    """The second of two ranks; rank 0 has announced the attempt."""

    rank, world_size, route, loss = 1, 2, None, ""

    def __init__(self, *announced: Any):
        self._announced = json.dumps(announced).encode()

    def share(self, data: bytes) -> bytes:
        assert data == b""
        return self._announced


class Reporter:
    def __init__(self) -> None:
        self.places: list[Any] = []
        self.said: list[str] = []

    def take_place(self, *place: Any) -> None:
        self.places.append(place)

    def say(self, text: str) -> None:
        self.said.append(text)


ANNOUNCED = ("b", ["a"], 40, True, [[30, ["a"]]], {"node": [0, 20]})


@pytest.fixture(autouse=True)
def place(monkeypatch):
    monkeypatch.setattr(startup, "place_on_node", lambda group: (1, 2))
    yield
    ranks.take(None)


def a_session(verbose: bool = False, **config: Any) -> Any:
    job: Any = SimpleNamespace(config=TrainConfig.of(verbose=verbose, **config))
    rest: Any = (SimpleNamespace(workers=2), Group(*ANNOUNCED), None, Reporter())
    return RankSession(job, None, None, *rest)  # type: ignore[arg-type]


def test_a_rank_takes_the_place_that_rank_0_announces():
    session = a_session()
    startup._begin_attempt(session, 3, lost=1)
    place = session.place
    assert (place.attempt, place.earlier, place.known_step, place.is_saving) == ("b", ("a",), 40, True)
    assert (place.on_node, place.lost, place.standings) == ((1, 2), 1, {"node": [0, 20]})
    assert session.reporter.places == [(1, 2, "b")]
    assert (ranks.rank(), ranks.size(), ranks.local_rank(), ranks.local_size()) == (1, 2, 1, 2)


def test_ranks_of_which_none_has_the_state_cannot_continue():
    session = a_session()
    session.is_ready = True
    generation: Any = SimpleNamespace(number=4, lost=1, steps=[-1, -1])
    with pytest.raises(WorkerLostError, match="no remaining rank has the complete state"):
        startup._enter(session, generation, {})
    assert session.place.attempt == ""  # the copy has taken the place


class Variable:
    def __init__(self, size: int):
        self.shape, self.dtype, self.size = (size,), "float32", size


@pytest.fixture
def memory(monkeypatch):
    """Returns a function that sets the node's memory and has variables of these sizes, in bytes."""

    def of(session: Any, node: int, **sizes: int) -> Any:
        monkeypatch.setattr(startup.raylets, "all_bytes", lambda: node)
        monkeypatch.setattr(startup.variables, "size_of", lambda named: sum(named.values()))
        monkeypatch.setattr(startup.variables, "is_on_host", lambda named: True)
        session.named = {name.replace("_", "/"): size for name, size in sizes.items()}
        return session

    return of


def test_a_node_with_too_little_memory_for_the_state_is_refused(memory):
    with pytest.raises(ConfigError, match="memory"):
        startup._check_needs(memory(a_session(), 4 << 30, model_w=8 << 30, optimizer_m=8 << 30))


@pytest.mark.parametrize(
    ("size", "verbose", "earlier", "lines"),
    [(1 << 20, False, (), 0), (1 << 20, True, (), 1), (4 << 30, False, (), 1), (4 << 30, False, ("a",), 0)],
)
def test_a_large_state_is_told_in_the_first_attempt(memory, size, verbose, earlier, lines):
    session = memory(a_session(verbose), 64 << 30, model_w=size)
    session.place = startup.Place(earlier=earlier)
    startup._check_needs(session)
    assert len(session.reporter.said) == lines
