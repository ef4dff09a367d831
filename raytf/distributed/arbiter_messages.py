"""What a worker and the arbiter of its group tell each other, checked where it is read.

Who sends such a message knows the run's secret. A mistake of one worker must still not harm the others: a number of
workers that is none, once it had been taken over, would keep a group from ever meeting again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raytf.distributed.meeting import parsed
from raytf.distributed.membership import Generation, Place

#: Workers of a run, and members that a message names, at most.
_MOST_WORKERS = 1_000_000
#: Generations and steps at most.
_MOST = 2**63 - 1
#: Characters of a name, an address or a challenge at most.
_LONGEST = 256


class MessageError(ValueError):
    """A message is not one of those that are known, or a value in it has a wrong type or is out of range."""


@dataclass(frozen=True)
class Greeting:
    """The first message of a worker, or of the connection for its heartbeats.

    Attributes:
        role: which of both.
        name: of the worker.
        proof: that it knows the key; see `sealed_lines.proof`.
        challenge: random, for the arbiter.
    """

    role: str
    name: str
    proof: str
    challenge: str

    @classmethod
    def of_line(cls, line: bytes) -> Greeting:
        """Return the greeting in a line.

        Raises:
            MessageError: there is none.
        """
        message = _object(line)
        return cls(*(_text(message, name) for name in ("role", "name", "proof", "challenge")))


@dataclass(frozen=True)
class Join:
    """A worker wants to join; see `Membership.join`."""

    place: Place
    wanted: int


@dataclass(frozen=True)
class Leave:
    """A member has left a generation; see `Membership.leave`."""

    number: int
    place: Place
    unreached: tuple[str, ...]
    has_met: bool = False


@dataclass(frozen=True)
class Dismiss:
    """Members are to leave for good; see `Membership.dismiss`."""

    names: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True)
class Want:
    """Another number of workers is started together; see `Membership.want`."""

    wanted: int


@dataclass(frozen=True)
class Over:
    """The run is over, and what it has come to."""

    result: Any


@dataclass(frozen=True)
class News:
    """A message of the arbiter.

    Attributes:
        numbers: "pause", "lost" or "left" -> the generation of which this is so.
        answer: what a worker waits for, if it is that: "generation" and "nonce"; or "end", with "unreachable"; or
            "over"; or "dismissed".
    """

    numbers: Mapping[str, int]
    answer: Mapping[str, Any]


def of_worker(line: bytes) -> Join | Leave | Dismiss | Want | Over:
    """Return a worker's message.

    Raises:
        MessageError: says what is wrong with it.
    """
    message = _object(line)
    match message:
        case {"join": {} as about}:
            place = Place(_address(about), order=_whole(about, "order", 0, _MOST))
            return Join(place, _whole(about, "wanted", 1, _MOST_WORKERS))
        case {"leave": {} as about}:
            place = Place(_address(about), _whole(about, "step", -1, _MOST))
            number, unreached = _whole(about, "number", 1, _MOST), _names(about, "unreached", ())
            return Leave(number, place, unreached, about.get("met") is True)
        case {"dismiss": _}:
            return Dismiss(_names(message, "dismiss"), _names(message, "after"))
        case {"wanted": _}:
            return Want(_whole(message, "wanted", 1, _MOST_WORKERS))
        case {"over": result}:
            return Over(result)
    raise MessageError("expected join, leave, dismiss, wanted or over")


def of_arbiter(line: bytes, name: str) -> News:
    """Return a message of the arbiter.

    Args:
        line: JSON.
        name: of the worker that reads it.

    Raises:
        MessageError: says what is wrong with it.
    """
    message = _object(line)
    numbers: Mapping[str, int] = {
        kind: _whole(message, kind, 1, _MOST) for kind in ("pause", "lost", "left") if kind in message
    }
    match message:
        case {"generation": {} as about}:
            return News(numbers, {"generation": _generation(about, name), "nonce": _text(message, "nonce")})
        case {"end": str(), **rest}:
            return News(numbers, {"end": message["end"], "unreachable": rest.get("unreachable") is True})
        case {"over": _} | {"dismissed": _}:
            return News(numbers, message)
    if not numbers:
        raise MessageError("expected generation, end, over, dismissed, pause, lost or left")
    return News(numbers, {})


def _generation(about: dict[str, Any], name: str) -> Generation:
    members, addresses, steps = _names(about, "members"), _names(about, "addresses"), about.get("steps")
    if name not in members or len(addresses) != len(members):
        raise MessageError(f"expected an address for each member, and {name} among them")
    if not isinstance(steps, list) or len(steps) != len(members):
        raise MessageError("steps: expected one for each member")
    found = tuple(_whole({"steps": step}, "steps", -1, _MOST) for step in steps)
    number, lost = _whole(about, "number", 1, _MOST), _whole(about, "lost", 0, _MOST)
    return Generation(number, members, addresses, found, lost=lost)


def _object(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"expected JSON: {type(error).__name__}") from None
    if not isinstance(message, dict):
        raise MessageError("expected a JSON object")
    return message


def _whole(message: dict[str, Any], name: str, least: int, most: int) -> int:
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise MessageError(f"{name}: expected a whole number from {least} to {most}")
    return value


def _text(message: dict[str, Any], name: str) -> str:
    value = message.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST:
        raise MessageError(f"{name}: expected 1 to {_LONGEST} characters")
    return value


def _names(message: dict[str, Any], name: str, default: Any = None) -> tuple[str, ...]:
    values = message.get(name, default)
    if not isinstance(values, (list, tuple)) or len(values) > _MOST_WORKERS:
        raise MessageError(f"{name}: expected a list of names")
    return tuple(_text({name: value}, name) for value in values)


def _address(message: dict[str, Any]) -> str:
    address = _text(message, "address")
    try:
        _, port = parsed(address)
    except ValueError:
        port = -1
    if not 0 <= port < 2**16:
        raise MessageError("address: expected HOST:PORT")
    return address
