"""Runs the online checks of a file against its cloud, API server or hosts."""

from __future__ import annotations

from collections.abc import Callable

from raytf.doctor.check import fallbacks, kuberay
from raytf.doctor.check.job_fit import JobNeeds
from raytf.doctor.check.offline import ODD, CheckReport, cannot_judge
from raytf.doctor.document import Document, Platform, parse, place_of
from raytf.doctor.finding import ConfigFinding, Severity
from raytf.doctor.local_environment import Surroundings
from raytf.doctor.probe import aws, azure, gcp, kube, ssh
from raytf.doctor.probe.queries import ProbeResults

_ASK: dict[Platform, Callable[[Document, Surroundings, JobNeeds | None], ProbeResults]] = {
    Platform.AWS: aws.inspect,
    Platform.GCP: gcp.inspect,
    Platform.AZURE: azure.inspect,
}

#: Codes of findings after which nothing else can be judged.
_UNREADABLE = ("yaml-syntax", "wrong-type", "cannot-judge", "template", "foreign-file")


def inspect(
    text: str, here: Surroundings, need: JobNeeds | None, offline: CheckReport, trust: bool = False
) -> ProbeResults:
    """Check a file against its cloud, API server or hosts.

    Args:
        text: the file.
        here: this machine.
        need: the needs of a job.
        offline: the offline report. A file that cannot be read or still has placeholders is not checked online.
        trust: allow the proxy command in the file to run on this machine.
    """
    try:
        return _inspect(text, here, need, offline, trust)
    except ODD as problem:
        return ProbeResults([cannot_judge(problem)])


def _inspect(text: str, here: Surroundings, need: JobNeeds | None, offline: CheckReport, trust: bool) -> ProbeResults:
    documents, _ = parse(text)
    if not documents or any(f.code in _UNREADABLE for f in offline.findings):
        return ProbeResults()
    if any(f.code == "placeholder" for f in offline.of(Severity.FILL_IN)):
        return ProbeResults([_not_filled_in(offline)])
    manifests = [d for d in documents if kuberay.is_manifest(d)]
    if manifests:
        return _with_lines(kube.inspect(manifests, here), manifests[0])
    document = fallbacks.as_cloud(documents[0], all_zones=True)
    if place_of(document) is Platform.HOSTS:
        return _with_lines(ssh.inspect(document, here, need, trust), document)
    ask = _ASK.get(place_of(document))
    return _with_lines(ask(document, here, need), document) if ask else ProbeResults()


def _with_lines(seen: ProbeResults, document: Document) -> ProbeResults:
    seen.findings = document.with_lines(seen.findings)
    return seen


def _not_filled_in(offline: CheckReport) -> ConfigFinding:
    first = next(f for f in offline.of(Severity.FILL_IN) if f.code == "placeholder")
    what = "no cloud and no host was checked, since some values are not filled in"
    why = "Quotas, images, networks and rights can be checked only when the values are known."
    fix = "Fill in the values listed here and check again."
    return ConfigFinding("not-asked-yet", Severity.FILL_IN, first.path, what, why, fix, first.line)
