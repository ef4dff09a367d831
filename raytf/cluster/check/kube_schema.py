"""Fields of KubeRay's objects and of pods: names and types, for typos that an API server drops or refuses.

Written from the public API of KubeRay 1.7 (ray.io/v1) and Kubernetes 1.34 (core/v1). A key stands for a field; its
value is a type: `str`, `int`, `bool`, `num`, `quantity`, `any`, `strs` (mapping of texts), the name of a
record below, or `[type]` for a list.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from raytf.cluster.check.finding import Finding, Path, error, instead


def _fields(kind: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), kind)


RECORDS: dict[str, dict[str, str]] = {
    "RayCluster": _fields("str", "apiVersion kind") | {"metadata": "meta", "spec": "clusterSpec", "status": "any"},
    "RayJob": _fields("str", "apiVersion kind") | {"metadata": "meta", "spec": "jobSpec", "status": "any"},
    "RayService": _fields("str", "apiVersion kind") | {"metadata": "meta", "spec": "serviceSpec", "status": "any"},
    "meta": _fields("str", "name namespace generateName resourceVersion uid creationTimestamp selfLink")
    | _fields("strs", "labels annotations")
    | _fields("any", "finalizers ownerReferences managedFields generation deletionTimestamp"),
    "clusterSpec": {
        **_fields("str", "rayVersion managedBy"),
        **_fields("bool", "enableInTreeAutoscaling suspend"),
        **_fields("any", "upgradeStrategy historyServerOptions networkPolicy tlsOptions"),
        "headServiceAnnotations": "strs",
        "autoscalerOptions": "autoscaler",
        "authOptions": "auth",
        "gcsFaultToleranceOptions": "gcs",
        "headGroupSpec": "headGroup",
        "workerGroupSpecs": "[workerGroup]",
    },
    "autoscaler": {
        **_fields("str", "image imagePullPolicy upscalingMode version"),
        **_fields("any", "envFrom volumeMounts securityContext"),
        "env": "[env]",
        "idleTimeoutSeconds": "int",
        "resources": "resources",
    },
    "auth": _fields("str", "mode secretName") | {"enableK8sTokenAuth": "bool"},
    "gcs": _fields("str", "backend externalStorageNamespace redisAddress")
    | _fields("any", "redisUsername redisPassword storage"),
    "headGroup": {
        **_fields("str", "serviceType"),
        **_fields("any", "headService networkPolicy"),
        **_fields("strs", "rayStartParams labels"),
        "resources": "quantities",
        "enableIngress": "bool",
        "template": "podTemplate",
    },
    "workerGroup": {
        **_fields("str", "groupName"),
        **_fields("int", "replicas minReplicas maxReplicas numOfHosts idleTimeoutSeconds priority"),
        **_fields("strs", "rayStartParams labels"),
        "suspend": "bool",
        "resources": "quantities",
        "scaleStrategy": "any",
        "topology": "any",
        "networkPolicy": "any",
        "template": "podTemplate",
    },
    "jobSpec": {
        **_fields("str", "entrypoint runtimeEnvYAML jobId submissionMode entrypointResources managedBy schedule"),
        **_fields("int", "activeDeadlineSeconds backoffLimit ttlSecondsAfterFinished preRunningDeadlineSeconds"),
        **_fields("num", "entrypointNumCpus entrypointNumGpus"),
        **_fields("bool", "shutdownAfterJobFinishes suspend"),
        **_fields("strs", "metadata clusterSelector"),
        **_fields("any", "submitterConfig deletionStrategy"),
        "rayClusterSpec": "clusterSpec",
        "submitterPodTemplate": "podTemplate",
    },
    "serviceSpec": {
        **_fields("str", "serveConfigV2"),
        **_fields(
            "int", "serviceUnhealthySecondThreshold deploymentUnhealthySecondThreshold rayClusterDeletionDelaySeconds"
        ),
        **_fields("any", "serveService upgradeStrategy managedBy"),
        **_fields("bool", "excludeHeadPodFromServeSvc suspend"),
        "rayClusterConfig": "clusterSpec",
    },
    "podTemplate": {"metadata": "meta", "spec": "pod"},
    "pod": {
        **_fields(
            "str", "dnsPolicy hostname nodeName preemptionPolicy priorityClassName restartPolicy runtimeClassName"
        ),
        **_fields("str", "schedulerName serviceAccount serviceAccountName subdomain hostnameOverride"),
        **_fields("int", "activeDeadlineSeconds priority terminationGracePeriodSeconds"),
        **_fields("bool", "automountServiceAccountToken enableServiceLinks hostIPC hostNetwork hostPID hostUsers"),
        **_fields("bool", "setHostnameAsFQDN shareProcessNamespace"),
        **_fields("any", "affinity dnsConfig ephemeralContainers hostAliases os overhead readinessGates"),
        **_fields("any", "resourceClaims schedulingGates securityContext topologySpreadConstraints workloadRef"),
        "nodeSelector": "strs",
        "resources": "resources",
        "imagePullSecrets": "[named]",
        "tolerations": "[toleration]",
        "volumes": "[volume]",
        "containers": "[container]",
        "initContainers": "[container]",
    },
    "container": {
        **_fields("str", "name image imagePullPolicy terminationMessagePath terminationMessagePolicy workingDir"),
        **_fields("str", "restartPolicy"),
        **_fields("bool", "stdin stdinOnce tty"),
        **_fields("any", "lifecycle livenessProbe readinessProbe startupProbe securityContext resizePolicy"),
        **_fields("any", "volumeDevices restartPolicyRules"),
        **_fields("[str]", "args command"),
        "env": "[env]",
        "envFrom": "[envFrom]",
        "ports": "[port]",
        "resources": "resources",
        "volumeMounts": "[mount]",
    },
    "env": {"name": "str", "value": "str", "valueFrom": "any"},
    "envFrom": {"configMapRef": "any", "secretRef": "any", "prefix": "str"},
    "port": _fields("str", "name protocol hostIP") | _fields("int", "containerPort hostPort"),
    "mount": _fields("str", "name mountPath subPath subPathExpr mountPropagation recursiveReadOnly")
    | {"readOnly": "bool"},
    "named": {"name": "str"},
    "toleration": _fields("str", "key operator value effect") | {"tolerationSeconds": "int"},
    "resources": {"limits": "quantities", "requests": "quantities", "claims": "any"},
    "volume": {
        "name": "str",
        **_fields("any", "awsElasticBlockStore azureDisk azureFile cephfs cinder configMap csi downwardAPI emptyDir"),
        **_fields(
            "any", "ephemeral fc flexVolume flocker gcePersistentDisk gitRepo glusterfs hostPath image iscsi nfs"
        ),
        **_fields("any", "persistentVolumeClaim photonPersistentDisk portworxVolume projected quobyte rbd scaleIO"),
        **_fields("any", "secret storageos vsphereVolume"),
    },
}
#: Fields that an object of a record must have.
REQUIRED: dict[str, tuple[str, ...]] = {
    "clusterSpec": ("headGroupSpec",),
    "headGroup": ("template",),
    "workerGroup": ("groupName", "template"),
    "pod": ("containers",),
    "container": ("name",),
    "env": ("name",),
    "port": ("containerPort",),
    "mount": ("name", "mountPath"),
    "volume": ("name",),
    "serviceSpec": ("rayClusterConfig",),
}
_QUANTITY = re.compile(r"[+-]?(\d+|\d+\.\d*|\.\d+)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|n|u|e-?\d+|E-?\d+)?")
_WHY = "The API server refuses the object (strict), or drops the field without a word (older kubectl, Helm)."


def check(value: Any, record: str, path: Path) -> Iterator[Finding]:
    """Find fields that do not exist or have another type."""
    yield from _check(value, record, path)


def is_quantity(value: Any) -> bool:
    """Whether a value is a quantity of Kubernetes, such as 500m or 4Gi."""
    if isinstance(value, bool):
        return False
    return isinstance(value, int | float) or (isinstance(value, str) and _QUANTITY.fullmatch(value) is not None)


def _check(value: Any, kind: str, path: Path) -> Iterator[Finding]:
    if kind == "any" or (value is None and kind not in RECORDS):
        return
    if kind.startswith("["):
        yield from _list(value, kind[1:-1], path)
    elif kind in RECORDS:
        yield from _record(value, kind, path)
    elif kind == "strs":
        yield from _texts(value, path)
    elif kind == "quantities":
        yield from _quantities(value, path)
    elif not _is(value, kind):
        yield _wrong(
            value, {"str": "a text", "int": "a whole number", "bool": "true or false", "num": "a number"}[kind], path
        )


def _record(value: Any, kind: str, path: Path) -> Iterator[Finding]:
    if not isinstance(value, dict):
        yield _wrong(value, "a mapping", path)
        return
    fields = RECORDS[kind]
    for key, inner in value.items():
        if key in fields:
            yield from _check(inner, fields[key], (*path, key))
        else:
            yield error(
                "kube-unknown-field",
                (*path, str(key)),
                f"there is no field {key!r} here",
                _WHY,
                instead(key, fields, "Fields here are"),
            )
    for key in REQUIRED.get(kind, ()):
        if key not in value:
            yield error(
                "kube-missing-field", path, f"{key!r} is missing", "The API server refuses the object.", f"Add {key}."
            )


def _list(value: Any, kind: str, path: Path) -> Iterator[Finding]:
    if not isinstance(value, list):
        yield _wrong(value, "a list", path)
        return
    for i, item in enumerate(value):
        yield from _check(item, kind, (*path, i))


def _texts(value: Any, path: Path) -> Iterator[Finding]:
    if not isinstance(value, dict):
        yield _wrong(value, "a mapping", path)
        return
    for key, inner in value.items():
        if not isinstance(inner, str):
            yield _wrong(inner, "a text", (*path, str(key)))


def _quantities(value: Any, path: Path) -> Iterator[Finding]:
    if not isinstance(value, dict):
        yield _wrong(value, "a mapping", path)
        return
    for key, inner in value.items():
        if not is_quantity(inner):
            gb = isinstance(inner, str) and re.fullmatch(r"\d+(\.\d+)?\s?[KMGT]B", inner, re.I)
            yield error(
                "kube-quantity",
                (*path, str(key)),
                f"{inner!r} is no quantity",
                "The API server refuses the object.",
                f"Write {inner[:-1].strip()}i." if gb else "Write one such as 500m, 4 or 16Gi.",
            )


def _is(value: Any, kind: str) -> bool:
    if kind == "str":
        return isinstance(value, str)
    if kind == "bool":
        return isinstance(value, bool)
    fits = (int,) if kind == "int" else (int, float)
    return isinstance(value, fits) and not isinstance(value, bool)


def _wrong(value: Any, wanted: str, path: Path) -> Finding:
    name = str(path[-1]) if path else "the object"
    quotes = wanted == "a text" and isinstance(value, bool | int | float)
    shown = {True: "true", False: "false"}.get(value, value) if isinstance(value, bool) else value
    given = "a mapping" if isinstance(value, dict) else "a list" if isinstance(value, list) else repr(shown)
    return error(
        "kube-type",
        path,
        f"{name!r} is {given}, expected {wanted}",
        "The API server refuses the object.",
        f'Put it in quotes: "{shown}".'
        if quotes
        else f"Give {wanted}, without quotes."
        if isinstance(value, str)
        else f"Give {wanted}.",
    )
