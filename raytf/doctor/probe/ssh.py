"""Checks existing hosts: access by SSH, installed software, free disk space, and connections between hosts."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from raytf.doctor.check.job_fit import JobNeeds
from raytf.doctor.clouds import ssh_hosts
from raytf.doctor.clouds.ssh_hosts import ScriptOutput
from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, Path, error, warning
from raytf.doctor.local_environment import Surroundings
from raytf.doctor.probe.queries import ProbeResults, Query, check_bucket, is_bucket, no_answer, run
from raytf.errors import ConfigError

_LEAST_GIB = 20
_SCRIPT = r"""
echo "disk=$(df -Pk "$HOME" | tail -n 1 | awk '{print $4}')"
for tool in curl rsync pgrep; do command -v $tool > /dev/null && echo "$tool=yes"; done
for python in "$HOME/venv/bin/python" "$(bash -lc 'command -v python || command -v python3' 2> /dev/null)"; do
  test -x "$python" || continue
  said=$("$python" -c 'import importlib.metadata as m, platform; print(platform.python_version(), m.version("ray"))' \
    2> /dev/null) && echo "ray=$said $python" && break
done
command -v nvidia-smi > /dev/null && echo "gpus=$(nvidia-smi -L 2> /dev/null | grep -c '^GPU')"
for host in HOSTS; do
  timeout 4 bash -c "< /dev/tcp/$host/22" 2> /dev/null && echo "reach $host=yes" &
done
wait
echo end=here
"""


def inspect(document: Document, here: Surroundings, need: JobNeeds | None, trust: bool = False) -> ProbeResults:
    """Check each host. If the file names a proxy command, hosts are checked only if `trust` allows it to run."""
    seen = ProbeResults()
    if not ssh_hosts.addresses(document):
        return seen  # the offline part reports it, or a coordinator knows them
    queries = []
    if ssh_hosts.proxy_of(document) and not trust:
        what = f"hosts were not checked: {ssh_hosts.untrusted(document)}"
        why = "The file may come from anyone, and `ray up` runs the command."
        fix = "Read the command, then pass --trust, or --offline to contact no host."
        seen.findings.append(warning("not-trusted", ("auth", "ssh_proxy_command"), what, why, fix))
    else:
        queries.append(Query("hosts", lambda: _hosts(document, here, seen.notes, trust)))
    if need is not None and is_bucket(need.storage):
        queries.append(Query("bucket", lambda: check_bucket(need.storage)))
    seen.findings += run(queries, lambda query, problem: no_answer(query.what, problem), seconds=30.0)
    return seen


def _hosts(document: Document, here: Surroundings, notes: list[str], trust: bool) -> Iterator[ConfigFinding]:
    names = ssh_hosts.addresses(document)
    try:
        answers = ssh_hosts.ask(document, here, names, script(names), trust)
    except ConfigError as problem:
        yield no_answer("hosts", problem)
        return
    yield from judge(answers, document, here, notes)


def script(names: Sequence[str]) -> str:
    """Return the script that runs on each host; it only reads."""
    return _SCRIPT.replace("HOSTS", " ".join(map(shlex.quote, names)))


def judge(
    answers: Sequence[ScriptOutput], document: Document, here: Surroundings, notes: list[str]
) -> Iterator[ConfigFinding]:
    """Find mistakes by the answers of the hosts.

    Args:
        answers: the head's answer, then the workers' in the order of the file.
        notes: receives a line about each host.
    """
    head = answers[0]
    for i, answer in enumerate(answers):
        path: Path = ("provider", "worker_ips", i - 1) if i else ("provider", "head_ip")
        reached = not head.problem and head.values.get(f"reach {answer.host}") == "yes"
        if answer.problem:
            yield _no_way_in(answer, path, i > 0 and reached)
            continue
        notes.append(_note(answer))
        yield from _installed(answer, path, document, here)
        if i and not head.problem and not reached:
            what = f"the head {head.host} does not reach port 22 of {answer.host}"
            why = "The head sets workers up over SSH: this one never joins."
            fix = "Use addresses at which the hosts reach each other, or open port 22 between them."
            yield error("hosts-apart", path, what, why, fix)
        if i and not head.problem and answer.values.get(f"reach {head.host}") != "yes":
            what = f"{answer.host} does not reach the head {head.host} at port 22"
            why = "A worker that does not reach the head cannot join it, even if SSH from the head works."
            fix = "Set head_ip to an address that the workers reach, and open all ports between the hosts."
            yield error("hosts-apart", path, what, why, fix)


def _no_way_in(answer: ScriptOutput, path: Path, behind: bool) -> ConfigFinding:
    problem = answer.problem.casefold()
    if behind and "denied" not in problem:
        what = f"{answer.host} was not checked: {answer.problem}"
        why = "The head reaches it, which is enough for `ray up`, but its software and disk are unknown."
        return warning("ssh-not-from-here", path, what, why, "Check from a machine that reaches it, or pass --offline.")
    fix = "Check the address, the network in between, and that sshd runs there on port 22."
    if "denied" in problem:
        fix = "Put your public key into ~/.ssh/authorized_keys of auth.ssh_user there, and name it in ssh_private_key."
    elif "refused" in problem:
        fix = "Start sshd there: it must listen on port 22."
    what, why = f"SSH to {answer.host} fails: {answer.problem}", "`ray up` waits for it until it gives up."
    return error("ssh-failed", path, what, why, fix)


def _note(answer: ScriptOutput) -> str:
    ray, gpus = answer.values.get("ray", "").split(), answer.values.get("gpus", "0")
    what = f"Ray {ray[1]} on Python {ray[0]}" if len(ray) > 1 else "no Ray yet"
    return f"host {answer.host}: {what}, {gpus} GPUs, {_free_gib(answer):.0f} GiB free"


def _free_gib(answer: ScriptOutput) -> float:
    return int(answer.values.get("disk") or 0) / 2**20


def _installed(answer: ScriptOutput, path: Path, document: Document, here: Surroundings) -> Iterator[ConfigFinding]:
    ray = answer.values.get("ray", "").split()
    if len(ray) > 2 and ray[0] != here.python:
        what = f"{ray[2]} of {answer.host} is Python {ray[0]}, here it is {here.python}"
        why = "Ray refuses a driver whose Python differs, even in the patch level, unless the setup installs another."
        fix = f"Install Python {here.python} there, as cluster-configs/local.yaml does, or remove that environment."
        yield warning("host-python", path, what, why, fix)
    if len(ray) > 2 and ray[1] != here.ray:
        what = f"{ray[2]} of {answer.host} has Ray {ray[1]}, here it is {here.ray}"
        why = "Nodes with different versions refuse each other, unless the setup installs another."
        yield warning("host-ray", path, what, why, f"Install Ray {here.ray} there, or remove that environment.")
    free = _free_gib(answer)
    if free < _LEAST_GIB:
        what = f"{answer.host} has {free:.1f} GiB free in the home folder"
        why = f"TensorFlow with CUDA takes 8 GiB, logs and spilled objects more: runs need {_LEAST_GIB} GiB."
        yield warning("host-disk", path, what, why, "Free some space.")
    setup = ("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands")
    commands = " ".join(command for _, command in document.commands(*setup, "worker_start_ray_commands"))
    for tool, package in {"rsync": "rsync", "curl": "curl", "pgrep": "procps"}.items():
        if answer.values.get(tool) != "yes" and (tool == "rsync" or tool in commands):
            why = "`ray up` copies files with it." if tool == "rsync" else "The setup calls it and fails there."
            fix = f"Install it there: `sudo apt-get install -y {package}`."
            yield error("host-tool-missing", path, f"{answer.host} has no {tool}", why, fix)
