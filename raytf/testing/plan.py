"""Faults at given steps of a run, as written or as drawn from a seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict, Unpack

from raytf.testing import processes
from raytf.testing.cluster import ElasticCluster
from raytf.testing.faults import Fault, Kind, Report
from raytf.testing.job import Job
from raytf.testing.player import FaultPlayer, PlayLimits
from raytf.testing.storage_proxy import StorageProxy


class LimitArguments(TypedDict, total=False):
    """`player.PlayLimits` as keyword arguments."""

    most_nodes: int
    most_starts: int
    limit_seconds: float


class FaultPlan:
    """Faults in the order in which they are injected.

    Args:
        faults: with steps that do not go down.

    Raises:
        ValueError: the steps go down.
    """

    def __init__(self, faults: Sequence[Fault]):
        self.faults = list(faults)
        steps = [fault.step for fault in self.faults]
        if steps != sorted(steps):
            raise ValueError(f"faults are injected one after another, so their steps cannot go down: {steps}")

    @classmethod
    def random(
        cls,
        seed: int | str,
        steps: int,
        events: int,
        kinds: Sequence[Kind] = (Kind.WORKER, Kind.NODE, Kind.DRAIN, Kind.ADD, Kind.DRIVER),
        at_once: float = 0.2,
    ) -> FaultPlan:
        """A plan drawn from a seed; the same for the same arguments.

        Args:
            seed: of the draw.
            steps: of the run; its first four fifths are cut into as many parts as there are faults, and one comes at
                a random step of each.
            events: how many faults.
            kinds: to draw from; give one twice to have it drawn twice as often.
            at_once: share of faults that do not wait for recovery.

        Raises:
            ValueError: there are fewer steps than faults.
        """
        last = max(1, steps * 4 // 5)
        if events > last:
            raise ValueError(f"{events} faults do not fit in {steps} steps: expected at most {last}")
        draw = random.Random(f"raytf {seed}")
        edges = [1 + last * i // events for i in range(events + 1)] if events else []
        at = [draw.randrange(low, high) for low, high in itertools.pairwise(edges)]
        faults = []
        for number, step in enumerate(at):
            kind, target, seconds = draw.choice(kinds), draw.randrange(1000), round(draw.uniform(2, 12), 1)
            is_at_once = draw.random() < at_once
            faults.append(Fault(step, kind, target, seconds, at_once=number > 0 and is_at_once))
        return cls(faults)

    def run(
        self,
        command: Sequence[str],
        status_file: Path,
        log: Path,
        cluster: ElasticCluster | None = None,
        proxy: StorageProxy | None = None,
        env: Mapping[str, str] | None = None,
        folder: Path | None = None,
        **limits: Unpack[LimitArguments],
    ) -> Report:
        """Start a command, inject the faults, and start it again where one of them ended it.

        A fault waits until the run has reached its step and has recovered from the fault before, the latter at most
        90 s. The last node stays: what would end it is skipped. An exit code other than 0 is final unless a fault was
        injected since the command was started, or in the last minute.

        Args:
            command: with `--status-file` set to `status_file`.
            status_file: as raytf writes it: JSON with at least `step`, `workers`, `phase` and `time`.
            log: file for the output of the command; later starts get a number.
            cluster: on which it runs; None for a command with a Ray of its own.
            proxy: in front of the object store, for STORAGE.
            env: added to the environment of a plain user.
            folder: in which it runs; by default that of the log.
            limits: fields of `player.PlayLimits`: most_nodes, most_starts, limit_seconds.

        Raises:
            AssertionError: the run does not end in time; with the faults so far and what it printed.
        """
        environment = processes.environment(**{**(cluster.env if cluster else {}), **(env or {})})

        def start(log: Path) -> Job:
            return Job(command, log, environment, folder, status_file)

        return FaultPlayer(start, log, cluster, proxy, PlayLimits(**limits)).through(self.faults)
