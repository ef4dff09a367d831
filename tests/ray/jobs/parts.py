"""Work of many parts, some of which do as users do."""

import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import raytf


@dataclass(frozen=True)
class Job:
    """Add numbers that many parts make."""

    parts: int = 8
    fault: str = "none"
    """raises, refuses, exits, exits-once, waits, unpicklable, unpicklable-part."""
    mark: str = ""
    """A file: exits-once makes it, and waits has each part wait for it."""
    cluster: raytf.WorkerFlags = field(default_factory=raytf.WorkerSection)


def number(part: int) -> float:
    import numpy as np

    return float(np.random.default_rng(part).normal())


def main(job: Job) -> None:
    fault, mark = job.fault, job.mark
    lock = threading.Lock() if "unpicklable" in fault else None

    def compute(part: int) -> float:
        while fault == "waits" and part >= 4 and not Path(mark).exists():
            time.sleep(0.05)
        if fault == "raises" and part == 3:
            raise ZeroDivisionError("no darts")
        if fault == "refuses":
            raise raytf.DataError("there are no darts")
        if fault == "exits" and part == 3:
            os._exit(1)
        if fault == "exits-once" and part == 3 and not Path(mark).exists():
            Path(mark).touch()
            os._exit(1)
        if fault == "unpicklable":
            print(lock)
        return number(part)

    parts = [lock] if fault == "unpicklable-part" else list(range(job.parts))
    came: list[int] = []
    answers = raytf.on_workers(compute, parts, workers=job.cluster, on_answer=lambda part, _: came.append(part))
    assert sorted(came) == parts, came
    print("sum:", sum(answers).hex())


if __name__ == "__main__":
    raytf.cli(main)
