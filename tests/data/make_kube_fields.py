"""Writes raytf/doctor/check/kube_fields.json: the fields of KubeRay's objects and of those of Kubernetes beside them.

    python -m pip download --no-deps 'kubernetes==34.*' && unzip kubernetes-*.whl -d WHERE
    python tests/data/make_kube_fields.py WHERE

Kubernetes' own types come from the Python client, which is generated from the OpenAPI document of Kubernetes 1.34
(Apache-2.0). KubeRay's are those of `ray-operator/apis/ray/v1/*_types.go`, release 1.7 (Apache-2.0), which its CRDs
are generated from; they are given here, since the CRDs are in no package and spell each pod out again: 0.9 MB a kind.

A field's type: `str` `int` `num` `bool` `quantity` `any`, the name of another type, `[x]` a list, `{x}` a mapping,
`=a|b` one of these texts; with `!` the field is required.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

TARGET = Path(__file__).parents[2] / "raytf" / "doctor" / "check" / "kube_fields.json"


def fields(kind: str, names: str) -> dict[str, str]:
    """Several fields of one type."""
    return dict.fromkeys(names.split(), kind)


_TOP = {"apiVersion": "str", "kind": "str", "metadata": "ObjectMeta", "status": "any"}
_MANAGERS = "=ray.io/kuberay-operator|kueue.x-k8s.io/multikueue"
_DELETION = "=DeleteCluster|DeleteWorkers|DeleteSelf|DeleteNone"
KUBERAY: dict[str, dict[str, str]] = {
    "RayCluster": {**_TOP, "spec": "RayClusterSpec"},
    "RayJob": {**_TOP, "spec": "RayJobSpec"},
    "RayService": {**_TOP, "spec": "RayServiceSpec"},
    "RayCronJob": {**_TOP, "spec": "RayCronJobSpec"},
    "RayClusterSpec": {
        "upgradeStrategy": "RayClusterUpgradeStrategy",
        "authOptions": "AuthOptions",
        "suspend": "bool",
        "managedBy": _MANAGERS,
        "autoscalerOptions": "AutoscalerOptions",
        "headServiceAnnotations": "{str}",
        "enableInTreeAutoscaling": "bool",
        "gcsFaultToleranceOptions": "GcsFaultToleranceOptions",
        "historyServerOptions": "HistoryServerOptions",
        "networkPolicy": "NetworkPolicyConfig",
        "tlsOptions": "TLSOptions",
        # Not in 1.7; Ray 2.60 reads the first and writes the second.
        **fields("any", "idleTerminationOptions idleSuspend"),
        "headGroupSpec": "HeadGroupSpec!",
        "rayVersion": "str",
        "workerGroupSpecs": "[WorkerGroupSpec]",
    },
    "TLSOptions": {"enabled": "bool"},
    "RayClusterUpgradeStrategy": {"type": "=Recreate|None"},
    "AuthOptions": {"enableK8sTokenAuth": "bool", "secretName": "str", "mode": "=disabled|token"},
    "GcsFaultToleranceOptions": {
        "backend": "=redis|rocksdb",
        "redisUsername": "RedisCredential",
        "redisPassword": "RedisCredential",
        "externalStorageNamespace": "str",
        "redisAddress": "str",
        "storage": "GcsEmbeddedStorage",
    },
    "GcsEmbeddedStorage": {
        **fields("str", "claimName storageClassName subPath"),
        "size": "quantity",
        "accessModes": "[str]",
        "deletionPolicy": "=DeleteWithCluster|Retain",
    },
    "RedisCredential": {"valueFrom": "EnvVarSource", "value": "str"},
    "HistoryServerOptions": {"collectorOptions": "CollectorOptions"},
    "CollectorOptions": {
        **fields("str", "image imagePullPolicy"),
        "resources": "ResourceRequirements",
        "env": "[EnvVar]",
    },
    "NetworkPolicyConfig": {
        "mode": "=DenyAll|DenyAllIngress|DenyAllEgress",
        "head": "NetworkPolicyRules",
        "worker": "NetworkPolicyRules",
        "workerGroups": "[WorkerGroupNetworkPolicyRules]",
    },
    "NetworkPolicyRules": {"ingressRules": "[NetworkPolicyIngressRule]", "egressRules": "[NetworkPolicyEgressRule]"},
    "WorkerGroupNetworkPolicyRules": {
        "groupName": "str!",
        "ingressRules": "[NetworkPolicyIngressRule]",
        "egressRules": "[NetworkPolicyEgressRule]",
    },
    "HeadGroupSpec": {
        "template": "PodTemplateSpec!",
        "headService": "Service",
        "enableIngress": "bool",
        "ingressOptions": "IngressOptions",
        "resources": "{str}",
        "labels": "{str}",
        "rayStartParams": "{str}",
        "serviceType": "str",
    },
    "IngressOptions": {
        **fields("str", "host path"),
        "pathType": "=Exact|Prefix|ImplementationSpecific",
        "tls": "[IngressTLS]",
    },
    "WorkerGroupSpec": {
        "suspend": "bool",
        "groupName": "str!",
        # Of these the CRD wants two, and gives both a default, which the API server fills in before it looks.
        **fields("int", "replicas minReplicas maxReplicas numOfHosts idleTimeoutSeconds priority"),
        "resources": "{str}",
        "labels": "{str}",
        "rayStartParams": "{str}",
        "template": "PodTemplateSpec!",
        "scaleStrategy": "ScaleStrategy",
        # In some of the sources of 1.7 and not in others.
        "topology": "any",
    },
    "ScaleStrategy": {"workersToDelete": "[str]"},
    "AutoscalerOptions": {
        "resources": "ResourceRequirements",
        **fields("str", "image imagePullPolicy"),
        "securityContext": "SecurityContext",
        "idleTimeoutSeconds": "int",
        "upscalingMode": "=Default|Aggressive|Conservative",
        "version": "=v1|v2",
        "env": "[EnvVar]",
        "envFrom": "[EnvFromSource]",
        "volumeMounts": "[VolumeMount]",
        **fields("[str]", "command args"),
    },
    "RayJobSpec": {
        **fields("int", "activeDeadlineSeconds backoffLimit ttlSecondsAfterFinished preRunningDeadlineSeconds"),
        "rayClusterSpec": "RayClusterSpec",
        "submitterPodTemplate": "PodTemplateSpec",
        **fields("{str}", "metadata clusterSelector"),
        "submitterConfig": "SubmitterConfig",
        "managedBy": _MANAGERS,
        "deletionStrategy": "DeletionStrategy",
        **fields("str", "entrypoint runtimeEnvYAML jobId submissionMode entrypointResources"),
        **fields("num", "entrypointNumCpus entrypointNumGpus"),
        **fields("bool", "shutdownAfterJobFinishes suspend"),
    },
    "SubmitterConfig": {"backoffLimit": "int"},
    "DeletionStrategy": {
        "onSuccess": "DeletionPolicy",
        "onFailure": "DeletionPolicy",
        "deletionRules": "[DeletionRule]",
    },
    "DeletionPolicy": {"policy": _DELETION},
    "DeletionRule": {"policy": f"{_DELETION}!", "condition": "DeletionCondition!"},
    "DeletionCondition": {**fields("str", "jobStatus jobDeploymentStatus"), "ttlSeconds": "int"},
    "RayCronJobSpec": {"jobTemplate": "RayJobSpec!", "schedule": "str!", "timeZone": "str", "suspend": "bool"},
    "RayServiceSpec": {
        **fields("int", "rayClusterDeletionDelaySeconds serviceUnhealthySecondThreshold"),
        **fields("int", "deploymentUnhealthySecondThreshold"),
        "serveService": "Service",
        "upgradeStrategy": "RayServiceUpgradeStrategy",
        "managedBy": _MANAGERS,
        "serveConfigV2": "str",
        "rayClusterConfig": "RayClusterSpec",
        **fields("bool", "excludeHeadPodFromServeSvc suspend"),
    },
    "RayServiceUpgradeStrategy": {
        "type": "=NewCluster|NewClusterWithIncrementalUpgrade|None",
        "clusterUpgradeOptions": "ClusterUpgradeOptions",
    },
    "ClusterUpgradeOptions": {
        **fields("int", "maxSurgePercent stepSizePercent intervalSeconds"),
        "gatewayClassName": "str!",
    },
}
#: apiVersion -> kinds that are known in full.
KINDS = {
    "ray.io/v1": ("RayCluster", "RayCronJob", "RayJob", "RayService"),
    "v1": ("ConfigMap", "Namespace", "PersistentVolumeClaim", "Pod", "Secret", "Service", "ServiceAccount"),
    "apps/v1": ("Deployment", "StatefulSet"),
    "batch/v1": ("CronJob", "Job"),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "rbac.authorization.k8s.io/v1": ("ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"),
    "storage.k8s.io/v1": ("StorageClass",),
}
#: Python's client shows quantities as texts.
QUANTITIES = {
    "ResourceRequirements": fields("{quantity}", "limits requests"),
    "VolumeResourceRequirements": fields("{quantity}", "limits requests"),
    "PodSpec": fields("{quantity}", "overhead"),
    "EmptyDirVolumeSource": fields("quantity", "sizeLimit"),
    "ResourceFieldSelector": fields("quantity", "divisor"),
}
_PLAIN = {"str": "str", "int": "int", "float": "num", "bool": "bool", "object": "any", "datetime": "any"}


def kubernetes(folder: Path, wanted: list[str]) -> dict[str, dict[str, str]]:
    """Types of the Python client, with all that they are made of."""
    sources = {}
    for file in folder.glob("kubernetes/client/models/*v1_*.py"):
        source = file.read_text()
        sources[_plain_name(re.search(r"^class (\w+)", source, re.MULTILINE)[1])] = source  # type: ignore[index]
    done: dict[str, dict[str, str]] = {}
    while wanted:
        name = wanted.pop()
        if name in done or name in KUBERAY:
            continue
        source = sources[name]
        kinds, keys = (
            ast.literal_eval(re.search(rf"^    {table} = (\{{.*?\}})$", source, re.MULTILINE | re.DOTALL)[1])  # type: ignore[index]
            for table in ("openapi_types", "attribute_map")
        )
        found: dict[str, str] = {}
        for attribute, key in keys.items():
            kind = _kind(kinds[attribute], wanted) if key != "status" else "any"
            found[key] = kind + "!" * (f"Invalid value for `{attribute}`, must not be `None`" in source)
        done[name] = {**found, **QUANTITIES.get(name, {})}
    return done


def _plain_name(text: str) -> str:
    return re.sub(r"^(Storage|Core|Rbac)?V1", "", text)


def _kind(text: str, wanted: list[str]) -> str:
    if inner := re.fullmatch(r"list\[(.*)\]", text):
        return f"[{_kind(inner[1], wanted)}]"
    if inner := re.fullmatch(r"dict\(str, (.*)\)", text):
        return f"{{{_kind(inner[1], wanted)}}}"
    if text in _PLAIN:
        return _PLAIN[text]
    name = _plain_name(text)
    wanted.append(name)
    return name


def main() -> None:
    """Write the file, a type a line."""
    named = {part for types in KUBERAY.values() for kind in types.values() for part in re.findall(r"[A-Z]\w+", kind)}
    named = {name for name in named if not any(name in k for t in KUBERAY.values() for k in t.values() if k[0] == "=")}
    named |= {kind for kinds in KINDS.values() for kind in kinds}
    types = {**kubernetes(Path(sys.argv[1]), sorted(named - KUBERAY.keys())), **KUBERAY}
    lines = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(types[name], separators=(',', ':'))}" for name in sorted(types)
    )
    made = "Made by tests/data/make_kube_fields.py from KubeRay 1.7 (Apache-2.0) and Kubernetes 1.34 (Apache-2.0)."
    TARGET.write_text(f'{{"from": {json.dumps(made)},\n"kinds": {json.dumps(KINDS)},\n"types": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    main()
