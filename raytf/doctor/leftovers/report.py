"""Finds the leftovers of a file's cluster: in its cloud, on its API server, or on existing hosts over SSH."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator, Sequence
from functools import partial

from raytf.doctor.check import kuberay
from raytf.doctor.check.local_files import placeholders
from raytf.doctor.check.offline import ODD
from raytf.doctor.clouds import ssh_hosts
from raytf.doctor.clouds.kubectl import Kubectl, namespace_of, plural, segment
from raytf.doctor.document import Document, Platform, parse, place_of
from raytf.doctor.finding import place as text_of
from raytf.doctor.leftovers import clouds
from raytf.doctor.leftovers.resource import Leftovers, LeftResource, Query, gather
from raytf.doctor.local_environment import Surroundings
from raytf.errors import ConfigError, RaytfError, one_line

_FINDERS = {
    Platform.AWS: clouds.find_on_aws,
    Platform.GCP: clouds.find_on_gcp,
    Platform.AZURE: clouds.find_on_azure,
}
#: Kind -> path of its API, and whether it costs money or starts something that does.
_KUBE_KINDS = {
    "RayCluster": ("/apis/ray.io/v1", True),
    "RayJob": ("/apis/ray.io/v1", True),
    "RayService": ("/apis/ray.io/v1", True),
    "Deployment": ("/apis/apps/v1", True),
    "StatefulSet": ("/apis/apps/v1", True),
    "PersistentVolumeClaim": ("/api/v1", True),
    "Service": ("/api/v1", False),
    "ConfigMap": ("/api/v1", False),
    "Secret": ("/api/v1", False),
    "ServiceAccount": ("/api/v1", False),
}
# Matches the names of processes first, since an editor with raylet.log open is not a raylet.
_SCRIPT = r"""
ps -eo pid=,user=,comm=,args= | while read -r pid user name args; do
  case "$name" in
    raylet|gcs_server|ray::*) echo "process=$pid $user $name";;
    python*|raytf) case "$args" in
      *"raytf node"*|*"raytf watch"*) echo "process=$pid $user raytf node";;
      *ray/dashboard/dashboard.py*) echo "process=$pid $user dashboard";;
      *ray/autoscaler/_private/monitor.py*|*ray/autoscaler/v2/monitor.py*) echo "process=$pid $user autoscaler";;
      *default_worker.py*) echo "process=$pid $user worker";;
      *ray/_private/log_monitor.py*) echo "process=$pid $user log_monitor";;
      esac;;
  esac
done
echo end=here
"""


def find(name: str, text: str, here: Surroundings, trust: bool = False) -> Leftovers:
    """Return the leftovers of a file's cluster.

    Args:
        name: the file's name in messages.
        text: the content of the file that `ray up` or `kubectl apply` was called with.
        trust: allow the proxy command in the file to run on this machine.

    Raises:
        ConfigError: the file names no cluster, or there are no credentials or tools to search with.
    """
    documents, findings = parse(text)
    if not documents or any(f.code == "yaml-syntax" for f in findings):
        raise ConfigError(f"{name} is not the YAML of a cluster. `raytf check --offline {name}` shows what is wrong.")
    manifests = [d for d in documents if kuberay.is_manifest(d)]
    if manifests:
        return find_on_kube(manifests, here)
    document = documents[0]
    of_hosts = place_of(document) is Platform.HOSTS
    search = partial(find_on_hosts, trust=trust) if of_hosts else _FINDERS.get(place_of(document))
    if search is None:
        kind = document.get("provider", "type")
        problem = "the file names no provider" if kind is None else f"raytf cannot search provider {kind!r}"
        raise ConfigError(f"{name}: {problem}. Expected a provider.type of aws, gcp, azure or local.")
    for f in placeholders(document):
        if f.path[0] in ("provider", "cluster_name", "auth"):
            raise ConfigError(f"{name}: {text_of(f.path)} is not filled in. Write the value that `ray up` used.")
    try:
        return search(document, here)
    except RaytfError:
        raise
    except ODD as problem:
        raise ConfigError(
            f"{name}: a value has an unexpected type ({type(problem).__name__}: {one_line(problem, 200)}). "
            f"`raytf check --offline {name}` shows which."
        ) from None


def find_on_hosts(document: Document, here: Surroundings, trust: bool = False) -> Leftovers:
    """Return the processes of Ray on each host, whichever cluster they belong to.

    Raises:
        ConfigError: the file names no host or a proxy command that is not trusted, or there is no ssh.
    """
    names = ssh_hosts.addresses(document)
    if not names:
        raise ConfigError("The file has no provider.head_ip and worker_ips. Add the hosts of the cluster.")
    left = Leftovers(place=f"hosts {', '.join(names)}")
    user = document.get("auth", "ssh_user")
    for answer in ssh_hosts.ask(document, here, names, _SCRIPT, trust):
        if answer.problem:
            left.unseen.append(f"{answer.host}: {answer.problem}")
        left.resources += _processes(answer, f"{user}@{answer.host}" if user else answer.host)
    return left


def _processes(answer: ssh_hosts.ScriptOutput, login: str) -> Iterator[LeftResource]:
    for line in answer.lines:
        if line.startswith("process="):
            pid, user, name = (*line.removeprefix("process=").split(None, 2), "", "", "")[:3]
            if not pid.isdecimal():
                continue  # users copy the command into a shell, so accept only a number
            remove = f"ssh {login} '{'' if user == login.partition('@')[0] else 'sudo '}kill {pid}'"
            note = f"of {user}; all at once: ssh {login} 'ray stop --force'"
            yield LeftResource("process", f"{answer.host} {pid}", name, None, remove, note)


def find_on_kube(documents: Sequence[Document], here: Surroundings) -> Leftovers:
    """Return the applied objects that still exist, and the objects that the operator created for them.

    Raises:
        ConfigError: there is no kubectl with a context.
    """
    kubectl = Kubectl.installed(here.environ)
    context = kubectl.context() if kubectl else ""
    if kubectl is None or not context:
        raise ConfigError(
            "There is no kubectl with a context. Install kubectl, and choose the context in which the objects were "
            "applied with `kubectl config use-context`, or get it from your cloud (`aws eks update-kubeconfig`, "
            "`gcloud container clusters get-credentials`, `az aks get-credentials`)."
        )
    default = kubectl.namespace()
    queries: list[Query] = []
    claims: set[tuple[str, str]] = set()
    for document in documents:
        kind, name = str(document.get("kind")), str(document.get("metadata", "name"))
        space = namespace_of(document, default)
        if kind in _KUBE_KINDS:
            queries.append((f"{kind} {name}", partial(_object, kubectl, kind, name, space)))
        if kind in ("RayCluster", "RayJob", "RayService"):
            queries.append((f"pods of {name}", partial(_descendants, kubectl, kind, name, space)))
        if kind == "PersistentVolumeClaim":
            claims.add((space, name))
    if claims:
        queries.append(("volumes", partial(_volumes, kubectl, claims)))
    return gather(f"Kubernetes, context {context}", queries)


def _object(kubectl: Kubectl, kind: str, name: str, space: str) -> Iterator[LeftResource]:
    api, costs = _KUBE_KINDS[kind]
    if kubectl.has(kind, name, space, api):
        remove = f"kubectl delete {plural(kind)} {name} --namespace {space}"
        yield LeftResource(kind, f"{space}/{name}", "there", None if costs else 0.0, remove)


def _volumes(kubectl: Kubectl, claims: set[tuple[str, str]]) -> Iterator[LeftResource]:
    """Find volumes with reclaimPolicy Retain, which still cost money after their claim is deleted."""
    for volume in kubectl.get("/api/v1/persistentvolumes").get("items") or ():
        spec, name = volume.get("spec", {}), volume["metadata"]["name"]
        claim, state = spec.get("claimRef") or {}, volume.get("status", {}).get("phase", "?")
        # A volume whose claim still exists is bound, and the claim is listed instead.
        if (claim.get("namespace"), claim.get("name")) in claims and state != "Bound":
            size, remove = spec.get("capacity", {}).get("storage", "?"), f"kubectl delete persistentvolume {name}"
            note = f"{size}; the cloud's disk or share stays: delete it there too"
            yield LeftResource("volume", name, state, None, remove, note)


def _descendants(kubectl: Kubectl, kind: str, name: str, space: str) -> Iterator[LeftResource]:
    clusters = {name} if kind == "RayCluster" else set[str]()
    if kind != "RayCluster":
        # The operator creates a separate cluster for a job and labels it.
        label = f"ray.io/originated-from-cr-name={name}"
        for cluster in _list(kubectl, "/apis/ray.io/v1", space, "rayclusters", label):
            clusters.add(cluster["metadata"]["name"])
            yield _left("RayCluster", "rayclusters", cluster, space, f"of {kind} {name}")
        for pod in _list(kubectl, "/api/v1", space, "pods", f"job-name={name}"):
            yield _pod(pod, space)
    for cluster_name in sorted(clusters):
        label = f"ray.io/cluster={cluster_name}"
        for pod in _list(kubectl, "/api/v1", space, "pods", label):
            yield _pod(pod, space)
        for claim in _list(kubectl, "/api/v1", space, "persistentvolumeclaims", label):
            size = claim.get("spec", {}).get("resources", {}).get("requests", {}).get("storage", "?")
            state = claim.get("status", {}).get("phase", "?")
            yield _left("volume claim", "persistentvolumeclaim", claim, space, state, note=size)
        for service in _list(kubectl, "/api/v1", space, "services", label):
            service_type = service.get("spec", {}).get("type", "ClusterIP")
            usd = None if service_type == "LoadBalancer" else 0.0  # the cloud bills load balancers
            yield _left("service", "service", service, space, service_type, usd)


def _left(
    kind: str, argument: str, item: dict, space: str, state: str, usd: float | None = None, note: str = ""
) -> LeftResource:
    name = item["metadata"]["name"]
    remove = f"kubectl delete {argument} {name} --namespace {space}"
    return LeftResource(kind, f"{space}/{name}", state, usd, remove, note)


def _list(kubectl: Kubectl, base: str, space: str, plural: str, label: str) -> list[dict]:
    selector = urllib.parse.quote(label, safe="")
    return kubectl.get(f"{base}/namespaces/{segment(space)}/{plural}?labelSelector={selector}").get("items") or []


def _pod(pod: dict, space: str) -> LeftResource:
    gpus = sum(
        int(c.get("resources", {}).get("limits", {}).get("nvidia.com/gpu", 0))
        for c in pod.get("spec", {}).get("containers", ())
    )
    where = pod.get("spec", {}).get("nodeName")
    note = f"on node {where}, which is paid for" if where else "on no node yet"
    note += f"; {gpus} GPUs" if gpus else ""
    return _left("pod", "pod", pod, space, pod.get("status", {}).get("phase", "?"), note=note)
