"""Runs all offline checks of a file and estimates its cost. Neither needs credentials or a network."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from raytf.doctor import node_types
from raytf.doctor.check import (
    autostop,
    aws,
    azure,
    fallbacks,
    foreign_files,
    gcp,
    job_fit,
    kube_exposure,
    kube_images,
    kuberay,
    local_files,
    on_prem,
    pins,
    schema,
    shell_commands,
    templates,
    versions,
)
from raytf.doctor.check import (
    cost as costs,
)
from raytf.doctor.check.cost import Cost
from raytf.doctor.check.job_fit import JobNeeds, NodeSupply
from raytf.doctor.document import Document, parse
from raytf.doctor.finding import ConfigFinding, Path, Severity, error
from raytf.doctor.local_environment import Surroundings
from raytf.errors import ConfigError, one_line

#: Errors that a check raises at a value of an unexpected type.
ODD = (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError, OSError)
_ORDER = (Severity.ERROR, Severity.WARNING, Severity.FILL_IN)


@dataclass(frozen=True)
class CheckReport:
    """The findings in one file.

    Attributes:
        findings: by severity and line.
        cost: per hour, if a machine is known.
        has_ray: whether there is anything of Ray in the file, as opposed to manifests of other things.
    """

    findings: tuple[ConfigFinding, ...]
    cost: Cost | None = None
    has_ray: bool = True

    def of(self, severity: Severity) -> list[ConfigFinding]:
        return [f for f in self.findings if f.severity is severity]


def check(text: str, here: Surroundings, need: JobNeeds | None = None, working_dir: str | None = None) -> CheckReport:
    """Check a cluster YAML of `ray up`, or KubeRay manifests.

    Args:
        text: the file.
        here: this machine.
        need: the needs of a job that the cluster should run.
        working_dir: the folder that `ray job submit` will upload.
    """
    documents, findings = parse(text)
    manifests = [d for d in documents if kuberay.is_manifest(d)]
    is_yaml = all(f.code != "yaml-syntax" for f in findings)
    cost = None
    if other := foreign_files.find(text, documents) or templates.find(text, documents, is_yaml):
        findings = [other]
    elif not is_yaml:
        pass
    elif not documents:
        findings.append(error("empty", (), "the file is empty", "There is nothing to start.", "See cluster-configs/."))
    elif manifests:
        for document in manifests:
            findings += document.with_lines(_guarded(partial(_manifest, document, manifests, need)))
        findings += _guarded(partial(_all_manifests, manifests, here))
    else:
        document = documents[0]
        findings += document.with_lines(_guarded(partial(_cluster, document, here, need)))
        with contextlib.suppress(*ODD):  # a finding reports it
            cost = costs.estimate(fallbacks.as_cloud(document), costs.zone_traffic(document))
    has_ray = not manifests or any(kuberay.is_about_ray(d) for d in manifests)
    if working_dir is not None:
        findings += local_files.working_dir(working_dir, here)
    return CheckReport(tuple(in_order(findings)), cost, has_ray)


def _guarded(checks: Callable[[], Iterator[ConfigFinding]]) -> Iterator[ConfigFinding]:
    """Yield the findings of checks. If a check raises an error at a value, the last finding reports it."""
    try:
        yield from checks()
    except ODD as problem:
        yield cannot_judge(problem)


def cannot_judge(problem: Exception) -> ConfigFinding:
    """Return the finding that a check raised an error at a value."""
    what = f"a value has an unexpected type ({type(problem).__name__}: {one_line(problem, 200)})"
    why = "Ray or the cloud probably refuses it, and the rest of the file was not checked."
    return error("cannot-judge", (), what, why, "Check the values listed above, or delete them one by one.")


def _cluster(document: Document, here: Surroundings, need: JobNeeds | None) -> Iterator[ConfigFinding]:
    if isinstance(document.value, dict):
        yield from fallbacks.check(document)
        yield from autostop.check(document)
        document = fallbacks.as_cloud(document)
    yield from schema.check(document)
    if not isinstance(document.value, dict):
        return
    yield from node_types.check_counts(document)
    first = list(_machines(document, here))
    yield from first
    yield from _fallbacks(document, here, first)
    yield from shell_commands.check(document)
    yield from versions.check(document, here)
    yield from pins.check(document, here)
    yield from local_files.check(document, here)
    yield from local_files.placeholders(document)
    rooms = _rooms(document)
    if need is not None and rooms:
        limit = document.get("max_workers", default=2)
        most = limit if isinstance(limit, int) else None
        yield from job_fit.check(need, rooms, ("available_node_types",), most)


def _machines(document: Document, here: Surroundings) -> Iterator[ConfigFinding]:
    provider = document.get("provider", "type")
    yield from node_types.check(document)
    if provider == "aws" or (
        provider == "external" and any("InstanceType" in t.config for t in node_types.node_types(document))
    ):
        yield from aws.check(document)
    elif provider == "gcp":
        yield from gcp.check(document)
    elif provider == "azure":
        yield from azure.check(document)
    elif provider == "local":
        yield from on_prem.check(document, here)


def _fallbacks(document: Document, here: Surroundings, first: list[ConfigFinding]) -> Iterator[ConfigFinding]:
    """Check the machines of fallbacks, without repeating the findings of the first choice."""
    known = {(f.code, f.what) for f in first}
    for variant, config, entry in fallbacks.variants(document):
        for finding in [*_machines(variant, here), *versions.check(variant, here)]:
            if finding.path[: len(config)] == config and (finding.code, finding.what) not in known:
                yield fallbacks.at_entry(finding, config, entry, document)


def _rooms(document: Document) -> list[NodeSupply]:
    rooms = []
    for t in node_types.node_types(document):
        if t.is_head:
            rooms.append(NodeSupply("head", 1, t.has("CPU"), t.has("GPU"), t.path))
        if t.most > 0:
            rooms.append(NodeSupply(t.name, t.most, t.has("CPU"), t.has("GPU"), t.path, t.has("TPU")))
    return rooms


def _all_manifests(manifests: Sequence[Document], here: Surroundings) -> Iterator[ConfigFinding]:
    """Find what has to be judged for all manifests of a file at once; each finding has its line."""
    yield from kube_images.check([kuberay.images(d) for d in manifests], here)
    yield from kube_exposure.check(manifests)


def _manifest(document: Document, manifests: Sequence[Document], need: JobNeeds | None) -> Iterator[ConfigFinding]:
    yield from kuberay.check(document)
    yield from local_files.placeholders(document)
    if document.get("kind") not in kuberay.KINDS:
        return
    wanted, path = need, None
    job = kuberay.job_path(document)
    entrypoint = document.get(*job, "entrypoint")
    if isinstance(entrypoint, str) and need is None and "--workers" in entrypoint:
        path = (*job, "entrypoint")
        try:
            wanted = job_fit.parse(entrypoint)
        except ConfigError as problem:
            yield error("kube-value", path, str(problem), "The job exits at once.", "Fix the command.")
            return
        cluster = kuberay.cluster_of(document, manifests)
        yield from kuberay.gpus_from_zero(cluster, wanted, path)
    if wanted is not None:
        rooms, where = kuberay.rooms(document if path is None else cluster)
        if rooms:
            yield from job_fit.check(wanted, rooms, path or where)


def in_order(findings: Sequence[ConfigFinding]) -> list[ConfigFinding]:
    """Return findings sorted by severity and line, without duplicates (equal code, path and `what`)."""
    seen: set[tuple[str, Path, str]] = set()
    kept = []
    for f in findings:
        key = (f.code, f.path, f.what)
        if key not in seen:
            seen.add(key)
            kept.append(f)
    return sorted(kept, key=lambda f: (_ORDER.index(f.severity), f.line or 0))
