"""The messages between a worker and the arbiter of its group: checked when they are read, and sealed with the run's
secret.

Every sender knows the run's secret, but a bug in one worker must still not harm the others. For example, an invalid
number of workers, once accepted, would keep the group from ever meeting again.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raytf.distributed.membership.generations import Generation, Place
from raytf.distributed.membership.rendezvous import parsed

#: Most workers of a run, and most members in a message.
_MOST_WORKERS = 1_000_000
#: Highest number of a generation or a step.
_MOST = 2**63 - 1
#: Most characters of a name, an address or a challenge.
_LONGEST = 256
#: Hexadecimal digits of a tag: 128 bits.
_TAG_DIGITS = 32
#: The two sides of a connection.
WORKER, ARBITER = "worker", "arbiter"
#: The purpose that a connection for heartbeats states in its proof.
HEARTBEATS = "heartbeats"


class MessageError(ValueError):
    """A message is of an unknown kind, or a value in it has a wrong type or is out of range."""


@dataclass(frozen=True)
class Greeting:
    """The first message on a worker's connection, or on the one for its heartbeats: its role, the worker's name, the
    proof that the worker knows the key, and a random challenge for the arbiter."""

    role: str
    name: str
    proof: str
    challenge: str

    @classmethod
    def of_line(cls, line: bytes) -> Greeting:
        """Return the greeting in a line.

        Raises:
            MessageError: the line is not a greeting.
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
    """Some members should leave for good; see `Membership.dismiss`."""

    names: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True)
class Want:
    """The number of workers that start together changes; see `Membership.want`."""

    wanted: int


@dataclass(frozen=True)
class Over:
    """The run is over, with this result."""

    result: Any


@dataclass(frozen=True)
class News:
    """A message from the arbiter.

    Attributes:
        numbers: "pause", "lost" or "left" -> number of the generation to which this applies.
        answer: the answer for which a worker waits, or empty: "generation" and "nonce"; or "end", with "unreachable";
            or "over"; or "dismissed".
    """

    numbers: Mapping[str, int]
    answer: Mapping[str, Any]


def of_worker(line: bytes) -> Join | Leave | Dismiss | Want | Over:
    """Return a worker's message.

    Raises:
        MessageError: the message is not valid.
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
    """Return a message of the arbiter to a worker, or raise a MessageError if it is not valid."""
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
    finished_steps = tuple(_whole({"steps": step}, "steps", -1, _MOST) for step in steps)
    number, lost = _whole(about, "number", 1, _MOST), _whole(about, "lost", 0, _MOST)
    return Generation(number, members, addresses, finished_steps, lost=lost)


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


# Both sides know the run's secret, which Ray has sent to the workers; it is never sent here. Each side sends random
# bytes (a challenge) when they connect. The connection's key is derived from the secret and both challenges, so
# recordings of another connection are useless. Each line begins with a tag: an HMAC of its sender, the number of lines
# before it, and its content. Anybody who can read the network can read the lines, but they contain no key.


def encoded(message: dict[str, Any]) -> bytes:
    """Return a message as a line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def proof(key: bytes, role: str, name: str, challenge: str) -> str:
    """Return the answer to a challenge, which only a process that knows the key can compute, for a role and a name."""
    return _derived(key, role, name, challenge).hex()


def connection_key(secret: bytes, name: str, theirs: str, own: str) -> bytes:
    """Return the key of a connection between a worker and the arbiter, from the run's secret and both challenges."""
    return _derived(secret, "connection", name, theirs, own)


def group_key(secret: bytes, number: int, members: Sequence[str], nonce: str) -> bytes:
    """Return the key of a generation, which each member derives from the run's secret, the names of all members by
    rank, and random text from the arbiter."""
    return _derived(secret, "group", number, *members, nonce)


def _derived(key: bytes, *what: str | int) -> bytes:
    return hmac.digest(key, json.dumps(what).encode(), hashlib.sha256)


class Seal:
    """Adds or checks the tags of the lines that one side of a connection sends, in order.

    Args:
        key: key of the connection.
        sender: the side that sends these lines; part of the tag, so that a line cannot be sent back.
    """

    def __init__(self, key: bytes, sender: str):
        self._key, self._sender, self._lines = key, sender, 0

    def sealed(self, line: bytes) -> bytes:
        """Return the next line with its tag."""
        return self._tag(line) + line

    def opened(self, sealed: bytes) -> bytes:
        """Return the next line without its tag.

        Raises:
            ValueError: the other side did not send this line, or not as its next line.
        """
        tag, line = sealed[:_TAG_DIGITS], sealed[_TAG_DIGITS:]
        if not hmac.compare_digest(tag, self._tag(line)):
            raise ValueError("a message was changed, repeated or left out on its way")
        return line

    def _tag(self, line: bytes) -> bytes:
        what = f"{self._sender} {self._lines} ".encode() + _digest(line)
        self._lines += 1
        return hmac.digest(self._key, what, hashlib.sha256).hex()[:_TAG_DIGITS].encode()


@functools.lru_cache(maxsize=1)
def _digest(line: bytes) -> bytes:
    """Return the hash of a line. The latest is cached, because the arbiter sends the same generation to all members."""
    return hashlib.sha256(line).digest()
