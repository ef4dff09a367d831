"""The online part of the preflight: asks the place that a file is about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from raytf.doctor.check import fallbacks, kuberay
from raytf.doctor.check.job_fit import JobNeeds
from raytf.doctor.check.offline import ODD, CheckReport, cannot_judge
from raytf.doctor.document import Document, Platform, parse, place_of
from raytf.doctor.finding import ConfigFinding, Severity
from raytf.doctor.local_environment import Surroundings
from raytf.doctor.probe import aws, azure, gcp, kube, ssh
from raytf.doctor.probe.queries import ProbeResults

#: Place -> who asks there.
_ASK: dict[Platform, Callable[[Document, Surroundings, JobNeeds | None], ProbeResults]] = {
    Platform.AWS: aws.inspect,
    Platform.GCP: gcp.inspect,
    Platform.AZURE: azure.inspect,
}


def inspect(
    text: str, here: Surroundings, need: JobNeeds | None, offline: CheckReport, trust: bool = False
) -> ProbeResults:
    """Ask the place that a file is about.

    Args:
        text: the file.
        here: this machine.
        need: what a job wants of the cluster.
        offline: what is known without asking; a file that is not filled in yet is about nothing that could be asked.
        trust: run what the file wants to be run on this machine.
    """
    try:
        return _inspect(text, here, need, offline, trust)
    except ODD as problem:
        return ProbeResults([cannot_judge(problem)])


def _inspect(text: str, here: Surroundings, need: JobNeeds | None, offline: CheckReport, trust: bool) -> ProbeResults:
    documents, _ = parse(text)
    if not documents or any(f.code in ("yaml-syntax", "wrong-type", "cannot-judge") for f in offline.findings):
        return ProbeResults()
    if any(f.code == "placeholder" for f in offline.of(Severity.FILL_IN)):
        return ProbeResults([_not_filled_in(offline)])
    manifests = [d for d in documents if kuberay.is_manifest(d)]
    if manifests:
        return _with_lines(kube.inspect(manifests, here), manifests[0])
    document = _with_all_zones(fallbacks.as_cloud(documents[0]), documents[0])
    if place_of(document) is Platform.HOSTS:
        return _with_lines(ssh.inspect(document, here, need, trust), document)
    ask = _ASK.get(place_of(document))
    return _with_lines(ask(document, here, need), document) if ask else ProbeResults()


def _with_all_zones(cloud: Document, original: Document) -> Document:
    """Put all zones back, so that each is asked about: `as_cloud` keeps the first, as Ray's own check does."""
    zones = original.get("provider", "availability_zone")
    if cloud is original or zones is None:
        return cloud
    return replace(cloud, value={**cloud.value, "provider": {**cloud.mapping("provider"), "availability_zone": zones}})


def _with_lines(seen: ProbeResults, document: Document) -> ProbeResults:
    seen.findings = document.with_lines(seen.findings)
    return seen


def _not_filled_in(offline: CheckReport) -> ConfigFinding:
    first = next(f for f in offline.of(Severity.FILL_IN) if f.code == "placeholder")
    return ConfigFinding(
        "not-asked-yet",
        Severity.FILL_IN,
        first.path,
        "no cloud and no host was asked, since values are still to be filled in",
        "Quotas, images, networks and rights are looked at when they are known.",
        "Fill in what is listed here and check again.",
        first.line,
    )
