"""Finds what is left of the cluster of a file: in its cloud, on its API server, or on existing hosts over SSH."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from raytf.doctor.check import kuberay
from raytf.doctor.check.local_files import placeholders
from raytf.doctor.check.offline import ODD
from raytf.doctor.clouds import ssh_hosts
from raytf.doctor.document import Document, Platform, parse, place_of
from raytf.doctor.finding import place as text_of
from raytf.doctor.leftovers import clouds, kube
from raytf.doctor.leftovers.resource import Leftovers, LeftResource
from raytf.doctor.local_environment import Surroundings
from raytf.errors import ConfigError, RaytfError, one_line

_FINDERS = {
    Platform.AWS: clouds.find_on_aws,
    Platform.GCP: clouds.find_on_gcp,
    Platform.AZURE: clouds.find_on_azure,
}
# Matches names, not command lines: an editor with raylet.log open is no raylet.
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
    """Find what is left of the cluster of a file.

    Args:
        name: of the file, for messages.
        text: the file that `ray up` or `kubectl apply` was called with.
        trust: run the command that the file names for this machine.

    Raises:
        ConfigError: the file names no cluster, or there are no credentials or tools to search with.
    """
    documents, findings = parse(text)
    if not documents or any(f.code == "yaml-syntax" for f in findings):
        raise ConfigError(f"{name} is not YAML of a cluster. `raytf check --offline {name}` shows what is wrong.")
    manifests = [d for d in documents if kuberay.is_manifest(d)]
    if manifests:
        return kube.find(manifests, here)
    document = documents[0]
    of_hosts = place_of(document) is Platform.HOSTS
    search = partial(find_on_hosts, trust=trust) if of_hosts else _FINDERS.get(place_of(document))
    if search is None:
        kind = document.get("provider", "type")
        raise ConfigError(f"{name}: raytf cannot search provider {kind!r}. Expected one of aws, gcp, azure and local.")
    for f in placeholders(document):
        if f.path[0] in ("provider", "cluster_name", "auth"):
            raise ConfigError(f"{name}: {text_of(f.path)} is not filled in. Write the value that `ray up` had.")
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
    """Find processes of Ray on each host, of whatever cluster they are.

    Raises:
        ConfigError: the file names no host, or a command that is not trusted, or there is no ssh.
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
                continue  # a user may copy the command into a shell
            remove = f"ssh {login} '{'' if user == login.partition('@')[0] else 'sudo '}kill {pid}'"
            note = f"of {user}; all at once: ssh {login} 'ray stop --force'"
            yield LeftResource("process", f"{answer.host} {pid}", name, None, remove, note)
