"""Attempts (starts of a worker group), and the names of attempts and checkpoints, which sort by number."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass

#: Maximum digits of a step in a name.
_MOST_DIGITS = 15


@dataclass(frozen=True)
class GroupAttempt:
    """One start of the worker group, as one of its ranks sees it.

    Attributes:
        name: the attempt's name, which the names of its files and folders contain.
        rank, world_size: this worker's rank, and the number of ranks.
        earlier: names of the attempts before it, which write nothing any more.
        driver: the id of its driver.
    """

    name: str
    rank: int = 0
    world_size: int = 1
    earlier: tuple[str, ...] = ()
    driver: str = ""


def restore_order(complete: Collection[str]) -> list[str]:
    """Return the names of complete checkpoints, best to restore first: the latest step, then the latest attempt."""
    return sorted(complete, key=split_name, reverse=True)


def name_of(step: int, attempt: str, serial: int = 0) -> str:
    """Return the folder's name for the serial-th save of an attempt. Names are unique, and sort by step."""
    return f"{step:012d}-{attempt}-{serial:04d}"


def split_name(name: str) -> tuple[int, str]:
    """Return (step, rest of the name) of a checkpoint's folder; (-1, name) if the name is not that of a checkpoint."""
    step, mark, attempt = name.partition("-")
    # int() also accepts digits of other alphabets. No run has a step with more digits than this.
    is_step = step.isascii() and step.isdecimal() and len(step) <= _MOST_DIGITS
    return (int(step), attempt) if mark and is_step else (-1, name)


def attempt_of(name: str) -> str:
    """Return the attempt that wrote a checkpoint's folder."""
    return split_name(name)[1].rpartition("-")[0]


#: Earlier versions wrote names without numbers. They sort before all others.
_ATTEMPT_NAME = re.compile(r"(?:a(\d{6})\.\d{6}-)?\d{8}T\d{6}\.\d{3}-[0-9a-f]{6}")


def stamp(now: float | None = None) -> str:
    """Return a unique word that contains a readable time: `now`, in Unix seconds, by default the present time."""
    now = time.time() if now is None else now
    text = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now))
    return f"{text}.{int(now % 1 * 1000):03d}-{uuid.uuid4().hex[:6]}"


def term_of(name: str) -> int:
    """Return the term of the driver that started the attempt in a file's name; 0 if the name has none."""
    match = _ATTEMPT_NAME.search(name)
    return int(match[1] or 0) if match is not None else 0


def is_of_dead_attempt(name: str, present: str, over: Collection[str] = ()) -> bool:
    """Return whether a file's name contains an attempt that is over.
    These are the attempts in `over`, and all that sort before the present one."""
    match = _ATTEMPT_NAME.search(name)
    return match is not None and match[0] != present and (match[0] in over or match[0] < present)
