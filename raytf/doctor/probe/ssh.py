"""Checks existing hosts: whether SSH gets in, what is installed and free, and whether they reach each other."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from raytf.doctor.check.job_fit import JobNeeds
from raytf.doctor.clouds import ssh_hosts
from raytf.doctor.clouds.ssh_hosts import ScriptOutput
from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, Path, error, warning
from raytf.doctor.local_environment import Surroundings
from raytf.doctor.probe import bucket
from raytf.doctor.probe.queries import ProbeResults, Query, no_answer, run
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
    """Ask each host.

    Args:
        trust: run the file's proxy command, which is the only way to its hosts where it has one.
    """
    seen = ProbeResults()
    if not ssh_hosts.addresses(document):
        return seen  # the offline part has said so, or a coordinator knows them
    queries = []
    if ssh_hosts.proxy_of(document) and not trust:
        seen.findings.append(not_trusted(document))
    else:
        queries.append(Query("hosts", lambda: _hosts(document, here, seen.notes, trust)))
    if need is not None and bucket.is_bucket(need.storage):
        queries.append(Query("bucket", lambda: bucket.check(need.storage)))
    seen.findings += run(queries, lambda query, problem: no_answer(query.what, problem), seconds=30.0)
    return seen


def not_trusted(document: Document) -> ConfigFinding:
    """Return the finding that hosts can be reached only by a command of the file."""
    return warning(
        "not-trusted",
        ("auth", "ssh_proxy_command"),
        f"hosts were not looked at: {ssh_hosts.untrusted(document)}",
        "What a file says may be anybody's; `ray up` runs it.",
        "Read the command, then give --trust, or --offline to look at no host.",
    )


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
    """Find what is wrong by the answers of the hosts.

    Args:
        answers: of the head first, then of the workers in the order of the file.
        document: the cluster YAML.
        here: this machine.
        notes: filled in: what is on each host.
    """
    head = answers[0]
    for i, answer in enumerate(answers):
        path: Path = ("provider", "worker_ips", i - 1) if i else ("provider", "head_ip")
        if answer.problem:
            behind = i > 0 and not head.problem and head.values.get(f"reach {answer.host}") == "yes"
            yield _no_way_in(answer, path, behind)
            continue
        notes.append(_note(answer))
        yield from _installed(answer, path, document, here)
        if i and not head.problem and head.values.get(f"reach {answer.host}") != "yes":
            yield error(
                "hosts-apart",
                path,
                f"the head {head.host} does not reach port 22 of {answer.host}",
                "The head sets workers up over SSH: this one never joins.",
                "Give addresses by which the hosts reach each other, or open port 22 between them.",
            )
        if i and not head.problem and answer.values.get(f"reach {head.host}") != "yes":
            yield error(
                "hosts-apart",
                path,
                f"{answer.host} does not reach the head {head.host} at port 22",
                "A worker that does not reach the head cannot join it, whatever SSH from the head can do.",
                "Give head_ip as an address that the workers reach, and open all ports between the hosts.",
            )


def _no_way_in(answer: ScriptOutput, path: Path, behind: bool) -> ConfigFinding:
    if behind and "denied" not in answer.problem.casefold():
        return warning(
            "ssh-not-from-here",
            path,
            f"{answer.host} was not looked at: {answer.problem}",
            "The head reaches it, which is enough for `ray up`; what is installed there is not known.",
            "Check from a machine that reaches it, or give --offline.",
        )
    if "denied" in answer.problem.casefold():
        fix = "Put your public key into ~/.ssh/authorized_keys of auth.ssh_user there, and name it in ssh_private_key."
    elif "refused" in answer.problem.casefold():
        fix = "Start sshd there: it must listen on port 22."
    else:
        fix = "Check the address, the network between, and that sshd runs there on port 22."
    return error(
        "ssh-failed",
        path,
        f"SSH to {answer.host} fails: {answer.problem}",
        "`ray up` waits for it until it gives up.",
        fix,
    )


def _note(answer: ScriptOutput) -> str:
    ray = answer.values.get("ray", "").split()
    gpus = answer.values.get("gpus", "0")
    free = int(answer.values.get("disk") or 0) / 2**20
    what = f"Ray {ray[1]} on Python {ray[0]}" if len(ray) > 1 else "no Ray yet"
    return f"host {answer.host}: {what}, {gpus} GPUs, {free:.0f} GiB free"


def _installed(answer: ScriptOutput, path: Path, document: Document, here: Surroundings) -> Iterator[ConfigFinding]:
    ray = answer.values.get("ray", "").split()
    if len(ray) > 2 and ray[0] != here.python:
        yield warning(
            "host-python",
            path,
            f"{ray[2]} of {answer.host} is Python {ray[0]}, here it is {here.python}",
            "Ray refuses a driver whose Python differs, in the patch level too, unless the set-up brings another.",
            f"Bring Python {here.python} there, as cluster-configs/local.yaml does, or remove that environment.",
        )
    if len(ray) > 2 and ray[1] != here.ray:
        yield warning(
            "host-ray",
            path,
            f"{ray[2]} of {answer.host} has Ray {ray[1]}, here it is {here.ray}",
            "Nodes of two versions refuse each other, unless the set-up brings another.",
            f"Install Ray {here.ray} there, or remove that environment.",
        )
    free = int(answer.values.get("disk") or 0) / 2**20
    if free < _LEAST_GIB:
        yield warning(
            "host-disk",
            path,
            f"{answer.host} has {free:.1f} GiB free in the home folder",
            f"TensorFlow with CUDA takes 8 GiB, logs and spilled objects more: below {_LEAST_GIB} GiB runs end early.",
            "Free some space.",
        )
    setup = ("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands")
    commands = " ".join(command for _, command in document.commands(*setup, "worker_start_ray_commands"))
    wanted = {"rsync": True, "curl": "curl" in commands, "pgrep": "pgrep" in commands}
    for tool in [t for t, is_wanted in wanted.items() if is_wanted and answer.values.get(t) != "yes"]:
        package = "procps" if tool == "pgrep" else tool
        yield error(
            "host-tool-missing",
            path,
            f"{answer.host} has no {tool}",
            "`ray up` copies files with rsync." if tool == "rsync" else "The set-up commands call it, and end there.",
            f"Install it there: `sudo apt-get install -y {package}`.",
        )
