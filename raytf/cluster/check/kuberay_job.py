"""Mistakes of a RayJob: where its cluster comes from, how it is started, and when it is deleted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from raytf.cluster.check.document import Document
from raytf.cluster.check.finding import ConfigFinding, Path, error, near, warning
from raytf.cluster.check.kube_pods import refused, whole
from raytf.errors import one_line
from raytf.storage import untrusted_yaml

_MODES = ("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode")


def check(document: Document) -> Iterator[ConfigFinding]:
    """Find what the operator refuses of a RayJob, and what has no effect in it."""
    spec = document.mapping("spec")
    yield from _job_source(spec)
    mode = spec.get("submissionMode")
    if mode is not None and mode not in _MODES:
        yield refused(
            ("spec", "submissionMode"),
            f"submissionMode is {mode!r}{near(mode, _MODES)}",
            f"Write one of {', '.join(_MODES)}.",
        )
    if not spec.get("entrypoint") and mode != "InteractiveMode":
        yield refused(("spec",), "entrypoint is missing", "Add entrypoint: python jobs/mnist.py --storage s3://...")
    if mode == "InteractiveMode" and whole(spec.get("backoffLimit")) > 0:
        yield refused(("spec", "backoffLimit"), "backoffLimit with InteractiveMode", "Leave backoffLimit out.")
    if spec.get("suspend") and not spec.get("shutdownAfterJobFinishes"):
        yield refused(
            ("spec", "suspend"), "suspend without shutdownAfterJobFinishes", "Add shutdownAfterJobFinishes: true."
        )
    if spec.get("ttlSecondsAfterFinished") and not spec.get("shutdownAfterJobFinishes"):
        yield warning(
            "job-stays",
            ("spec", "ttlSecondsAfterFinished"),
            "ttlSecondsAfterFinished without shutdownAfterJobFinishes",
            "It has no effect: the cluster of the job stays, and its GPUs are paid for.",
            "Add shutdownAfterJobFinishes: true.",
        )
    yield from _deletion(spec)
    deadline = spec.get("activeDeadlineSeconds")
    if isinstance(deadline, int) and deadline <= 0:
        yield refused(("spec", "activeDeadlineSeconds"), f"activeDeadlineSeconds is {deadline}", "Give more than 0.")
    text = spec.get("runtimeEnvYAML")
    if isinstance(text, str):
        try:
            said = "" if isinstance(untrusted_yaml.load(text), dict | None) else "it is something else"
        except yaml.YAMLError as problem:
            said = one_line(getattr(problem, "problem", None) or problem, 200)
        if said:
            yield refused(
                ("spec", "runtimeEnvYAML"),
                f"runtimeEnvYAML holds no YAML mapping: {said}",
                "Begin it with `|` and indent it.",
            )


def _deletion(spec: dict[str, Any]) -> Iterator[ConfigFinding]:
    """The rules that the CRD has in CEL, which the API server evaluates, and what the operator adds."""
    strategy = spec.get("deletionStrategy")
    if not isinstance(strategy, dict):
        return
    path: Path = ("spec", "deletionStrategy")
    why = "The API server refuses the object."
    legacy, rules = [key for key in ("onSuccess", "onFailure") if key in strategy], strategy.get("deletionRules")
    if legacy and "deletionRules" in strategy:
        yield error("kube-value", path, f"{legacy[0]} beside deletionRules", why, "Keep deletionRules alone.")
    elif "deletionRules" not in strategy and len(legacy) != 2:
        yield error("kube-value", path, "neither deletionRules nor both of onSuccess and onFailure", why, "Add rules.")
    for i, rule in enumerate(rules if isinstance(rules, list) else ()):
        condition = rule.get("condition") if isinstance(rule, dict) else None
        if isinstance(condition, dict) and len({"jobStatus", "jobDeploymentStatus"} & condition.keys()) != 1:
            yield error(
                "kube-value",
                (*path, "deletionRules", i, "condition"),
                "a condition needs one of jobStatus and jobDeploymentStatus",
                why,
                "Write jobStatus: SUCCEEDED, or FAILED.",
            )
    if rules and (spec.get("shutdownAfterJobFinishes") or spec.get("ttlSecondsAfterFinished")):
        yield refused(
            path,
            "deletionRules beside shutdownAfterJobFinishes or ttlSecondsAfterFinished",
            "Keep deletionRules alone.",
        )


def _job_source(spec: dict[str, Any]) -> Iterator[ConfigFinding]:
    selector, own = spec.get("clusterSelector"), spec.get("rayClusterSpec")
    if not selector and not own:
        yield refused(("spec",), "neither rayClusterSpec nor clusterSelector is given", "Give the one or the other.")
    elif selector and isinstance(selector, dict) and not selector.get("ray.io/cluster"):
        yield refused(
            ("spec", "clusterSelector"), "clusterSelector names no ray.io/cluster", "Add ray.io/cluster: NAME."
        )
    if selector and whole(spec.get("backoffLimit")) > 0:
        yield refused(
            ("spec", "backoffLimit"),
            "backoffLimit with clusterSelector: each try would need a cluster of its own",
            "Leave it out; `raytf submit` starts a driver that failed again.",
        )
    if selector and spec.get("shutdownAfterJobFinishes"):
        yield warning(
            "job-stays",
            ("spec", "shutdownAfterJobFinishes"),
            "shutdownAfterJobFinishes with clusterSelector",
            "It has no effect: the operator deletes only clusters that it made for the job.",
            "Leave it out.",
        )
