"""Mistakes of KubeRay manifests: in fields, in rules that the operator checks, and those that it never reports."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from raytf.doctor.check import kube_pods, kube_schema, versions
from raytf.doctor.check.job_fit import JobNeeds, NodeSupply
from raytf.doctor.check.kube_pods import ACCELERATORS, number, refused, whole
from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, Path, error, near, warning
from raytf.doctor.local_environment import Surroundings
from raytf.errors import one_line
from raytf.storage import untrusted_yaml

KINDS = ("RayCluster", "RayJob", "RayService")
#: Path at which a kind has its cluster.
_CLUSTER: dict[str, Path] = {
    "RayCluster": ("spec",),
    "RayJob": ("spec", "rayClusterSpec"),
    "RayService": ("spec", "rayClusterConfig"),
}
#: The operator makes names of services and pods from it, which end at 63 characters.
_NAME_LENGTH = {"RayCluster": 63 - 10, "RayJob": 63 - 16, "RayService": 63 - 16}
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_V2 = "RAY_enable_autoscaler_v2"
#: Features that KubeRay 1.7 allows only if its operator has a feature gate.
_GATES = {
    "historyServerOptions": "RayClusterHistoryServer",
    "networkPolicy": "RayClusterNetworkPolicy",
    "rocksdb": "GCSFaultToleranceEmbeddedStorage",
    "tlsOptions": "RayClusterMTLS",
}
_MODES = ("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode")


def is_manifest(document: Document) -> bool:
    """Return whether a document is an object of Kubernetes."""
    return "apiVersion" in document.mapping() and "kind" in document.mapping()


def check(document: Document, here: Surroundings) -> Iterator[ConfigFinding]:
    """Find what the API server or the operator refuses, and what never works."""
    kind = str(document.get("kind"))
    version = document.get("apiVersion")
    if kind not in KINDS:
        yield from _other(document, kind)
        return
    if version != "ray.io/v1":
        yield error(
            "kube-api-version",
            ("apiVersion",),
            f"apiVersion is {version!r}",
            "KubeRay 1.7 has ray.io/v1 alone.",
            "Write ray.io/v1.",
        )
    yield from kube_schema.check(document.value, kind, ())
    yield from _name(document, kind)
    if kind == "RayJob":
        yield from check_job(document)
    base = _CLUSTER[kind]
    if document.get(*base):
        yield from _cluster(document, base, here)


def _other(document: Document, kind: str) -> Iterator[ConfigFinding]:
    version = document.get("apiVersion")
    if kube_schema.knows(version, kind):
        yield from kube_schema.check(document.value, kind, ())
    elif str(version).startswith("ray.io/") and kind != "RayCronJob":
        yield error(
            "kube-kind",
            ("kind",),
            f"there is no kind {kind!r}{near(kind, KINDS)}",
            "The API server refuses the object.",
            f"Write one of {', '.join(KINDS)}.",
        )


def _name(document: Document, kind: str) -> Iterator[ConfigFinding]:
    name = document.get("metadata", "name")
    most = _NAME_LENGTH[kind]
    if not isinstance(name, str):
        if document.get("metadata", "generateName") is None:
            yield error(
                "kube-name", ("metadata",), "metadata.name is missing", "The API server refuses it.", "Add a name."
            )
    elif len(name) > most or not _NAME.fullmatch(name):
        yield error(
            "kube-name",
            ("metadata", "name"),
            f"name {name!r} has {len(name)} characters" if len(name) > most else f"name {name!r} is not a DNS label",
            "The operator refuses it: names of services and pods are made from it.",
            f"Use small letters, digits and '-', a letter first, at most {most}.",
        )


def groups(document: Document) -> list[tuple[Path, dict[str, Any], bool]]:
    """Return (path, group, whether it is the head's) for each group of pods."""
    base = _CLUSTER.get(str(document.get("kind")), ())
    pods: list[tuple[Path, dict[str, Any], bool]] = []
    head = document.get(*base, "headGroupSpec")
    if isinstance(head, dict):
        pods.append(((*base, "headGroupSpec"), head, True))
    for i, group in enumerate(document.sequence(*base, "workerGroupSpecs")):
        if isinstance(group, dict):
            pods.append(((*base, "workerGroupSpecs", i), group, False))
    return pods


def _cluster(document: Document, base: Path, here: Surroundings) -> Iterator[ConfigFinding]:
    scaling = document.get(*base, "enableInTreeAutoscaling") is True
    names: list[Any] = []
    for path, group, is_head in groups(document):
        yield from kube_pods.check(document, path, group, is_head, scaling, here)
        if not is_head:
            if group.get("groupName") in names:
                yield refused(
                    (*path, "groupName"), f"there are two groups {group['groupName']!r}", "Give each a name of its own."
                )
            names.append(group.get("groupName"))
    yield from _versions(document, base, here)
    yield from _scaling(document, base, scaling)
    yield from _gcs(document, base)
    yield from _service(document, base)
    yield from _auth(document, base)
    yield from _gates(document, base)


def _versions(document: Document, base: Path, here: Surroundings) -> Iterator[ConfigFinding]:
    version = document.get(*base, "rayVersion")
    if isinstance(version, str) and version and "dev" not in version:
        yield from versions.ray_version(version, (*base, "rayVersion"), here)
    images = []
    for path, _, _ in groups(document):
        where = (*path, "template", "spec", "containers", 0, "image")
        images.append((where, str(document.get(*where, default=""))))
    for where, name in images:
        match = re.search(r":(\d+\.\d+\.\d+)", name)
        known = match and isinstance(version, str) and re.fullmatch(r"\d+\.\d+\.\d+", version)
        if match and known and match[1] != version and "rayproject/" in name:
            yield error(
                "image-ray-version",
                where,
                f"image {name} has Ray {match[1]}, and rayVersion is {version}",
                "The operator writes commands for another version than the one that runs.",
                "Give both the same.",
            )
    if len({name for _, name in images if name}) > 1:
        tags = {re.sub(r"-(gpu|cpu|cu\d+|tpu).*$", "", name.rsplit(":", 1)[-1]) for _, name in images if ":" in name}
        if len(tags) > 1:
            yield error(
                "images-differ",
                images[-1][0],
                f"the groups' images are of different versions: {', '.join(sorted(tags))}",
                "Workers of another Ray or Python never join.",
                "Use tags of one version.",
            )


def _scaling(document: Document, base: Path, scaling: bool) -> Iterator[ConfigFinding]:
    options = document.mapping(*base, "autoscalerOptions")
    if options and not scaling:
        yield warning(
            "autoscaling-off",
            (*base, "autoscalerOptions"),
            "autoscalerOptions without enableInTreeAutoscaling: true",
            "Nothing is scaled.",
            "Add enableInTreeAutoscaling: true.",
        )
    head: Path = (*base, "headGroupSpec", "template", "spec", "containers", 0, "env")
    flags = [e.get("value") for e in document.sequence(*head) if isinstance(e, dict) and e.get("name") == _V2]
    version = options.get("version")
    if flags and version is not None:
        yield refused((*base, "autoscalerOptions", "version"), f"version and {_V2} are both given", f"Leave {_V2} out.")
    if flags and flags[0] in ("1", "true") and not scaling:
        yield refused(
            (*base, "headGroupSpec"), f"{_V2} without enableInTreeAutoscaling", "Add enableInTreeAutoscaling: true."
        )
    head_pod: Path = (*base, "headGroupSpec", "template", "spec")
    if scaling and (version == "v2" or (flags and flags[0] in ("1", "true"))):
        restart = document.get(*head_pod, "restartPolicy")
        if restart not in (None, "Never"):
            yield refused(
                (*head_pod, "restartPolicy"), f"restartPolicy {restart} of the head with autoscaler v2", "Write Never."
            )


def _gcs(document: Document, base: Path) -> Iterator[ConfigFinding]:
    options = document.get(*base, "gcsFaultToleranceOptions")
    head: Path = (*base, "headGroupSpec", "template", "spec", "containers", 0, "env")
    env = {e.get("name") for e in document.sequence(*head) if isinstance(e, dict)}
    annotated = document.mapping("metadata", "annotations").get("ray.io/ft-enabled")
    if options is not None and annotated:
        yield refused(
            ("metadata", "annotations"),
            "ray.io/ft-enabled beside gcsFaultToleranceOptions",
            "Leave the annotation out.",
        )
    if options is None and not annotated and "RAY_REDIS_ADDRESS" in env:
        yield refused(
            head, "RAY_REDIS_ADDRESS without gcsFaultToleranceOptions", "Give redisAddress in gcsFaultToleranceOptions."
        )
    if options is not None and {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME"} & env:
        yield refused(
            head, "Redis in env beside gcsFaultToleranceOptions", "Give it in gcsFaultToleranceOptions alone."
        )
    if isinstance(options, dict) and options.get("backend", "redis") == "redis" and not options.get("redisAddress"):
        yield refused(
            (*base, "gcsFaultToleranceOptions"),
            "gcsFaultToleranceOptions without redisAddress",
            "Add redisAddress: redis:6379, or backend: rocksdb.",
        )


def _service(document: Document, base: Path) -> Iterator[ConfigFinding]:
    kind = document.get(*base, "headGroupSpec", "serviceType")
    if kind in ("LoadBalancer", "NodePort"):
        internal = any("internal" in key for key in document.mapping(*base, "headServiceAnnotations"))
        if kind == "NodePort" or not internal:
            yield error(
                "open-to-world",
                (*base, "headGroupSpec", "serviceType"),
                f"serviceType {kind} puts the dashboard and the job server on the network outside",
                "Whoever reaches them runs code on the cluster, with its rights on the bucket.",
                "Write ClusterIP and use kubectl port-forward svc/NAME-head-svc 8265.",
            )
    if kind is not None and kind not in ("ClusterIP", "NodePort", "LoadBalancer", "ExternalName"):
        yield refused((*base, "headGroupSpec", "serviceType"), f"serviceType is {kind!r}", "Write ClusterIP.")


def _auth(document: Document, base: Path) -> Iterator[ConfigFinding]:
    mode = document.get(*base, "authOptions", "mode")
    if mode == "token" and not document.get(*base, "rayVersion"):
        yield refused((*base, "authOptions"), "authOptions.mode token without rayVersion", "Add rayVersion: 2.60.0.")


def _gates(document: Document, base: Path) -> Iterator[ConfigFinding]:
    paths = {key: (*base, key) for key in _GATES if document.get(*base, key) is not None}
    if document.get(*base, "gcsFaultToleranceOptions", "backend") == "rocksdb":
        paths["rocksdb"] = (*base, "gcsFaultToleranceOptions", "backend")
    for key, path in paths.items():
        yield warning(
            "feature-gate",
            path,
            f"{key} needs the feature gate {_GATES[key]}",
            "KubeRay 1.7 has it off: the operator refuses the object, which only its events say.",
            f"Start the operator with --feature-gates={_GATES[key]}=true, or leave {key} out.",
        )


def cluster_of(document: Document, manifests: Sequence[Document]) -> Document:
    """Return what has the cluster of a RayJob: itself, or the RayCluster of this input that clusterSelector names."""
    name = document.mapping("spec", "clusterSelector").get("ray.io/cluster")
    space = document.get("metadata", "namespace")
    for other in manifests:
        there = other.get("metadata", "namespace")
        named = other.get("kind") == "RayCluster" and name and other.get("metadata", "name") == name
        if named and (space is None or there is None or space == there):
            return other
    return document


def gpus_from_zero(document: Document, need: JobNeeds, where: Path) -> Iterator[ConfigFinding]:
    """Find a job that leaves open whether it trains on GPUs, where none is up when it starts."""
    gpus = [
        group.get("minReplicas") or 0
        for path, group, _ in groups(document)
        if set(ACCELERATORS[:2])
        & document.mapping(*path, "template", "spec", "containers", 0, "resources", "limits").keys()
    ]
    if need.gpu is None and gpus and not any(gpus):
        yield warning(
            "gpu-left-open",
            where,
            "the job says neither --use-gpu nor --no-use-gpu, and all pods with GPUs are started on demand",
            "When it starts none is up, and it does not know that one may come: CPUs train, and GPUs are paid for.",
            "Add --use-gpu.",
        )


def rooms(document: Document) -> tuple[list[NodeSupply], Path]:
    """Return the nodes that a cluster may become, and the path that says so."""
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


def check_job(document: Document) -> Iterator[ConfigFinding]:
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
            issue = "" if isinstance(untrusted_yaml.load(text), dict | None) else "it is something else"
        except yaml.YAMLError as problem:
            issue = one_line(getattr(problem, "problem", None) or problem, 200)
        if issue:
            yield refused(
                ("spec", "runtimeEnvYAML"),
                f"runtimeEnvYAML holds no YAML mapping: {issue}",
                "Begin it with `|` and indent it.",
            )


def _deletion(spec: dict[str, Any]) -> Iterator[ConfigFinding]:
    """Check the rules that the CRD has in CEL, which the API server evaluates, and what the operator adds."""
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
