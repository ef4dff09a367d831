"""What is left on hosts of one's own: processes of Ray, which `ray down` may leave and still report success."""

from __future__ import annotations

from collections.abc import Iterator

from raytf.cluster.check.document import Document
from raytf.cluster.check.local_environment import Surroundings
from raytf.cluster.clouds import ssh_hosts
from raytf.cluster.leftovers.resource import Leftovers, LeftResource
from raytf.errors import ConfigError

# Of names, not of command lines: an editor with raylet.log open is no raylet. The brackets keep the script from itself.
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


def look(document: Document, here: Surroundings, trust: bool = False) -> Leftovers:
    """Look at each host for processes of Ray, of whatever cluster they are.

    Raises:
        ConfigError: the file names no host, or a command that is not trusted, or there is no ssh.
    """
    names = ssh_hosts.addresses(document)
    if not names:
        raise ConfigError("the file has no provider.head_ip and worker_ips. Expected the hosts of the cluster.")
    left = Leftovers(place=f"hosts {', '.join(names)}")
    user = document.get("auth", "ssh_user")
    for answer in ssh_hosts.ask(document, here, names, _SCRIPT, trust):
        if answer.problem:
            left.unseen.append(f"{answer.host}: {answer.problem}")
        left.things += _processes(answer, f"{user}@{answer.host}" if user else answer.host)
    return left


def _processes(answer: ssh_hosts.ScriptOutput, login: str) -> Iterator[LeftResource]:
    for line in answer.lines:
        if line.startswith("process="):
            pid, user, name = (*line.removeprefix("process=").split(None, 2), "", "", "")[:3]
            if not pid.isdecimal():
                continue  # what is to be copied into a shell is not text of a host
            remove = (
                f"ssh {login} 'kill {pid}'" if user == login.partition("@")[0] else f"ssh {login} 'sudo kill {pid}'"
            )
            note = f"of {user}; all at once: ssh {login} 'ray stop --force'"
            yield LeftResource("process", f"{answer.host} {pid}", name, None, remove, note)
