"""`raytf bisect RUN_A RUN_B`: find the first step at which two runs differ, and why if their folders show it."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from typing import Any

import tyro

from raytf.audit import run_diff
from raytf.commands._places import run_uri
from raytf.config.terminal_text import say
from raytf.errors import ConfigError
from raytf.storage.storage import Storage


@dataclass(frozen=True)
class Bisect:
    """Find the first step at which two runs differ, and the reason: settings, data, model, records of the batch,
    gradients of a shard, or an update. Neither run is changed. The exit code is 1 if they differ."""

    one: tyro.conf.Positional[str]
    """Folder of a run: STORAGE/NAME, such as s3://bucket/runs/mnist; or the name of a run in ~/raytf-runs."""
    other: tyro.conf.Positional[str]
    """The run to compare it with, in the same form."""
    json: bool = False
    """Print JSON instead of lines."""


def main(flags: Bisect) -> None:
    """Print the first difference, and exit with 1 if there is one."""
    traces = [run_diff.load(Storage(run_uri(uri))) for uri in (flags.one, flags.other)]
    for trace in traces:
        if not len(trace.steps["step"]):
            raise ConfigError(f"{trace.place} has no recorded steps. Expected the folder of a run, STORAGE/NAME.")
    result = run_diff.part(*traces)
    reasons = run_diff.why(result)
    if flags.json:
        differs = result.difference
        shards = None if differs is None else {"shards": differs.shards, "tensors": differs.tensors}
        document: dict[str, Any] = {"same_steps": result.same, "step": result.step, "differs": shards, "why": reasons}
        print(json.dumps({**document, "records": result.records}, indent=1))
    else:
        for line in result_lines(result, reasons, [len(trace.steps["step"]) for trace in traces]):
            say(line)
        for trace in traces if result.step is not None else ():
            say(f"  to inspect it: raytf replay {shlex.quote(trace.place)} --step {result.step} --dump DIR -- COMMAND")
    sys.exit(0 if result.step is None else 1)


def result_lines(result: run_diff.Parting, reasons: list[str], lengths: list[int]) -> list[str]:
    """Return the result for people, one line each.

    Args:
        reasons: the result of `run_diff.why`.
        lengths: the number of steps of each run.
    """
    if result.step is None:
        has = f"{lengths[0]} steps" if lengths[0] == lengths[1] else f"the {result.same} steps that both have"
        lines = [f"{has} are the same"]
    else:
        same = "1 step is the same; " if result.same == 1 else f"{result.same} steps are the same; "
        lines = [f"{same if result.same else ''}the runs part at step {result.step}"]
    return [*lines, *(f"  {reason}" for reason in reasons)]
