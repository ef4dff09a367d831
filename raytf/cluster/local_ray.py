"""A Ray that a driver starts for itself: other machines cannot reach it, and it does not outlive the driver."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import ray

from raytf._ray import state, worker_process
from raytf.cluster import ray_watch, scratch
from raytf.cluster.orphaned_processes import MARK, OrphanGuard

_NICENESS = "RAY_worker_niceness"
#: The longest path of a temporary folder in which the paths of sockets do not exceed the system's limit.
_LONGEST_FOLDER = 60
_LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")


class OwnRay:
    """Sets up and cleans up around a `ray.init` that starts a Ray."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self._guard: OrphanGuard | None = None
        self._session: Path | None = None

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Make a Ray that starts in this `with` statement listen only on the loopback, and mark its processes."""
        keep_token_private()
        with contextlib.suppress(OSError):
            self._guard = OrphanGuard(self._mark)
        variables = {MARK: self._mark}
        # A process that sets its title would overwrite its environment, and the mark.
        variables["SPT_NOENV"] = "1"
        # Ray starts workers with a niceness of 15: next to other programs, a restart, which mostly imports, would get
        # almost no CPU.
        variables[_NICENESS] = os.environ.get(_NICENESS, "0")
        variables |= self._own_folder()
        with _environment(variables), _loopback():
            yield

    def _own_folder(self) -> dict[str, str]:
        """Return the variables that send temporary files of Ray's processes to a folder that the guard removes."""
        base = worker_process.system_temp_folder()
        if self._guard is None or len(base) > _LONGEST_FOLDER:
            return {}
        try:
            folder = tempfile.mkdtemp(prefix="raytf-", dir=base)
        except OSError:
            return {}
        self._guard.remove(folder)
        return {"TMPDIR": folder, "RAY_TMPDIR": base}

    def begun(self) -> None:
        node: Any = worker_process.this_node()
        self._session = Path(node.get_session_dir_path())
        if self._guard is not None:
            self._guard.remove(str(self._session / scratch.FOLDER))

    def forget_logs(self) -> None:
        """Make the guard remove the folder of this session with Ray's logs, because there was no error."""
        if self._guard is not None and self._session is not None:
            self._guard.remove(str(self._session))

    def signs(self) -> list[ray_watch.Sign]:
        node: Any = worker_process.this_node()
        gcs, raylet = (node.all_processes[kind][0].process.pid for kind in ("gcs_server", "raylet"))
        return [
            ray_watch.WatchedProcess("the GCS of this driver's Ray", gcs, False),
            ray_watch.WatchedProcess("the raylet of this driver's Ray", raylet, True),
        ]

    def over(self) -> None:
        if self._guard is not None:
            self._guard.over()


@contextlib.contextmanager
def reaching(address: str) -> Iterator[None]:
    """Let `ray.init` find the Ray at HOST:PORT, even one that another driver started, for a `with` statement."""
    host, _, port = address.rpartition(":")
    is_private = host in _LOOPBACK and port.isdigit() and not _answers(ray.util.get_node_ip_address(), int(port))
    with _loopback() if is_private and _answers(host.strip("[]"), int(port)) else contextlib.nullcontext():
        yield


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _loopback() -> Iterator[None]:
    with worker_process.on_loopback() as variables, _environment(variables):
        yield


def signs_of_cluster() -> list[ray_watch.Sign]:
    """Return watchers of the cluster's processes that this driver needs.

    If this machine's raylet dies, so does the driver. A GCS that keeps its state may be restarted.
    """
    node = worker_process.this_node()
    if node is None:  # a Ray Client, whose driver Ray's own server watches
        return []
    signs: list[ray_watch.Sign] = []
    # Compare the whole word: with several nodes on a machine, the name of one may be a prefix of another.
    socket_name = f"--raylet_socket_name={node.raylet_socket_name}"
    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"] == "raylet" and socket_name in (process.info["cmdline"] or ()):
            signs.append(ray_watch.WatchedProcess("the raylet of this driver's node", process.pid, True))
    config = state.system_config()
    seconds = float(config.get("gcs_rpc_server_reconnect_timeout_s", ray_watch.RECONNECT_SECONDS))
    return [*signs, ray_watch.WatchedPort("the cluster's GCS", node.gcs_address, ray_watch.patience(seconds))]


def keep_token_private() -> None:
    """Make this user's token file readable only for the user; Ray would make it readable for everybody."""
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token" or os.environ.get("RAY_AUTH_TOKEN"):
        return
    path = _token_path()
    with contextlib.suppress(OSError):  # Ray reports what is wrong with the folder
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _create(path)
        at = path.stat()
        if at.st_uid == os.getuid() and at.st_mode & 0o077:
            path.chmod(0o600)


def token() -> str:
    """Return the token that Ray would use for this user; empty if there is none.

    Ray's own reader would break the actors of a process that calls it before it has connected.
    """
    own = os.environ.get("RAY_AUTH_TOKEN", "").strip()
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return own or _token_path().read_text().strip()
    return own


def _token_path() -> Path:
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")


def _create(path: Path) -> None:
    """Write a new token atomically: other processes may write one at the same time."""
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
            stream.write(worker_process.new_token())
        with contextlib.suppress(FileExistsError):
            os.link(part, path)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
