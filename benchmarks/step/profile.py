"""Pictures of where the time of one distributed step goes, of raytf and of a script for MWMS written by hand.

    python -m benchmarks.step.profile

Both train the MNIST CNN with 2 workers, real `raytf.fit` the one (with floats, and in exact mode), and TensorFlow's
profiler looks at rank 0. Draws step-raytf.svg, step-raytf-exact.svg and step-mwms.svg into docs/evidence/images on one
scale of time: the step of median length, one lane for each kind of work. Operations of one kind that overlap count
once; those of several kinds may overlap each other. The profiler itself takes time, more where operations are many and
small.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import tyro

from benchmarks import harness
from benchmarks.peers import common
from benchmarks.step import trace as step_trace
from benchmarks.step.trace import KINDS, Step
from benchmarks.step.workers import WARM
from benchmarks.turns import Conductor

#: Title -> file name, script and flags of its own.
PROGRAMS = {
    "raytf": ("step-raytf", ["step/workers_job.py", "--mode", "float"]),
    "raytf, exact": ("step-raytf-exact", ["step/workers_job.py", "--mode", "exact"]),
    "MWMS by hand": ("step-mwms", ["peers/mwms_tutorial.py"]),
}
#: One for each kind, on white; that of the report where it has the same sort.
COLORS = dict(zip(KINDS, ("#2f8f5b", "#b07d09", "#cc3d37", "#cf6a1c", "#9a4fae", "#2f6fce", "#b9c0cb"), strict=True))
#: Of the drawing, in pixels: the lanes' names, the lanes, their numbers.
_LEFT, _WIDE, _RIGHT, _LANE, _TOP = 240, 700, 110, 34, 64


@dataclass(frozen=True)
class Arguments:
    """Draw where the time of a step goes."""

    workers: int = 2
    """How many."""
    threads: int = 1
    """Of each, within an operation."""
    steps: int = 64
    """That the profiler sees."""
    folder: Path | None = None
    """Where the drawings go: docs/evidence/images, or with --quick a temporary folder."""
    quick: bool = False
    """Fewer steps; docs/evidence/images stays as it is."""
    pairs: int = 1
    """Not used: a profile is no comparison."""
    json: Path | None = None
    """Write what was found here."""


def profile(arguments: Arguments) -> dict[str, list[Step]]:
    """Profile the steps of each program, one program after the other."""
    use_gpu = harness.gpus() >= arguments.workers
    around = common.environment()
    if not use_gpu:
        around["CUDA_VISIBLE_DEVICES"] = "-1"
    found = {}
    for title, (_, command) in PROGRAMS.items():
        with (
            tempfile.TemporaryDirectory(prefix="rd-", ignore_cleanup_errors=True) as folder,
            contextlib.ExitStack() as stack,
        ):
            words = [sys.executable, str(harness.HERE / command[0]), *command[1:], "--address", "{address}"]
            words += ["--workers", str(arguments.workers), "--threads", str(arguments.threads)]
            words += ["--profile", f"{folder}/profile", *(["--use-gpu"] if use_gpu else [])]
            words += ["--shards", str(arguments.workers)] if title == "raytf" else []  # what the script computes
            ranks = 1 if title.startswith("raytf") else arguments.workers
            log = Path(folder) / "log"
            conductor = Conductor.started(stack, title, words, ranks, log, around | {"TMPDIR": folder}, 5.0)
            conductor.run(WARM)
            conductor.run(arguments.steps)
            conductor.run(16)  # the profile is written before
            found[title] = step_trace.split(step_trace.read(Path(folder) / "profile"), arguments.steps)
    return found


def picture(title: str, steps: Sequence[Step], longest: float) -> str:
    """Draw one step as SVG.

    Args:
        title: of whom.
        steps: all that were seen.
        longest: seconds that the width stands for.
    """
    shown = step_trace.typical(steps)
    kinds = [kind for kind in KINDS if step_trace.median(steps, kind)]
    wide, high = _LEFT + _WIDE + _RIGHT, _TOP + _LANE * len(kinds) + 40
    scale = _WIDE / longest
    text = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}" '
        f'role="img" aria-label="{escape(title)}: where the time of a step goes" '
        'font-family="system-ui, Segoe UI, Roboto, DejaVu Sans, sans-serif" font-size="14" fill="#1b2230">',
        f'<rect width="{wide}" height="{high}" fill="#ffffff"/>',
        f'<text x="16" y="26" font-size="17" font-weight="600">{escape(title)}: one step of rank 0, '
        f"{1000 * shown.seconds:.1f} ms</text>",
        f'<text x="{wide - 16}" y="{_TOP - 10}" text-anchor="end" fill="#566072">median</text>',
    ]
    bottom = _TOP + _LANE * len(kinds)
    for at in ticks(1000 * longest):
        x = _LEFT + at / 1000 * scale
        text.append(f'<path d="M{x:.1f} {_TOP}V{bottom}" stroke="#e8ebf0"/>')
        text.append(f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle" fill="#566072">{at:g} ms</text>')
    for lane, kind in enumerate(kinds):
        top = _TOP + _LANE * lane
        middle = top + _LANE / 2 + 5
        text.append(f'<path d="M16 {top + _LANE}H{wide - 16}" stroke="#dde1e8"/>')
        text.append(f'<text x="{_LEFT - 14}" y="{middle}" text-anchor="end">{escape(kind)}</text>')
        for begin, end in shown.intervals[kind]:
            x, length = _LEFT + begin * scale, max(0.4, (end - begin) * scale)
            text.append(
                f'<rect x="{x:.2f}" y="{top + 6}" width="{length:.2f}" height="{_LANE - 12}" fill="{COLORS[kind]}"/>'
            )
        each = 1000 * step_trace.median(steps, kind)
        text.append(f'<text x="{wide - 16}" y="{middle}" text-anchor="end">{each:.2f} ms</text>')
    end = _LEFT + shown.seconds * scale
    text.append(f'<path d="M{end:.1f} {_TOP}V{bottom}" stroke="#1b2230" stroke-dasharray="4 3"/>')
    return "\n".join([*text, "</svg>\n"])


def ticks(longest: float, most: int = 8) -> list[float]:
    """Round milliseconds from 0 on, not more than so many."""
    sizes = (factor * 10.0**power for power in range(-2, 6) for factor in (1, 2, 5))
    size = next(size for size in sizes if longest / size <= most)
    return [i * size for i in range(int(longest / size) + 1)]


def main(arguments: Arguments) -> int:
    folder = arguments.folder or harness.ROOT / "docs" / "evidence" / "images"
    if arguments.quick:
        folder = arguments.folder or Path(tempfile.gettempdir()) / "raytf-step-profile"
        arguments = Arguments(**vars(arguments) | {"steps": 32})
    report = harness.Report("step_profile", "Where the time of a distributed step goes: MNIST CNN, rank 0")
    found = profile(arguments)
    longest = 1.02 * max(step_trace.typical(steps).seconds for steps in found.values())
    folder.mkdir(parents=True, exist_ok=True)
    for title, steps in found.items():
        name = f"{title}, {arguments.workers} workers"
        (folder / f"{PROGRAMS[title][0]}.svg").write_text(picture(name, steps, longest))
        report.readings.append(harness.Reading(name, "step", "ms", [1000 * step.seconds for step in steps]))
        for kind in KINDS:
            values = [1000 * step.total(kind) for step in steps]
            if step_trace.median(steps, kind):
                report.readings.append(harness.Reading(name, kind, "ms", values))
    report.notes.append(f"Drawn in {os.path.relpath(folder, harness.ROOT)}.")
    return report.finish(arguments.json)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments)))
