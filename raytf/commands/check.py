"""`raytf check CLUSTER.yaml`: find mistakes in a cluster's YAML, before they cost money."""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import asdict, dataclass, replace
from typing import Any

import tyro

from raytf.commands._table import show
from raytf.config.terminal_text import say
from raytf.doctor import inputs, local_environment
from raytf.doctor.check import cost as costs
from raytf.doctor.check import job_fit
from raytf.doctor.check import offline as check_offline
from raytf.doctor.check.cost import Cost
from raytf.doctor.check.offline import CheckReport
from raytf.doctor.clouds import ssh_hosts
from raytf.doctor.document import Platform, parse, place_of
from raytf.doctor.finding import ConfigFinding, Severity, place
from raytf.errors import ConfigError


@dataclass(frozen=True)
class Check:
    """Check cluster YAMLs of `ray up` and manifests of KubeRay, also against the cloud, hosts or API server they name.

    The exit code is 0 without findings, 1 with warnings only, and 2 with errors or if a file cannot be read. Nothing is
    changed, except that --job writes an object of a few bytes to the job's bucket and deletes it.
    """

    files: tyro.conf.Positional[tuple[str, ...]] = ()
    """Cluster YAMLs of `ray up` (providers aws, gcp, azure and local; for others, only the common parts are checked),
    manifests with a RayCluster, RayJob, RayService or RayCronJob, or - for standard input. A folder stands for all YAML
    files in it; a folder with a kustomization.yaml stands for the output of `kubectl kustomize`."""
    job: str | None = None
    """The job to run there, quoted, such as 'python jobs/mnist.py --workers 1:8': check whether its workers fit."""
    working_dir: str | None = None
    """The folder that `ray job submit --working-dir` uploads: check whether it is too large."""
    offline: bool = False
    """Contact no cloud, host or API server; this needs no credentials."""
    trust: bool = False
    """Run the file's auth.ssh_proxy_command on this machine, and fetch the remote resources of a kustomization. Without
    this flag, raytf asks on a terminal before it runs the command, and never runs it elsewhere."""
    json: bool = False
    """Print JSON instead of text."""


@dataclass(frozen=True)
class Checked:
    """A report, with the answers of the cloud or the hosts.

    Attributes:
        report: the findings in the file and from the cloud or the hosts.
        notes: the credentials and roles that were used.
        spot: node type -> current spot price, in US dollars an hour.
    """

    report: CheckReport
    notes: tuple[str, ...] = ()
    spot: tuple[tuple[str, float], ...] = ()


def main(flags: Check) -> None:
    """Run the command."""
    if not flags.files:
        raise ConfigError("No file given. Usage: raytf check CLUSTER.yaml")
    need = None if flags.job is None else job_fit.parse(flags.job)
    here = local_environment.here()
    unread: dict[str, str] = {}
    texts = inputs.read(flags.files, unread, flags.trust)
    first = next(iter(texts), None)
    done: dict[str, Checked] = {}
    for name, text in texts.items():
        report = check_offline.check(text, here, need, flags.working_dir if name == first else None)
        done[name] = Checked(report) if flags.offline else _online(name, text, here, need, report, flags.trust)
    done |= {name: Checked(CheckReport((inputs.unreadable(problem),), None)) for name, problem in unread.items()}
    if flags.json:
        print(json.dumps([_document(name, checked) for name, checked in done.items()], indent=1))
    else:
        for name, checked in done.items():
            _print(name, checked)
    code = max(exit_code(checked.report) for checked in done.values())
    if threading.active_count() > 1:
        # A thread still waits for an answer, so the interpreter would not exit.
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def _online(
    name: str,
    text: str,
    here: local_environment.Surroundings,
    need: job_fit.JobNeeds | None,
    offline: CheckReport,
    trust: bool,
) -> Checked:
    from raytf.doctor.probe import online  # boto3 and pyarrow are not needed for --help

    seen = online.inspect(text, here, need, offline, trust or trusted(text, name))
    findings = check_offline.in_order([*offline.findings, *seen.findings])
    return Checked(
        replace(offline, findings=tuple(findings)), tuple(sorted(seen.notes)), tuple(sorted(seen.spot.items()))
    )


def exit_code(report: CheckReport) -> int:
    """Return 2 for errors, 1 for warnings, otherwise 0. Values that are still to be filled in do not count."""
    return 2 if report.of(Severity.ERROR) else 1 if report.of(Severity.WARNING) else 0


def _document(name: str, checked: Checked) -> dict[str, Any]:
    report = checked.report
    rows = [
        asdict(f) | {"severity": f.severity.value, "place": place(f.path), "path": list(f.path)}
        for f in report.findings
    ]
    cost = None if report.cost is None else _cost(report.cost, dict(checked.spot))
    return {"file": name, "findings": rows, "notes": list(checked.notes), "cost": cost}


def _cost(cost: Cost, spot: dict[str, float]) -> dict[str, Any]:
    lines = [line._asdict() for line in cost.lines]
    return asdict(cost) | {"lines": lines, "spot_now": spot, "and_more": bool(cost.unknown)}


def _print(name: str, checked: Checked) -> None:
    report = checked.report
    for f in report.findings:
        say(f"{name}{f':{f.line}' if f.line else ''}: {f.severity.value}: {f.what} [{f.code}]")
        if f.path:
            say(f"    where: {place(f.path)}")
        say(f"    why:   {f.why}")
        say(f"    fix:  {f.fix}")
    counts = [(len(report.of(s)), s.value) for s in (Severity.ERROR, Severity.WARNING)]
    text = ", ".join(f"{n} {word}{'' if n == 1 else 's'}" for n, word in counts if n)
    text = text or ("nothing found" if report.has_ray else "nothing of Ray here")
    open_ones: list[ConfigFinding] = report.of(Severity.FILL_IN)
    say(f"{name}: {text}" + (f", {len(open_ones)} to fill in" if open_ones else ""))
    for note in checked.notes:
        say(f"    {note}")
    if report.cost is not None:
        _print_cost(report.cost, dict(checked.spot))


def _print_cost(cost: Cost, spot: dict[str, float]) -> None:
    rows = [
        (
            f"    {line.name}",
            line.machine,
            "?" if line.usd is None else f"{line.usd:.4f}",
            "?" if line.disks is None else f"{line.disks:.4f}",
            f"{line.address:.4f}",
            f"{line.market}, now {spot[line.name]:.4f}" if line.name in spot else line.market,
            str(line.least),
            str(line.most),
        )
        for line in cost.lines
    ]
    show(("    type", "machine", "USD/h", "disks", "address", "market", "min", "max"), rows)
    cheaper = "; spot nodes usually cost a third to two thirds of that, never more" if cost.spot and not spot else ""
    unknown = f"; no price is known for {', '.join(cost.unknown)}" if cost.unknown else ""
    say(f"    {cost.per_hour}, list prices of {cost.prices_of}{cheaper}{unknown}")
    if cost.traffic is not None:
        say(
            f"    gradients between {cost.traffic.zones} zones: up to {cost.traffic.usd:.2f} USD an hour more, with "
            f"{cost.traffic.workers} workers, {costs.WEIGHTS / 1e6:g} M weights and {costs.STEPS} steps a second"
        )


def trusted(text: str, name: str) -> bool:
    """Return whether the user lets the file's SSH proxy command run here; False without a terminal to ask on."""
    documents, _ = parse(text)
    document = documents[0] if documents else None
    command = "" if document is None or place_of(document) is not Platform.HOSTS else ssh_hosts.proxy_of(document)
    if not command or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    say(f"{name} wants to run this command here to reach its hosts: {command}", sys.stderr)
    print("Run it? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().casefold() in ("y", "yes")
