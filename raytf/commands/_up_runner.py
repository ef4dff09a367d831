"""Runs the steps of `raytf up` and `raytf attach` as processes, with a tunnel that is kept open."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import requests

from raytf.commands import _up_steps as steps
from raytf.commands._up_steps import INTERRUPTED, ClusterFile, Part, Step
from raytf.config.terminal_text import say
from raytf.doctor import inputs, local_environment
from raytf.errors import ConfigError

#: The port of Ray's job server, which is taken here too if it is free.
_PORT = 8265
#: Seconds until a tunnel must work, between two tries, and until a process that was told to end is killed.
_TUNNEL_SECONDS, _AGAIN_SECONDS, _END_SECONDS = 120.0, 2.0, 5.0
#: Seconds for a step to end after Ctrl-C, which a terminal sends to it too, before it gets the signal from here.
_GRACE_SECONDS = 3.0
_MODULES = {"ray": "ray.scripts.scripts", "raytf": "raytf"}


def read(path: str, autostop: str = "") -> ClusterFile:
    """Read a cluster's YAML.

    Raises:
        ConfigError: there is no such file, or it is for `kubectl`.
    """
    if path == "-" or Path(path).expanduser().is_dir():
        what = "standard input" if path == "-" else "a folder"
        raise ConfigError(
            f"{path} is {what}; expected one cluster YAML of `ray up`. For manifests of Kubernetes use "
            "`kubectl apply`, as docs/clusters/kubernetes.md shows."
        )
    (text,) = inputs.read((path,)).values()
    return steps.cluster_file(path, text, local_environment.here(), autostop)


def free_port() -> int:
    """Return 8265 if that port of this machine is free, otherwise another free one."""
    for port in (_PORT, 0):
        with socket.socket() as server, contextlib.suppress(OSError):
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", port))
            return int(server.getsockname()[1])
    raise ConfigError("No port of 127.0.0.1 is free for the tunnel to the head.")


class Runner:
    """Runs steps; a context manager, which closes the tunnel.

    Args:
        name: of the command, for its lines.

    Attributes:
        codes: the exit codes of the steps that have been run.
    """

    def __init__(self, name: str):
        self._name = name
        self.codes: dict[Part, int] = {}
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def say(self, line: str) -> None:
        """Print a line for the user, if somebody still reads."""
        with contextlib.suppress(OSError, ValueError):
            say(f"{self._name}: {line}", file=sys.stderr)

    def perform(self, todo: Iterable[Step], cluster: ClusterFile) -> int | None:
        """Run steps until one is the last, and return the exit code; None if all have been run."""
        for step in todo:
            self.say(f"$ {step.line}")
            try:
                code, is_interrupted = self.run(step)
            except KeyboardInterrupt:
                code, is_interrupted = INTERRUPTED, True
            self.codes[step.part] = code
            outcome = steps.after(step, code, is_interrupted, cluster)
            for line in outcome.lines:
                self.say(line)
            if outcome.code is not None:
                return outcome.code
        return None

    def run(self, step: Step) -> tuple[int, bool]:
        """Run one step, and return its exit code and whether it was interrupted."""
        if step.part is not Part.TUNNEL:
            return _foreground(step)
        tunnel = self._open.enter_context(Tunnel(step))
        if tunnel.is_ready(_TUNNEL_SECONDS):
            return 0, False
        for line in tunnel.last_lines():
            self.say(f"  {line}")
        return 1, False


def _program(step: Step) -> tuple[list[str], dict[str, str]]:
    """Return a step's command and variables. The programs are those of this environment, on the PATH or not."""
    mode = {"RAY_AUTH_MODE": "token"} if step.needs_token else {}
    return [sys.executable, "-P", "-m", _MODULES[step.argv[0]], *step.argv[1:]], {**os.environ, **mode}


def _foreground(step: Step) -> tuple[int, bool]:
    """Run a step to its end, also after Ctrl-C: a step ends by itself then, and says how things stand."""
    argv, env = _program(step)
    out = subprocess.DEVNULL if step.part in (Part.TOKEN, Part.PROBE) else None
    err = subprocess.DEVNULL if step.part is Part.PROBE else None
    process = subprocess.Popen(argv, env=env, stdout=out, stderr=err)
    is_interrupted, seconds = False, None
    while True:
        try:
            return process.wait(seconds), is_interrupted
        except KeyboardInterrupt:
            is_interrupted, seconds = True, _GRACE_SECONDS
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            seconds = None


class Tunnel:
    """`ray dashboard` in a session of its own, out of Ctrl-C's reach; a context manager.

    It is started again when it ends: connections break, and a head may be started again at another address.
    """

    def __init__(self, step: Step):
        self._argv, self._env = _program(step)
        self._address = steps.address_at(int(step.argv[-1]))
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115, closed on exit
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep, daemon=True, name="raytf-tunnel")

    def __enter__(self) -> Tunnel:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_closed.set()
        with self._lock:
            process = self._process
        if process is not None:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                self._thread.join(_END_SECONDS)
        self._log.close()

    def is_ready(self, seconds: float) -> bool:
        """Wait until a server answers through the tunnel, and return whether it did in time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(requests.RequestException):
                requests.get(f"{self._address}/api/version", timeout=5)  # 401 is an answer, too
                return True
            time.sleep(0.5)
        return False

    def last_lines(self, count: int = 8) -> list[str]:
        """Return the last lines that it printed."""
        # `ray dashboard` writes at the offset that a seek would move.
        lines = os.pread(self._log.fileno(), 1 << 20, 0).decode(errors="replace").splitlines()
        return [line for line in lines if line.strip()][-count:]

    def _keep(self) -> None:
        while not self._is_closed.is_set():
            with self._lock:
                if self._is_closed.is_set():
                    return
                self._process = subprocess.Popen(
                    self._argv,
                    env=self._env,
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self._process.wait()
            self._is_closed.wait(_AGAIN_SECONDS)
