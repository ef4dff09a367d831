"""Parts that scale.py measures: the work of a rank, the monitor or the driver, prepared for a number of workers."""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

from raytf.data.plan import assign
from raytf.distributed import step_agreement
from raytf.driver.monitor.actor import Monitor
from raytf.driver.supervision.hang_detector import HangDetector
from raytf.driver.supervision.retry import NodeExclusion
from raytf.driver.supervision.watchdog import Stragglers
from raytf.runs import ledger
from raytf.runs.status import Status
from raytf.training.process.heartbeat_types import Activity, HeartbeatState


class Stored:
    """A run's folder in a dictionary: what storage itself costs is not measured here."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def put(self, name: str, data: bytes) -> None:
        self.files[name] = data

    def get(self, name: str) -> bytes:
        return self.files[name]

    def list(self, folder: str) -> list[str]:
        return []


def made_shares(names: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Return what the ranks report about their shares, those that have one."""
    return [
        {"file": f"share-{rank:05d}.safetensors", "bytes": 10_000_000 + rank, "crc32c": 2**31 + rank, "names": own}
        for rank, own in enumerate(names)
        if own
    ]


def reduction_of(tensors: int, columns: int, shards: int, world_size: int) -> Callable[[], Any]:
    """Return a call of `FixedPointReduction.reduce`, without other ranks: tensors of one number each, and rows of some
    columns."""
    import tensorflow as tf

    from raytf.distributed.allreduce.reduction import FixedPointReduction, packed
    from raytf.distributed.encoding.wire import WireLayout, WorkerPart

    exact = FixedPointReduction(WireLayout([[1]] * tensors, [tf.float32] * tensors), shards)
    own = assign(shards, world_size)[world_size // 2]
    rows = tf.zeros([len(own), columns + exact.extra])
    summed = [tf.zeros([1], tf.int32)] * tensors

    @tf.function(autograph=False)
    def step() -> Any:
        part = WorkerPart(packed(tf.identity), own, shards)
        return exact.reduce(part, lambda *_: (summed, rows, []), tf.zeros([step_agreement.LENGTH])).row

    step()
    return lambda: step().numpy()


def beats(world_size: int, probes: int) -> list[HeartbeatState]:
    """Return one heartbeat of each rank."""
    node = "0123456789abcdef0123456789abcdef0123456789abcdef0123"
    return [
        HeartbeatState(
            group=1,
            rank=rank,
            world_size=world_size,
            node=f"{node}{rank // 8:04x}",
            address=f"10.0.{rank // 256}.{rank % 256}",
            pid=1000 + rank,
            step=100 * probes,
            activity=Activity.STEP,
            seconds=0.01,
            step_seconds=0.1,
            probes=probes,
            probe_seconds=probes * (0.01 + 1e-6 * (rank * 7919 % 1000)),
            input_seconds=0.001 * probes,
        )
        for rank in range(world_size)
    ]


def heard(world_size: int) -> tuple[Monitor, Callable[[], Any]]:
    """Return a monitor of a group, and the heartbeats of all its ranks."""
    monitor = Monitor()
    monitor.begin_group()
    told = beats(world_size, 1)

    def hear() -> None:
        for beat in told:
            monitor.beat(beat)

    hear()
    return monitor, hear


def judged(world_size: int) -> Callable[[], Any]:
    """Return the driver's check of all heartbeats, which arrive pickled."""
    monitor, detector = heard(world_size)[0], HangDetector(30.0)

    def look() -> Any:
        return detector.judge(time.monotonic(), pickle.loads(pickle.dumps(monitor.sightings())), {})

    return look


def stragglers(world_size: int) -> Callable[[], Any]:
    """Return a check for stragglers, each time with new measurements of all ranks."""
    looked = Stragglers()
    told = (beats(world_size, n) for n in itertools.count(1))
    for _ in range(5):
        looked.find_new(next(told))
    latest = next(told)  # making them is not a part of it

    def look() -> None:
        before = looked._before
        looked.find_new(latest)
        looked._before = before

    return look


def excluded(world_size: int) -> Callable[[], Any]:
    """Return an exclusion check of nodes with one worker each, three of which have faults."""
    nodes = [f"node-{n:05d}" for n in range(world_size)]
    exclusion = NodeExclusion()
    for _ in range(3):
        exclusion.fault(nodes[:3], 0.0)
    return lambda: exclusion.excluded(nodes, 1.0)


def events(world_size: int) -> list[dict[str, Any]]:
    """Return the events of a minute in which a rank fails and the group restarts."""
    monitor = heard(world_size)[0]
    monitor.update(Status(100, 1000, 1, 10, world_size, {"loss": 0.1, "accuracy": 0.9}))
    node = beats(1, 1)[0].node
    text = "rank 3 died: its node is gone"
    monitor.event("fault", {"cause": "node_lost", "ranks": [3], "nodes": [node], "text": text, "retry": True})
    monitor.event("group", {"workers": world_size})
    phases = {"actors": 4.6, "tensorflow": 3.1, "rendezvous": 0.2, "build": 0.4, "restore": 0.1, "first step": 0.9}
    attempt = {"attempt": "20261121T101500.123-3f2a9c", "world_size": world_size, "from_step": 90, "tier": "memory"}
    monitor.event("attempt", {**attempt, "node": node, "phases": phases})
    monitor.update(Status(100, 1000, 1, 10, world_size, {"loss": 0.1, "accuracy": 0.9}))
    return monitor.read()[2]


def written(world_size: int) -> Callable[[], Any]:
    """Return a function that writes a file of the ledger."""
    some = events(world_size)
    run: Any = Stored()

    def write() -> None:
        written = ledger.Ledger(run, "name")
        written.add(itertools.islice(itertools.cycle(some), ledger.FILE_EVENTS))
        written.flush()

    return write
