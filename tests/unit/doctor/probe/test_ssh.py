"""`raytf check` online and `raytf down-check` for hosts of one's own: a real sshd on addresses of the loopback."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from raytf.commands import down_check
from raytf.doctor.check import job_fit, offline
from raytf.doctor.clouds import ssh_hosts
from raytf.doctor.clouds.ssh_hosts import ScriptOutput
from raytf.doctor.document import parse
from raytf.doctor.finding import Severity
from raytf.doctor.leftovers import report
from raytf.doctor.local_environment import Surroundings
from raytf.doctor.probe import online, ssh
from raytf.errors import ConfigError
from tests.support import sshd

HEAD, WORKER, NOBODY = "127.77.1.1", "127.77.1.2", "127.77.1.9"


@pytest.fixture(scope="module")
def key(tmp_path_factory):
    with sshd.servers(tmp_path_factory.mktemp("sshd"), [HEAD, WORKER]) as private:
        yield private


def config(private, *workers, user=None, more=""):
    return (
        f"cluster_name: mine\nprovider: {{type: local, head_ip: {HEAD}, worker_ips: [{', '.join(workers)}]}}\n"
        f"auth: {{ssh_user: {user or sshd.user()}, ssh_private_key: {private}}}\n{more}"
    )


def here(python="3.11.7", ray="2.60.0"):
    return Surroundings(python, ray, Path.cwd(), {"HOME": "/nonexistent", "PATH": os.environ["PATH"]})


def ask(text, surroundings, need=None):
    return online.inspect(text, surroundings, need, offline.check(text, surroundings, need))


def codes(seen):
    return {f.code for f in seen.findings}


def test_hosts_that_are_ready(key):
    free = os.statvfs(Path.home())
    if free.f_bavail * free.f_frsize < 20 << 30:
        pytest.skip("this machine has less than 20 GiB free, which is what the check would say")
    seen = ask(config(key, WORKER), here())
    found = codes(seen)
    assert found <= {"host-python", "host-ray"}, seen.findings  # the Python of a login shell here is any
    assert [note.partition(":")[0] for note in seen.notes] == [f"host {HEAD}", f"host {WORKER}"]


def test_nobody_there_and_nobody_known(key, tmp_path):
    seen = ask(config(key, WORKER, NOBODY), here())
    failed = [f for f in seen.findings if f.code == "ssh-failed"]
    assert [f.path for f in failed] == [("provider", "worker_ips", 1)]
    assert "refused" in failed[0].what
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other"], check=True, timeout=60)
    seen = ask(config(tmp_path / "other", WORKER), here())
    assert codes(seen) == {"ssh-failed"}
    assert all("denied" in f.what and "authorized_keys" in f.fix for f in seen.findings)


def answers(**more):
    values = {"disk": str(90 << 20), "curl": "yes", "rsync": "yes", "pgrep": "yes", "gpus": "1"}
    values |= {"ray": "3.11.7 2.60.0 /venv/bin/python", f"reach {HEAD}": "yes", f"reach {WORKER}": "yes"}
    values |= {key.replace("reach_", "reach ").replace("_", "."): value for key, value in more.items()}
    return {k: v for k, v in values.items() if v}


@pytest.mark.parametrize(
    ("code", "head", "worker"),
    [
        (None, {}, {}),
        (None, {"ray": ""}, {"ray": ""}),
        ("host-python", {"ray": "3.11.6 2.60.0 /venv/bin/python"}, {}),
        ("host-ray", {}, {"ray": "3.11.7 2.59.0 /venv/bin/python"}),
        ("host-disk", {"disk": str(5 << 20)}, {}),
        ("host-tool-missing", {}, {"rsync": ""}),
        ("host-tool-missing", {}, {"curl": ""}),
        ("hosts-apart", {f"reach_{WORKER.replace('.', '_')}": ""}, {}),
        ("hosts-apart", {}, {f"reach_{HEAD.replace('.', '_')}": ""}),
    ],
)
def test_what_hosts_say(key, monkeypatch, code, head, worker):
    """The decision alone, from what the script has printed on two hosts."""
    (document,), _ = parse(config(key, WORKER, more="setup_commands: ['curl -L https://x | sh']\n"))
    said = [ScriptOutput(HEAD, answers(**head), []), ScriptOutput(WORKER, answers(**worker), [])]
    found = list(ssh.judge(said, document, here(), []))
    assert [f.code for f in found] == ([code] if code else []), found


def test_a_worker_that_only_the_head_reaches(key):
    (document,), _ = parse(config(key, WORKER))
    said = [ScriptOutput(HEAD, answers(), []), ScriptOutput(WORKER, {}, [], "Connection timed out")]
    (found,) = ssh.judge(said, document, here(), [])
    assert (found.code, found.severity) == ("ssh-not-from-here", Severity.WARNING)


def test_the_python_of_the_hosts_is_compared(key, tmp_path):
    """A real environment of Ray on the host, found as the set-up of local.yaml leaves it."""
    script = ssh.script([HEAD]).replace('"$HOME/venv/bin/python"', f'"{sys.executable}"')
    (document,), _ = parse(config(key))
    (answer,) = ssh_hosts.ask(document, here(), [HEAD], script)
    assert answer.values["ray"].split()[:2] == [
        f"{sys.version_info[0]}.{sys.version_info[1]}.{sys.version_info[2]}",
        "2.60.0",
    ]
    assert answer.values[f"reach {HEAD}"] == "yes"
    # The file's Python is 3.11, which is another one where the tests run on a later one.
    found = {f.code for f in ssh.judge([answer], document, here(ray="2.59.0"), [])} - {"host-python"}
    assert found in ({"host-ray"}, {"host-disk"})


def test_a_proxy_is_taken_as_ray_takes_it(key):
    text = config(key).replace("auth: {", "auth: {ssh_proxy_command: 'exit 1', ")
    seen = online.inspect(text, here(), None, offline.check(text, here()), trust=True)
    assert codes(seen) == {"ssh-failed"}


def test_a_proxy_is_not_run_unless_the_file_is_trusted(key, tmp_path):
    proof = tmp_path / "was-run"
    text = config(key).replace("auth: {", f"auth: {{ssh_proxy_command: 'touch {proof}; exit 1', ")
    seen = ask(text, here())
    assert codes(seen) == {"not-trusted"}
    assert "--trust" in seen.findings[0].fix
    with pytest.raises(ConfigError, match="--trust"):
        report.find("c.yaml", text, here())
    file = tmp_path / "c.yaml"
    file.write_text(text)
    for command in ("check", "down-check"):
        done = subprocess.run(
            [sys.executable, "-c", "from raytf.commands.main import main; main()", command, str(file)],
            capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert "was not run" in done.stdout + done.stderr, (done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
    assert not proof.exists()
    online.inspect(text, here(), None, offline.check(text, here()), trust=True)
    assert proof.exists()


@pytest.mark.parametrize(
    "host", ["-oProxyCommand=touch PROOF", "$(touch PROOF)", "a b", "h`touch PROOF`", "h;x", "a\nb"]
)
@pytest.mark.parametrize("where", ["host", "user"])
def test_what_ssh_or_a_shell_would_take_for_more_than_a_name_is_refused(key, tmp_path, host, where):
    proof = tmp_path / "proof"
    name = json.dumps(host.replace("PROOF", str(proof)))
    text = config(key).replace(HEAD, name) if where == "host" else config(key, user=name)
    found = offline.check(text, here()).findings
    assert ("local-hosts" if where == "host" else "ssh-user") in {f.code for f in found}
    with pytest.raises(ConfigError, match=r"is not an? |is neither"):
        ssh_hosts.ask(parse(text)[0][0], here(), ssh_hosts.addresses(parse(text)[0][0]), "echo end=here")
    assert not proof.exists()


def test_without_ssh_nothing_is_known(key, tmp_path):
    nowhere = Surroundings("3.11.7", "2.60.0", tmp_path, {"HOME": str(tmp_path), "PATH": str(tmp_path)})
    assert codes(ask(config(key), nowhere)) == {"no-answer"}


def test_the_bucket_of_a_job_is_tried_too(key, s3):
    need = job_fit.parse(f"python j.py --storage '{s3('runs', bucket='nowhere-at-all')}'")
    assert "bucket-missing" in codes(ask(config(key), here(), need))


def test_a_process_of_ray_that_was_left(key, tmp_path):
    """A process that is called raylet, since only its name is looked at; it is this test's own."""
    raylet = tmp_path / "raylet"
    raylet.symlink_to("/bin/sleep")
    process = subprocess.Popen([raylet, "300"])
    try:
        deadline = time.monotonic() + 30
        while Path(f"/proc/{process.pid}/comm").read_text().strip() != "raylet":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        left = report.find("c.yaml", config(key), here())
        mine = [t for t in left.resources if t.name == f"{HEAD} {process.pid}"]
        assert [(t.kind, t.state) for t in mine] == [("process", "raylet")]
        assert mine[0].remove == f"ssh {sshd.user()}@{HEAD} 'kill {process.pid}'"
        assert down_check.exit_code(left) == 1
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    left = report.find("c.yaml", config(key), here())
    assert f"{HEAD} {process.pid}" not in [t.name for t in left.resources]


def test_a_host_that_is_not_reached_proves_nothing(key):
    left = report.find("c.yaml", config(key, NOBODY), here())
    assert [text.partition(":")[0] for text in left.unseen] == [NOBODY]
    assert down_check.exit_code(left) == 2
