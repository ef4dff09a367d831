"""Ray's view of this process: its worker, node, token and setup hook. Also settings for starting a Ray."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
import ray._private.utils
import ray._private.worker
import ray._raylet
from ray._common import utils
from ray._private import node, ray_constants, services
from ray._private.authentication import authentication_token_generator, authentication_token_setup
from ray._private.runtime_env import setup_hook

#: Environment variable of a runtime environment that names the function that a new process calls first.
HOOK = ray_constants.WORKER_PROCESS_SETUP_HOOK_ENV_VAR
#: Environment variable in which a user chooses whether a token is used.
AUTH_MODE = authentication_token_setup.AUTH_MODE_ENV_VAR
#: Settings of `ray.init`. No idle processes are started in advance: an actor with its own environment cannot use them,
#: and they delay others. All processes of a run can start at once, since each mostly imports.
SYSTEM_CONFIG = {"prestart_worker_first_driver": False, "worker_maximum_startup_concurrency": 16}
#: Kinds of errors that Ray pushes to drivers and that raytf reports itself.
_REPORTED = (
    ray_constants.WORKER_CRASH_PUSH_ERROR,
    ray_constants.WORKER_DIED_PUSH_ERROR,
    ray_constants.REMOVED_NODE_ERROR,
)
#: Module that each worker of Ray Train imports.
TRAIN_WORKER = "ray.train.v2._internal.execution.worker_group.worker"


@contextlib.contextmanager
def _replaced(*attributes: tuple[Any, str, Any]) -> Iterator[None]:
    """Set attributes, given as (owner, name, value), while the `with` statement lasts."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in attributes]
    for owner, name, value in attributes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def no_signal_handlers() -> contextlib.AbstractContextManager[None]:
    """Make `ray.init` install no signal handlers while the `with` statement lasts.

    Ray has two handlers of SIGTERM: one in Python, which exits with code 15 at any point, and one that aborts the
    process.
    """
    return _replaced(
        (ray._private.utils, "set_sigterm_handler", lambda handler: None),
        (ray_constants, "RAY_DISABLE_FAILURE_SIGNAL_HANDLER", True),
    )


def without_helpers(shows_logs: bool) -> contextlib.AbstractContextManager[None]:
    """Make `ray.init` start no API server, no autoscaler and no log monitor while the `with` statement lasts.

    Ray has no option for this. Without the dashboard, the API server only collects usage statistics, and `ray.init`
    waits a second for it. The autoscaler cannot add nodes to a single machine, and nothing reads the logs.

    Args:
        shows_logs: whether the driver shows the output of workers, which needs the log monitor.
    """

    def nothing(_: node.Node) -> None:
        pass

    def no_server(*_: Any, **__: Any) -> tuple[str, None]:
        return "", None

    unused = ["start_monitor"] if shows_logs else ["start_monitor", "start_log_monitor"]
    return _replaced((services, "start_api_server", no_server), *((node.Node, name, nothing) for name in unused))


def show_no_errors() -> None:
    """Stop Ray from printing errors that its own processes report, such as deaths, in this connected process.

    Ray has no option for this, and prints a page of a raylet's log before raytf detects that the raylet has died. Ray
    stops its listener in the same way when it disconnects.
    """
    worker: Any = ray._private.worker.global_worker
    worker.threads_stopped.set()
    worker.gcs_error_subscriber.close()
    worker.listener_thread.join(5)
    worker.threads_stopped.clear()


class _WithoutDeaths:
    """A subscriber to the errors that Ray's processes publish, without those about lost workers and nodes."""

    def __init__(self, subscriber: Any):
        self._subscriber = subscriber

    def __getattr__(self, name: str) -> Any:
        return getattr(self._subscriber, name)

    def poll(self) -> tuple[Any, Any]:
        key, error = self._subscriber.poll()
        return key, None if error is not None and error.get("type") in _REPORTED else error


def show_no_deaths() -> None:
    """Stop Ray from printing nine lines about each lost worker or node, which the run reports in one line.
    Ray still prints other errors, such as a failed autoscaler. This process must be connected to a cluster."""
    show_no_errors()
    worker: Any = ray._private.worker.global_worker
    raylet: Any = ray._raylet  # compiled code, which mypy does not know
    subscriber = raylet.GcsErrorSubscriber(worker_id=worker.worker_id, address=worker.gcs_client.address)
    worker.gcs_error_subscriber = _WithoutDeaths(subscriber)
    worker.listener_thread = threading.Thread(
        target=ray._private.worker.listen_error_messages,
        name="ray_listen_error_messages",
        args=(worker, worker.threads_stopped),
        daemon=True,
    )
    worker.listener_thread.start()


def this_node() -> Any:
    """Return Ray's view of this process's node; None in a process that is a client of a remote Ray."""
    return ray._private.worker._global_node


def worker_node() -> Any:
    """Return Ray's view of this process's node, in any connected process, such as a worker."""
    return ray._private.worker.global_worker.node


def local_sockets() -> set[str]:
    """Return the Unix sockets through which a connected process communicates with its node."""
    own = worker_node()
    return {own.raylet_socket_name, own.plasma_store_socket_name}


def session_folder() -> Path:
    """Return a folder of this node that lasts as long as its Ray."""
    return Path(worker_node().get_session_dir_path())


def driver_paths() -> list[str]:
    """Return the module search path of this job's driver."""
    worker: Any = ray._private.worker.global_worker  # `core_worker` is compiled code, which mypy does not know
    return list(worker.core_worker.get_job_config().py_driver_sys_path)


def export_hook(hook: Callable[[], None]) -> str:
    """Publish a function, by value, for new processes to call, and return the value of `HOOK` that names it."""
    key = ray._private.worker.global_worker.function_actor_manager.export_setup_func(hook, timeout=60)
    return setup_hook.decode_function_key(key)


def hook_caller(value: str) -> Callable[[], None]:
    """Return a function that calls the hook named by a value of `HOOK`, and raises RuntimeError if the hook fails.

    It is a nested function, which is sent by value: the process that calls it does not need raytf.
    """

    def call() -> None:
        from ray._private.runtime_env.setup_hook import load_and_execute_setup_hook

        error = load_and_execute_setup_hook(value)
        if error:
            raise RuntimeError(error)

    return call


def set_title(title: str) -> None:
    """Set the title that `ps` shows for this process. Ray overwrites it when a worker uses the process."""
    ray._raylet.setproctitle(title)  # type: ignore[attr-defined]


def system_temp_folder() -> str:
    """Return the folder in which Ray keeps its sessions by default."""
    return utils.get_default_system_temp_dir()


def new_token() -> str:
    """Return a new authentication token for a Ray."""
    return authentication_token_generator.generate_new_authentication_token()


def gcs_of(address: str) -> str | None:
    """Return HOST:PORT of the GCS for an address of `ray.init`, such as `auto`; None if there is none."""
    if "://" in address:
        return None
    try:
        return services.canonicalize_bootstrap_address(address)
    except (ValueError, ConnectionError):
        return None


def is_let_in(gcs: str, token: str, seconds: float = 5.0) -> bool | None:
    """Return whether the Ray at `gcs` (HOST:PORT) accepts a token, which is empty for none.
    Return None if Ray does not answer in time."""
    import grpc  # only a driver needs it
    from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

    metadata = (("authorization", f"Bearer {token}"),) if token else None
    with grpc.insecure_channel(gcs) as channel:
        stub = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
        request = getattr(gcs_service_pb2, "CheckAliveRequest")()  # generated code, whose names mypy does not know  # noqa: B009
        try:
            stub.CheckAlive(request, timeout=seconds, metadata=metadata)
        except grpc.RpcError as error:
            return False if error.code() is grpc.StatusCode.UNAUTHENTICATED else None
    return True


def use_token() -> None:
    """Make this process, and the processes that it starts, send the user's token from now on."""
    os.environ[AUTH_MODE] = "token"
    ray._raylet.Config.initialize("")  # type: ignore[attr-defined]


@contextlib.contextmanager
def on_loopback() -> Iterator[dict[str, str]]:
    """Make a Ray that this process starts or connects to use only the loopback while the `with` statement lasts.

    There is no other way: Ray replaces 127.0.0.1 by an address that other machines can reach.

    Yields:
        Environment variables that the processes of that Ray need.
    """
    with _replaced((ray_constants, "ENABLE_RAY_CLUSTER", False)):
        yield {ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}
