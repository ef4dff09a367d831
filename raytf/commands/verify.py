"""`raytf verify RUN`: read every byte of every checkpoint, and report which one a resume would restore."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

import tyro

from raytf.checkpoint import manifest, verify
from raytf.checkpoint.verify import CheckpointFinding, Worth
from raytf.commands._places import filled_run
from raytf.commands._table import show, size_text
from raytf.config.terminal_text import say
from raytf.errors import ConfigError
from raytf.runs import run_log
from raytf.runs.lease import LEASE_FILE
from raytf.storage.storage import PREFLIGHT_SECONDS, within


@dataclass(frozen=True)
class Verify:
    """Check every byte of every checkpoint of a run. The exit code is 1 if something is damaged or nothing can be
    restored."""

    run: tyro.conf.Positional[str]
    """The run's folder: STORAGE/NAME, such as s3://bucket/runs/mnist; or the name of a run in ~/raytf-runs."""
    json: bool = False
    """Print JSON instead of a table."""


def main(flags: Verify) -> None:
    """Print the findings, and exit with 1 if something is damaged or nothing can be restored."""
    run = filled_run(flags.run)

    def is_run() -> bool:
        return bool(run.list(manifest.FOLDER) or run.list(run_log.ATTEMPTS)) or run.exists(LEASE_FILE)

    # A file in place of a folder is damage, which `verify` reports with its reason.
    if not within(PREFLIGHT_SECONDS, is_run, run.locate("")):
        raise ConfigError(
            f"{run.locate('')} is not a run: it has no checkpoints. Expected STORAGE/NAME; `raytf runs STORAGE` lists "
            "them."
        )
    findings = verify.verify(run)
    chosen = verify.restorable(findings)
    if flags.json:
        print(json.dumps(_document(findings, chosen), indent=1))
    else:
        _print(findings, chosen)
    sys.exit(1 if chosen is None or any(f.state in (Worth.DAMAGED, Worth.NEWER) for f in findings) else 0)


def _document(findings: list[CheckpointFinding], chosen: CheckpointFinding | None) -> dict[str, Any]:
    rows = [{k: v for k, v in asdict(f).items() if k != "document"} | {"state": f.state.value} for f in findings]
    return {"checkpoints": rows, "restores": None if chosen is None else chosen.name}


def _print(findings: list[CheckpointFinding], chosen: CheckpointFinding | None) -> None:
    rows = [(f.name, str(f.step), size_text(f.bytes), f.state.value, "; ".join(f.problems)) for f in findings]
    if rows:
        show(("checkpoint", "step", "size", "state", "problems"), rows)
    newer = next((f for f in findings if f.state is Worth.NEWER), None)
    if newer is not None and (chosen is None or newer.step >= chosen.step):
        say(f"a resume is refused: checkpoint {newer.name} was {newer.problems[0]}")
    elif chosen is not None:
        say(f"a resume restores step {chosen.step} from {chosen.name}")
    elif any(f.state is Worth.DAMAGED for f in findings):
        say("a resume restores nothing: no checkpoint is intact")
    else:
        say("a resume starts from the beginning: there is no complete checkpoint")
