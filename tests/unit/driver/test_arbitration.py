"""What an arbiter does with what it hears: tables of events and commands."""

from __future__ import annotations

from typing import Any

from raytf.distributed.membership.arbiter_messages import Join, Leave, Over
from raytf.distributed.membership.generations import Place
from raytf.driver.arbitration import Arbitration, HangUp, Tell
from raytf.driver.supervision.liveness import Silence

#: Looks.
SILENT, ALL_SILENT, LEAVE, REFUSE = 4, 10, 6, 3


def arbitration() -> Arbitration:
    return Arbitration(Silence(SILENT, ALL_SILENT), LEAVE, refuse_looks=REFUSE)


def join(name: str, wanted: int) -> Join:
    return Join(Place(f"{name}:1"), wanted)


def leave(name: str, number: int, step: int) -> Leave:
    return Leave(number, Place(f"{name}:1", step), ())


def begun(*names: str) -> Arbitration:
    arbiter = arbitration()
    commands = []
    for name in names:
        arbiter.come(name)
        commands = arbiter.hear(name, join(name, len(names)))
    (told,) = commands
    assert isinstance(told, Tell)
    assert told.names == names
    assert told.message["generation"]["number"] == 1
    return arbiter


def test_members_hear_of_a_loss_once_and_the_lost_nothing():
    arbiter = begun("a", "b", "c")
    assert arbiter.lose("c") == [Tell(("a", "b"), {"lost": 1})]
    assert arbiter.lose("c") == []
    assert arbiter.hear("c", leave("c", 1, 3)) == []


def test_members_hear_of_the_first_departure_and_of_the_next_generation():
    arbiter = begun("a", "b")
    assert arbiter.hear("a", leave("a", 1, 3)) == [Tell(("a", "b"), {"left": 1})]
    (told,) = arbiter.hear("b", leave("b", 1, 3))
    assert isinstance(told, Tell)
    assert (told.names, told.message["generation"]["steps"]) == (("a", "b"), (3, 3))


def test_who_is_silent_is_let_go_and_the_others_hear_of_it():
    arbiter = begun("a", "b")
    for _ in range(SILENT):
        arbiter.hear_beat("a")
        assert arbiter.poll() == []
    arbiter.hear_beat("a")
    assert arbiter.poll() == [HangUp("b"), Tell(("a",), {"lost": 1})]


def test_who_does_not_leave_is_let_go():
    arbiter = begun("a", "b")
    arbiter.hear("a", leave("a", 1, 3))
    commands: list[Any] = []
    for _ in range(LEAVE + 2):
        for name in ("a", "b"):
            arbiter.hear_beat(name)
        commands += arbiter.poll()
    assert commands[:2] == [Tell(("b",), {"end": "b did not leave its group in time"}), HangUp("b")]
    assert commands[2].message["generation"]["members"] == ("a",)


def test_who_comes_when_the_run_is_over_is_told_its_result():
    arbiter = begun("a", "b")
    arbiter.come("c")
    assert arbiter.hear("c", join("c", 1)) == [Tell(("a", "b"), {"pause": 1})]
    assert arbiter.hear("a", Over({"steps": 3})) == [Tell(("c",), {"over": {"steps": 3}})]
    assert arbiter.lose("a") == [], "nobody is lost of a run that is over"
    arbiter.come("d")
    assert arbiter.greeting()["over"] == {"steps": 3}
    assert arbiter.hear("d", join("d", 1)) == [Tell(("d",), {"over": {"steps": 3}})]


def test_newcomers_of_an_unreachable_node_are_refused_for_a_while_only():
    arbiter = begun("n1-1", "n2-2")
    arbiter.hear("n1-1", Leave(1, Place("n1-1:1", 3), ("n2-2",)))
    arbiter.hear("n2-2", Leave(1, Place("n2-2:1", 3), ("n1-1",)))
    arbiter.come("n2-3")
    (told,) = arbiter.hear("n2-3", join("n2-3", 1))
    assert isinstance(told, Tell)
    assert told.message["unreachable"]
    for _ in range(REFUSE):
        arbiter.hear_beat("n1-1")
        arbiter.hear_beat("n2-3")
        arbiter.poll()
    assert arbiter.hear("n2-3", join("n2-3", 1)) == [Tell(("n1-1",), {"pause": 2})]
