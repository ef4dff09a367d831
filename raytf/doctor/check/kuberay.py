"""Mistakes in KubeRay manifests: wrong fields, broken rules of the operator, and mistakes that it never reports."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import yaml

from raytf.doctor.check import field_types, kube_images, kube_pods
from raytf.doctor.check.job_fit import JobNeeds, NodeSupply
from raytf.doctor.check.kube_images import PodImage
from raytf.doctor.check.kube_pods import ACCELERATORS, number, refused, whole
from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, Path, error, near, warning
from raytf.errors import one_line
from raytf.storage import untrusted_yaml

KINDS = ("RayCluster", "RayJob", "RayService", "RayCronJob")
#: Kind -> path of its cluster.
_CLUSTER: dict[str, Path] = {
    "RayCluster": ("spec",),
    "RayJob": ("spec", "rayClusterSpec"),
    "RayService": ("spec", "rayClusterConfig"),
    "RayCronJob": ("spec", "jobTemplate", "rayClusterSpec"),
}
#: Kind -> path of its job.
_JOB: dict[str, Path] = {"RayJob": ("spec",), "RayCronJob": ("spec", "jobTemplate")}
#: Field of `spec` -> the only kind that has it.
_FIELD_OF = {
    "headGroupSpec": "RayCluster",
    "rayClusterSpec": "RayJob",
    "clusterSelector": "RayJob",
    "rayClusterConfig": "RayService",
    "jobTemplate": "RayCronJob",
}
#: Kind -> most characters of its name: the operator derives names of services and pods, of at most 63 characters.
_NAME_LENGTH = {"RayCluster": 63 - 10, "RayJob": 63 - 16, "RayService": 63 - 16, "RayCronJob": 63 - 27}
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_V2 = "RAY_enable_autoscaler_v2"
#: Field or kind -> the feature gate that the operator of KubeRay 1.7 needs for it.
_GATES = {
    "RayCronJob": "RayCronJob",
    "historyServerOptions": "RayClusterHistoryServer",
    "networkPolicy": "RayClusterNetworkPolicy",
    "rocksdb": "GCSFaultToleranceEmbeddedStorage",
    "tlsOptions": "RayClusterMTLS",
}
_REFUSED, _SHUTDOWN = field_types.KUBERNETES.refused, "Add shutdownAfterJobFinishes: true."
_MODES = ("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode")


def is_manifest(document: Document) -> bool:
    """Return whether a document is a Kubernetes object."""
    return "apiVersion" in document.mapping() and "kind" in document.mapping()


def is_about_ray(document: Document) -> bool:
    """Return whether a document is an object of KubeRay."""
    return str(document.get("apiVersion")).startswith("ray.io/")


def check(document: Document) -> Iterator[ConfigFinding]:
    """Find values that the API server or the operator refuses, and settings that never work."""
    kind, version = str(document.get("kind")), document.get("apiVersion")
    meant = _as_meant(document)
    if meant is not document:
        right = str(meant.get("kind"))
        what = f"kind is {kind}, but spec has the fields of a {right}"
        yield error("kube-kind", ("kind",), what, _REFUSED, f"Write kind: {right}.")
        document, kind = meant, right
    if kind not in KINDS:
        if field_types.knows(version, kind):
            yield from field_types.check(document.value, kind, (), field_types.KUBERNETES)
        elif is_about_ray(document):
            what = f"there is no kind {kind!r}{near(kind, KINDS)}"
            yield error("kube-kind", ("kind",), what, _REFUSED, f"Write one of {', '.join(KINDS)}.")
        return
    if version != "ray.io/v1":
        what, why = f"apiVersion is {version!r}", "KubeRay 1.7 has ray.io/v1 only."
        yield error("kube-api-version", ("apiVersion",), what, why, "Write ray.io/v1.")
    yield from field_types.check(document.value, kind, (), field_types.KUBERNETES)
    yield from _name(document, kind)
    if kind == "RayCronJob":
        yield _gate(kind, ("kind",), "nothing starts its jobs.")
        yield from _schedule(document)
    if kind in _JOB:
        yield from check_job(document, _JOB[kind])
    base = _CLUSTER[kind]
    if document.get(*base):
        yield from _cluster(document, base)


def _as_meant(document: Document) -> Document:
    """Return an object of KubeRay with the kind whose fields it has, or unchanged if these are not of one kind."""
    kinds = {_FIELD_OF[field] for field in document.mapping("spec") if field in _FIELD_OF}
    if len(kinds) != 1 or str(document.get("kind")) in kinds or not is_about_ray(document):
        return document
    return replace(document, value={**document.mapping(), "kind": kinds.pop()})


def _schedule(document: Document) -> Iterator[ConfigFinding]:
    schedule, path = document.get("spec", "schedule"), ("spec", "schedule")
    if not isinstance(schedule, str):
        return
    if "TZ" in schedule:
        yield refused(path, f"schedule is {schedule!r}", "Write the time zone as timeZone: Europe/Berlin.")
    elif not schedule.startswith("@") and len(schedule.split()) != 5:
        what = f"schedule {schedule!r} has {len(schedule.split())} fields"
        yield refused(path, what, "Write minute, hour, day, month and weekday, such as '0 3 * * *'.")


def _name(document: Document, kind: str) -> Iterator[ConfigFinding]:
    name, most = document.get("metadata", "name"), _NAME_LENGTH[kind]
    if not isinstance(name, str):
        if document.get("metadata", "generateName") is None:
            yield error("kube-name", ("metadata",), "metadata.name is missing", _REFUSED, "Add a name.")
    elif len(name) > most or not _NAME.fullmatch(name):
        problem = f"has {len(name)} characters" if len(name) > most else "is not a DNS label"
        why = "The operator refuses it, since it derives names of services and pods from it."
        fix = f"Use at most {most} lower-case letters, digits and '-', beginning with a letter."
        yield error("kube-name", ("metadata", "name"), f"name {name!r} {problem}", why, fix)


def groups(document: Document) -> list[tuple[Path, dict[str, Any], bool]]:
    """Return (path, group, whether it is the head's) for each group of pods."""
    base = _CLUSTER.get(str(document.get("kind")), ())
    paths: list[Path] = [(*base, "headGroupSpec")]
    paths += [(*base, "workerGroupSpecs", i) for i in range(len(document.sequence(*base, "workerGroupSpecs")))]
    pods = [(path, document.get(*path), path[-1] == "headGroupSpec") for path in paths]
    return [pod for pod in pods if isinstance(pod[1], dict)]


def _cluster(document: Document, base: Path) -> Iterator[ConfigFinding]:
    scaling = document.get(*base, "enableInTreeAutoscaling") is True
    names: list[Any] = []
    for path, group, is_head in groups(document):
        yield from kube_pods.check(document, path, group, is_head, scaling)
        if not is_head:
            name = group.get("groupName")
            if name in names:
                yield refused((*path, "groupName"), f"there are two groups {name!r}", "Use each name once.")
            names.append(name)
    yield from _scaling(document, base, scaling)
    yield from _gcs(document, base)
    yield from _service(document, base)
    is_token = document.get(*base, "authOptions", "mode") == "token"
    if is_token and not document.get(*base, "rayVersion"):
        yield refused((*base, "authOptions"), "authOptions.mode token needs a rayVersion", "Add rayVersion: 2.60.0.")
    yield from _gates(document, base)


def images(document: Document) -> tuple[Document, Path, list[PodImage]]:
    """Return a document with the path of its cluster and the images of the cluster's pods."""
    document = _as_meant(document)
    pods = [image for path, _, _ in groups(document) for image in kube_images.of_group(document, path)]
    return document, _CLUSTER.get(str(document.get("kind")), ()), pods


def _head_env(document: Document, base: Path) -> tuple[Path, dict[Any, Any]]:
    """Return the path of the head container's environment, and its variables."""
    path: Path = (*base, "headGroupSpec", "template", "spec", "containers", 0, "env")
    return path, {str(e.get("name")): e.get("value") for e in document.sequence(*path) if isinstance(e, dict)}


def _scaling(document: Document, base: Path, scaling: bool) -> Iterator[ConfigFinding]:
    path, fix = (*base, "autoscalerOptions"), "Add enableInTreeAutoscaling: true."
    options = document.mapping(*path)
    if options and not scaling:
        what = "autoscalerOptions need enableInTreeAutoscaling: true"
        yield warning("autoscaling-off", path, what, "Nothing is scaled.", fix)
    _, env = _head_env(document, base)
    version, has_flag, is_on = options.get("version"), _V2 in env, env.get(_V2) in ("1", "true")
    head: Path = (*base, "headGroupSpec", "template", "spec", "restartPolicy")
    restart, is_v2 = document.get(*head), scaling and (version == "v2" or is_on)
    if has_flag and version is not None:
        yield refused((*path, "version"), f"version and {_V2} exclude each other", f"Delete {_V2}.")
    if is_on and not scaling:
        yield refused((*base, "headGroupSpec"), f"{_V2} needs enableInTreeAutoscaling", fix)
    if is_v2 and restart not in (None, "Never"):
        yield refused(head, f"restartPolicy {restart} of the head with autoscaler v2", "Write Never.")


def _gcs(document: Document, base: Path) -> Iterator[ConfigFinding]:
    path: Path = (*base, "gcsFaultToleranceOptions")
    options = document.get(*path)
    head, env = _head_env(document, base)
    annotated = document.mapping("metadata", "annotations").get("ray.io/ft-enabled")
    in_env = {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME"} & env.keys()
    name = "gcsFaultToleranceOptions"
    if options is not None and annotated:
        what = f"ray.io/ft-enabled and {name} exclude each other"
        yield refused(("metadata", "annotations"), what, "Delete the annotation.")
    if options is None and not annotated and "RAY_REDIS_ADDRESS" in env:
        yield refused(head, f"RAY_REDIS_ADDRESS needs {name}", f"Move it to redisAddress in {name}.")
    if options is not None and in_env:
        yield refused(head, f"Redis is both in env and in {name}", f"Keep it in {name} only.")
    if isinstance(options, dict) and options.get("backend", "redis") == "redis" and not options.get("redisAddress"):
        yield refused(path, f"{name} needs redisAddress", "Add redisAddress: redis:6379, or backend: rocksdb.")


def _service(document: Document, base: Path) -> Iterator[ConfigFinding]:
    path: Path = (*base, "headGroupSpec", "serviceType")
    kind = document.get(*path)
    if kind is not None and kind not in ("ClusterIP", "NodePort", "LoadBalancer", "ExternalName"):
        yield refused(path, f"serviceType is {kind!r}", "Write ClusterIP.")


def _gates(document: Document, base: Path) -> Iterator[ConfigFinding]:
    paths: dict[str, Path] = {key: (*base, key) for key in _GATES if document.get(*base, key) is not None}
    if document.get(*base, "gcsFaultToleranceOptions", "backend") == "rocksdb":
        paths["rocksdb"] = (*base, "gcsFaultToleranceOptions", "backend")
    for key, path in paths.items():
        yield _gate(key, path, "the operator refuses the object, and only its events show it.")


def _gate(feature: str, path: Path, effect: str) -> ConfigFinding:
    what = f"{feature} needs the feature gate {_GATES[feature]}"
    fix = f"Start the operator with --feature-gates={_GATES[feature]}=true, or delete {feature}."
    return warning("feature-gate", path, what, f"It is off in KubeRay 1.7: {effect}", fix)


def job_path(document: Document) -> Path:
    """Return the path of the job in a RayJob or a RayCronJob."""
    return _JOB.get(str(document.get("kind")), ("spec",))


def cluster_of(document: Document, manifests: Sequence[Document]) -> Document:
    """Return the document that defines a RayJob's cluster: itself, or the RayCluster that clusterSelector names."""
    name = document.mapping(*job_path(document), "clusterSelector").get("ray.io/cluster")
    space = document.get("metadata", "namespace")
    for other in manifests:
        there = other.get("metadata", "namespace")
        named = other.get("kind") == "RayCluster" and name and other.get("metadata", "name") == name
        if named and (space is None or there is None or space == there):
            return other
    return document


def gpus_from_zero(document: Document, need: JobNeeds, where: Path) -> Iterator[ConfigFinding]:
    """Find a job with neither --use-gpu nor --no-use-gpu whose cluster has no GPU pods until a job requests them."""
    gpus = [
        group.get("minReplicas") or 0
        for path, group, _ in groups(document)
        if set(ACCELERATORS[:2])
        & document.mapping(*path, "template", "spec", "containers", 0, "resources", "limits").keys()
    ]
    if need.gpu is None and gpus and not any(gpus):
        what = "the job has neither --use-gpu nor --no-use-gpu, and all pods with GPUs start on demand"
        why = "It finds no GPU when it starts and does not request one: it trains on CPUs, and you pay for GPUs."
        yield warning("gpu-left-open", where, what, why, "Add --use-gpu.")


def rooms(document: Document) -> tuple[list[NodeSupply], Path]:
    """Return the nodes that a cluster has at its largest size, and the path that limits the size."""
    base = _CLUSTER[str(document.get("kind"))]
    nodes = []
    scaling = document.get(*base, "enableInTreeAutoscaling") is True
    for path, group, is_head in groups(document):
        first: Path = (*path, "template", "spec", "containers", 0, "resources")
        quantities = {**document.mapping(*first, "requests"), **document.mapping(*first, "limits")}
        quantities |= {
            name: value
            for key, name in (("CPU", "cpu"), ("GPU", ACCELERATORS[0]))
            if (value := document.get(*path, "resources", key)) is not None
        }
        parameters = document.mapping(*path, "rayStartParams")
        cpus = parameters.get("num-cpus", quantities.get("cpu", 0))
        gpus = parameters.get("num-gpus", next((quantities[n] for n in ACCELERATORS[:2] if n in quantities), 0))
        count = 1 if is_head else group.get("maxReplicas" if scaling else "replicas") or 0
        hosts = 1 if is_head else group.get("numOfHosts") or 1
        name = "head" if is_head else str(group.get("groupName"))
        nodes.append(
            NodeSupply(name, int(count) * int(hosts) if isinstance(count, int) else 0, number(cpus), number(gpus), path)
        )
    return nodes, (*base, "workerGroupSpecs")


def check_job(document: Document, base: Path) -> Iterator[ConfigFinding]:
    """Find settings of a RayJob that the operator refuses or that have no effect."""
    spec = document.mapping(*base)
    selector, mode, backoff = spec.get("clusterSelector"), spec.get("submissionMode"), whole(spec.get("backoffLimit"))
    shutdown, deadline = spec.get("shutdownAfterJobFinishes"), spec.get("activeDeadlineSeconds")
    if not selector and not spec.get("rayClusterSpec"):
        yield refused(base, "rayClusterSpec and clusterSelector are missing", "Add one of them.")
    if isinstance(selector, dict) and selector and not selector.get("ray.io/cluster"):
        path: Path = (*base, "clusterSelector")
        yield refused(path, "clusterSelector names no ray.io/cluster", "Add ray.io/cluster: NAME.")
    if selector and backoff > 0:
        what = "backoffLimit cannot be used with clusterSelector: each try would need its own cluster"
        fix = "Delete backoffLimit; `raytf submit` restarts a driver that failed."
        yield refused((*base, "backoffLimit"), what, fix)
    if mode is not None and mode not in _MODES:
        what = f"submissionMode is {mode!r}{near(mode, _MODES)}"
        yield refused((*base, "submissionMode"), what, f"Write one of {', '.join(_MODES)}.")
    if mode == "InteractiveMode" and backoff > 0:
        what = "backoffLimit cannot be used with InteractiveMode"
        yield refused((*base, "backoffLimit"), what, "Delete backoffLimit.")
    if spec.get("suspend") and not shutdown:
        yield refused((*base, "suspend"), "suspend needs shutdownAfterJobFinishes", _SHUTDOWN)
    if isinstance(deadline, int) and deadline <= 0:
        what = f"activeDeadlineSeconds is {deadline}"
        yield refused((*base, "activeDeadlineSeconds"), what, "Write more than 0.")
    if selector and shutdown:
        what = "shutdownAfterJobFinishes has no effect with clusterSelector"
        why = "The operator deletes only clusters that it created for the job."
        yield warning("job-stays", (*base, "shutdownAfterJobFinishes"), what, why, "Delete it.")
    if spec.get("ttlSecondsAfterFinished") and not shutdown:
        what = "ttlSecondsAfterFinished needs shutdownAfterJobFinishes"
        why = "It has no effect: the job's cluster keeps running, and you pay for its GPUs."
        yield warning("job-stays", (*base, "ttlSecondsAfterFinished"), what, why, _SHUTDOWN)
    yield from _deletion(spec, base)
    yield from _runtime_env(spec.get("runtimeEnvYAML"), base)


def _runtime_env(text: object, base: Path) -> Iterator[ConfigFinding]:
    if not isinstance(text, str):
        return
    try:
        issue = "" if isinstance(untrusted_yaml.load(text), dict | None) else "it has another type"
    except yaml.YAMLError as problem:
        issue = one_line(getattr(problem, "problem", None) or problem, 200)
    if issue:
        what = f"runtimeEnvYAML is not a YAML mapping: {issue}"
        yield refused((*base, "runtimeEnvYAML"), what, "Begin it with `|` and indent it.")


def _deletion(spec: dict[str, Any], base: Path) -> Iterator[ConfigFinding]:
    """Check the CRD's rules in CEL, which the API server evaluates, and the operator's own rules."""
    strategy = spec.get("deletionStrategy")
    if not isinstance(strategy, dict):
        return
    path: Path = (*base, "deletionStrategy")
    legacy, rules = [key for key in ("onSuccess", "onFailure") if key in strategy], strategy.get("deletionRules")
    keep = "Keep deletionRules only."
    if legacy and "deletionRules" in strategy:
        yield error("kube-value", path, f"{legacy[0]} and deletionRules exclude each other", _REFUSED, keep)
    elif "deletionRules" not in strategy and len(legacy) != 2:
        what = "deletionRules are missing, and onSuccess and onFailure are not both set"
        yield error("kube-value", path, what, _REFUSED, "Add rules.")
    for i, rule in enumerate(rules if isinstance(rules, list) else ()):
        condition = rule.get("condition") if isinstance(rule, dict) else None
        if isinstance(condition, dict) and len({"jobStatus", "jobDeploymentStatus"} & condition.keys()) != 1:
            what, where = "a condition needs one of jobStatus and jobDeploymentStatus", (*path, "deletionRules", i)
            yield error("kube-value", (*where, "condition"), what, _REFUSED, "Write jobStatus: SUCCEEDED, or FAILED.")
    if rules and (spec.get("shutdownAfterJobFinishes") or spec.get("ttlSecondsAfterFinished")):
        what = "deletionRules exclude shutdownAfterJobFinishes and ttlSecondsAfterFinished"
        yield refused(path, what, keep)
