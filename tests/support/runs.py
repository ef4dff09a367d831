"""A run in storage as a driver would have left it, made of events alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from raytf.runs import ledger
from raytf.storage.storage import Storage

BEGIN = 1.8e9


class Script:
    """Writes events, at seconds from the run's begin."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def at(self, seconds: float, kind: str, **fields: Any) -> Script:
        self.events.append({"time": BEGIN + seconds, "kind": kind, **fields})
        return self

    def trains(self, seconds: float, step: int, is_new: bool = False, **fields: Any) -> Script:
        told = {"phase": "training", "step": step, "total": 1000, "workers": 2, "loss": 1.0 / (1 + step), "stall": 0.0}
        told |= {"samples_per_second": 640.0, "checkpoint": None, "snapshot": None, "snapshot_bytes": 4096}
        return self.at(seconds, "phase" if is_new else "progress", **told | fields)

    def attempt(self, seconds: float, workers: int, step: int, tier: str, **phases: float) -> Script:
        fields = {"world_size": workers, "from_step": step, "tier": tier, "phases": phases, "step": step, "stall": 0.0}
        return self.at(seconds, "attempt", **fields)

    def write(self, folder: str, name: str = "a") -> Storage:
        run = Storage(folder)
        book = ledger.Ledger(run, name)
        book.add(self.events)
        assert book.flush()
        return run


def a_run(evil: str = "a peer does not answer") -> Script:
    """Two workers, a fault with text `evil`, a death of the driver, a resize, an end: 100 s."""
    line = Script().at(0, "driver", state="started", pid=7, host="head").at(1, "group", workers=2)
    line.attempt(10, 2, 0, "new", processes=5.0, **{"first step": 4.0}).trains(10, 1, True).trains(20, 100)
    line.at(21, "save", of_step=95, step=110, stall=0.0).trains(30, 200, checkpoint=95, snapshot=195)
    line.at(32, "fault", cause="peer_lost", ranks=[1], nodes=["b" * 56], text=evil, step=210, stall=0.0, silent=1.0)
    line.at(33, "group", workers=2).attempt(40, 2, 195, "memory", notice=1.0, processes=4.0, **{"first step": 3.0})
    line.trains(40, 196, True, checkpoint=95).trains(50, 300, checkpoint=95, snapshot=290)
    line.at(60, "driver", state="started", pid=8, host="head").at(61, "group", workers=2)
    line.attempt(66, 2, 95, "durable", processes=4.0, **{"first step": 1.0}).trains(66, 96, True, checkpoint=95)
    line.trains(76, 400, checkpoint=95, snapshot=390)
    line.at(77, "resize", **{"from": 2, "to": 1, "why": "a node is about to go", "step": 410, "stall": 0.0})
    line.trains(78, 411, True, phase="resizing").at(79, "group", workers=1)
    line.attempt(84, 1, 411, "memory", processes=3.0, **{"first step": 2.0}).trains(84, 412, True, workers=1)
    line.trains(97, 1000, True, workers=1, phase="testing", checkpoint=411)
    return line.at(100, "driver", state="ended", outcome="finished")


def add_steps(run: Storage, loss: Callable[[int], float], steps: int = 1000) -> None:
    rows = "".join(f"{s},0,{loss(s)},0.001\n" for s in range(1, steps + 1))
    run.put("steps/000000000001-a.csv", ("step,epoch,loss,learning_rate\n" + rows).encode())


def add_result(run: Storage, **fields: Any) -> None:
    document = {"steps": 1000, "metrics": {"accuracy": 0.98}, "samples_per_second": 1234.0, "restarts": 3}
    run.put("result.json", json.dumps(document | fields).encode())
