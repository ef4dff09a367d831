"""The memory tier's keepers: on every node of a run, an actor owns the memory into which workers copy their state.

A keeper outlives the workers, so the next group can read the copies of dead workers, on this node and on others. The
memory is an anonymous memfd of the keeper, which workers on its node open through /proc, so it is freed however the
keeper dies. A keeper exits when its run ends, or a minute after the run's driver has died.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytf._ray import raylets, worker_process
from raytf._ray.raylets import NodeReply
from raytf.checkpoint import snapshot_slot
from raytf.checkpoint.manifest import Checkpoint, CheckpointDocument
from raytf.checkpoint.slot_ledger import Generation, HeldShare, SlotAnswer, SlotLedger, SlotRequest, generations
from raytf.errors import CheckpointError

_NAMESPACE = "raytf"
#: Seconds that a keeper waits for a new driver after its run's driver has died, and seconds between two checks.
ALONE_SECONDS, _LOOK_SECONDS = 60.0, 2.0
#: Bytes of the node's memory that snapshots leave to other processes.
_LEAVE_BYTES = 1 << 30
#: Seconds to wait for a keeper's answer, and additional seconds if it is late but its node's raylet answers.
SURVEY_SECONDS, _BUSY_SECONDS = 3.0, 20.0
_READ_SECONDS = 600.0


class Keeper:
    """Owns memory on one node; see the module. It lives up to `alone_seconds` longer than its run's driver."""

    def __init__(self, alone_seconds: float = ALONE_SECONDS):
        self._alone_seconds = alone_seconds
        self._lock = threading.Lock()
        self._ledger = SlotLedger()
        #: Number of a slot -> file descriptor. Slots have numbers because closed descriptors are reused.
        self._slots: dict[int, int] = {}
        self._monitor: ActorHandle | None = None
        self._seen_at = time.monotonic()
        threading.Thread(target=self._watch, daemon=True, name="raytf-keeper").start()

    def reserve(self, request: SlotRequest, monitor: ActorHandle) -> SlotAnswer:
        """Return memory for two snapshots of one rank's share of the state: see `SlotLedger`.

        Args:
            request: the request. If it is repeated because its answer was late, it gets the same memory.
            monitor: an actor that lives as long as the run's driver.
        """
        with self._lock:
            ledger = self._ledger
            if ledger.may_reserve(request):
                self._monitor, self._seen_at = monitor, time.monotonic()
            answer = ledger.known(request)
            if answer is None:
                self._close(ledger.make_room(request, self._held()))
                written = {number: os.fstat(fd).st_size for number, fd in self._slots.items()}
                answer = ledger.grant(request, raylets.free_bytes() - _LEAVE_BYTES, written)
                self._slots |= {number: os.memfd_create(f"raytf-{request.attempt}") for number in answer.slots}
            return replace(answer, paths=tuple(map(self._path, answer.slots)))

    def tidy(self, attempt: str) -> bool:
        """Drop the snapshots of earlier attempts that are no longer needed. Return whether `attempt` has none left to
        drop."""
        with self._lock:
            self._close(self._ledger.tidy(self._held()))
            return self._ledger.is_tidy(attempt)

    def held(self) -> list[HeldShare]:
        with self._lock:
            return list(self._held().values())

    def newest(self, attempt: str) -> int | None:
        """Return the newest step whose whole state is held for an attempt. A call shows that the run continues."""
        with self._lock:
            if self._ledger.is_current(attempt):
                self._seen_at = time.monotonic()
            copies = generations({"here": self._held().values()}, [attempt])
            return copies[0].step if copies else None

    def read(self, path: str) -> np.ndarray:
        """Return the bytes of a slot, uint8 [n]."""
        with self._lock:
            (fd,) = (fd for number, fd in self._slots.items() if self._path(number) == path)
            memory = _mapped(fd)
            share = snapshot_slot.head(memory)
            return np.array(np.frombuffer(memory, np.uint8, 0 if share is None else share.bytes))

    def do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in this process, which already runs, while a task's process would have to start first."""
        return function(*arguments)

    def _held(self) -> dict[int, HeldShare]:
        held = {}
        for number, fd in self._slots.items():
            share = snapshot_slot.head(_mapped(fd))
            if share is not None:
                held[number] = HeldShare(**asdict(share), path=self._path(number))
        return held

    def _path(self, number: int) -> str:
        return f"/proc/{os.getpid()}/fd/{self._slots[number]}"

    def _close(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            os.close(self._slots.pop(number))

    def _watch(self) -> None:
        while time.monotonic() - self._seen_at < self._alone_seconds:
            time.sleep(_LOOK_SECONDS)
            monitor = self._monitor
            try:
                if monitor is not None and ray.get(monitor.is_there.remote(), timeout=30) and monitor is self._monitor:
                    self._seen_at = time.monotonic()
            except ray.exceptions.ActorDiedError:
                with self._lock:
                    if monitor is self._monitor:
                        self._ledger.desert()
            except ray.exceptions.RayError:
                pass  # temporarily unreachable
        os._exit(0)


def _mapped(fd: int) -> Any:
    size = os.fstat(fd).st_size
    return mmap.mmap(fd, size, prot=mmap.PROT_READ) if size else b""


def keeper(run_uri: str) -> Any:
    """Return the handle of this node's keeper for a run. If there is none, start it without waiting for it."""
    node = ray.get_runtime_context().get_node_id()
    return (
        ray.remote(Keeper)
        .options(
            name=_name(run_uri, node),
            namespace=_NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_concurrency=4,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            # With the environment of the requesting worker, the keeper would use up that worker's warm process.
            runtime_env={"env_vars": {worker_process.HOOK: ""}},
        )
        .remote()
    )


def keeper_on(run_uri: str, node: str) -> Any:
    """Return the handle of a node's keeper for a run; None if there is none, or Ray does not answer."""
    try:
        return ray.get_actor(_name(run_uri, node), namespace=_NAMESPACE)
    except (ValueError, ray.exceptions.RayError):
        return None


def survey(
    run_uri: str, seconds: float = SURVEY_SECONDS, is_enough: Callable[[dict[str, list[HeldShare]]], bool] | None = None
) -> dict[str, list[HeldShare]]:
    """Return the shares of a run that the nodes of the cluster hold, by node, without nodes that answer too late.

    Args:
        seconds: how long to wait for all answers.
        is_enough: returns whether the answers so far suffice, without those of busy nodes.
    """
    asked = {keeper.held.remote(): node for node, keeper in _keepers(run_uri).items()}
    if not asked:
        return {}
    done, late = ray.wait(list(asked), num_returns=len(asked), timeout=seconds)
    if late and not (is_enough and is_enough(_answers(done, asked))):
        # Wait longer for busy nodes, which hold as much as others, but not for frozen ones.
        silent = {asked[answer] for answer in late}
        heard = raylets.ask(node for node in ray.nodes() if node["NodeID"] in silent and node["Alive"])
        busy = [answer for answer in late if heard.get(asked[answer]) is NodeReply.LIVES]
        done += ray.wait(busy, num_returns=len(busy), timeout=_BUSY_SECONDS)[0] if busy else []
    return _answers(done, asked)


def _answers(done: Collection[Any], asked: Mapping[Any, str]) -> dict[str, list[HeldShare]]:
    held: dict[str, list[HeldShare]] = {}
    for answer in done:
        with contextlib.suppress(ray.exceptions.RayError):  # the keeper has just died
            held[asked[answer]] = ray.get(answer)
    return held


def load(run_uri: str, generation: Generation) -> Checkpoint:
    """Return a verified snapshot from this node's memory, or over the network from another node's.

    Raises:
        CheckpointError: it cannot be read completely from any holder.
    """
    here = ray.get_runtime_context().get_node_id()
    problem = "no node holds it"
    for node in sorted(generation.holders, key=lambda n: n != here):
        try:
            return _read(run_uri, generation, node, node == here)
        except (CheckpointError, OSError, ValueError, KeyError, ray.exceptions.RayError) as error:
            problem = str(error)
    raise CheckpointError(f"the snapshot of step {generation.step} in memory could not be read: {problem}")


def dismiss(run_uri: str) -> None:
    """Kill all keepers of a run."""
    for actor in _keepers(run_uri).values():
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(actor)


def _read(run_uri: str, generation: Generation, node: str, is_here: bool) -> Checkpoint:
    actor = None if is_here else _keepers(run_uri)[node]
    tensors: dict[str, np.ndarray] = {}
    document: dict[str, Any] = {}
    for held in generation.holders[node]:
        if actor is None:
            fd = os.open(held.path, os.O_RDONLY)
            try:
                memory = _mapped(fd)
            finally:
                os.close(fd)
        else:
            memory = ray.get(actor.read.remote(held.path), timeout=_READ_SECONDS).data
        share, own, live, slow = snapshot_slot.parse(memory)
        if (share.step, share.attempt, share.share) != (held.step, held.attempt, held.share):
            raise CheckpointError(f"the snapshot of step {generation.step} was overwritten")
        if tensors and live.get("weights_hash") != document.get("weights_hash"):
            raise CheckpointError(f"the ranks did not agree on the weights of step {generation.step}")
        tensors.update(own)
        document.update({**slow, **live})
    return Checkpoint(
        f"memory of {len(generation.holders)} node{'s' if len(generation.holders) > 1 else ''}",
        generation.step,
        CheckpointDocument.parse(document),
        tensors,
        is_in_memory=True,
    )


def _prefix(run_uri: str) -> str:
    return f"raytf-keeper-{hashlib.sha256(run_uri.encode()).hexdigest()[:16]}-"


def _name(run_uri: str, node: str) -> str:
    return f"{_prefix(run_uri)}{node}"


def _keepers(run_uri: str) -> dict[str, Any]:
    prefix, keepers = _prefix(run_uri), {}
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["namespace"] == _NAMESPACE and entry["name"].startswith(prefix):
            with contextlib.suppress(ValueError):  # it has died since it was listed
                keepers[entry["name"].removeprefix(prefix)] = ray.get_actor(entry["name"], namespace=_NAMESPACE)
    return keepers
