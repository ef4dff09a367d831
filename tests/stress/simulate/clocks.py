"""Clocks and random names for the code under simulation: what it asks for is the simulated process's, or the seed's."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator

from tests.stress.simulate.world import World


@contextlib.contextmanager
def simulated(world: World) -> Iterator[None]:
    """During the `with` statement, answer `time.time` with the wall clock of the process that runs, which may be wrong
    and jump, `time.monotonic` with the world's clock, and `uuid.uuid4` with what the world draws."""
    draw = world.names

    def wall_clock() -> float:
        return 1.8e9 + world.now + world.clock_errors.get(world.running, 0.0)

    before = time.time, time.monotonic, uuid.uuid4
    time.time, time.monotonic = wall_clock, lambda: world.now
    uuid.uuid4 = lambda: uuid.UUID(int=draw.getrandbits(128), version=4)
    try:
        yield
    finally:
        time.time, time.monotonic, uuid.uuid4 = before
