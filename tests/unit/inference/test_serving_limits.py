"""Who is too slow, who goes first when there is no room, and the order in which room is given."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from raytf.inference.serving.connections import in_the_way, least_missed
from raytf.inference.serving.limits import RoomQueue, ServingLimits

LIMITS = ServingLimits(grace_seconds=5, body_rate=1000, patience_seconds=1, bodies=2)


@dataclass(eq=False)
class Connection:
    is_idle: bool
    is_known: bool
    since: float
    received: int = 0

    @property
    def is_receiving(self) -> bool:
        return not self.is_idle


def receiving(since: float, received: int) -> Connection:
    return Connection(False, False, since, received)


@pytest.mark.parametrize(
    ("seconds", "seen", "got", "is_slow"),
    [
        (5, 0, 4999, True),
        (5, 0, 5001, False),
        (5, 100_000, 104_999, True),
        (5, 100_000, 105_001, False),
        (5, 30_000_000, 30_005_001, True),  # who has room for much must go on as if it came within the longest time
        (5, 30_000_000, 30_600_000, False),
    ],
)
def test_a_body_is_too_slow_below_the_lowest_rate(seconds, seen, got, is_slow):
    assert LIMITS.is_too_slow(got, seen, seconds) == is_slow


def test_the_slowest_bodies_make_room_but_none_that_has_just_begun():
    new, slow, fast = receiving(99.5, 0), receiving(90, 10), receiving(0, 100_000)
    idle = Connection(True, True, 0)
    assert in_the_way([new, slow, fast, fast], 100, LIMITS) == [slow]
    assert in_the_way([new, fast, slow, idle], 100, LIMITS) == []
    assert in_the_way([new] * 1000, 100, LIMITS) == []
    older = receiving(80, 0)
    assert in_the_way([fast, receiving(90, 0), older, slow], 100, LIMITS)[0] is older
    assert in_the_way([slow, fast, older, fast], 100, LIMITS) == [older, slow]


def test_a_connection_that_never_asked_makes_room_before_one_that_did():
    busy, known, new, newer = (
        Connection(False, False, 0), Connection(True, True, 1), Connection(True, False, 5), Connection(True, False, 6),
    )  # fmt: skip
    assert least_missed([busy, known, new, newer]) is new
    assert least_missed([busy, known]) is known
    assert least_missed([busy]) is None


def test_room_is_given_in_order_and_comes_back():
    async def play() -> list[str]:
        room, seen = RoomQueue(10), []
        first = asyncio.Event()

        async def hold(name: str, size: int, until: asyncio.Event | None = None) -> None:
            async with room.hold(size):
                seen.append(name)
                if until is not None:
                    await until.wait()

        holder = asyncio.create_task(hold("a", 8, first))
        await asyncio.sleep(0)
        large, small = asyncio.create_task(hold("too large", 99)), asyncio.create_task(hold("small", 1))
        gone = asyncio.create_task(hold("gone", 1))
        for _ in range(5):
            await asyncio.sleep(0)
        assert seen == ["a"], "one that needs little does not go before one that waits"
        gone.cancel()
        first.set()
        await asyncio.gather(holder, large, small, gone, return_exceptions=True)
        async with room.hold(10):  # all of it is there again
            pass
        return seen

    assert asyncio.run(asyncio.wait_for(play(), 60)) == ["a", "too large", "small"]
