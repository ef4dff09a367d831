"""Ray Serve on the driver's side: starts replicas, reports their URL, and drains them at the end."""

from __future__ import annotations

import contextlib
import enum
import logging
import socket
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray import serve
from ray.serve.config import ControllerOptions, HTTPOptions, ProxyLocation
from ray.serve.schema import LoggingConfig

from raytf import _process
from raytf._process import signal_handler
from raytf._ray import serve as controller
from raytf.cluster.connect import is_connected, ray_for
from raytf.errors import ClusterError, ConfigError, ModelError, one_line
from raytf.inference.serving import front
from raytf.inference.serving.replica import Replica, ReplicaSettings, load_once

#: Names of the Ray Serve application and of its only deployment.
APP, _DEPLOYMENT = "raytf-{name}", "model"
#: Settings of the deployment: the command that deployed it, and whether raytf started Ray Serve for it.
_OWNER, _STARTED = "raytf_owner", "raytf_started"
#: Seconds between two checks that the application still runs, and the timeout of one check.
_POLL_SECONDS = 2.0
_POLL_TIMEOUT = 30.0
#: The most seconds that requests in progress have when the server stops.
DRAIN_SECONDS = 30.0
#: Statuses of an application that is not running or is being deleted.
_NOT_THERE = ("DELETING", "NOT_STARTED")
#: The most batches of requests that a replica holds; others wait in front of it.
_BATCHES_AHEAD = 4


@dataclass(frozen=True)
class ServingPlan:
    """The settings with which a model is served.

    Attributes:
        replicas: the fewest and the most replicas.
        target: average number of requests in progress per replica that autoscaling aims for.
        cpus, gpus: the CPUs and GPUs of each replica.
        proxies: the nodes that listen.
    """

    settings: ReplicaSettings
    host: str
    port: int
    replicas: tuple[int, int]
    target: float
    cpus: float
    gpus: float
    proxies: Literal["head", "every-node"]
    verbose: bool


def run(plan: ServingPlan, say: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C, then answer the requests in progress and stop what this call started.

    Args:
        say: called with messages, such as the URL of the model and a command to try it.

    Raises:
        ClusterError, ConfigError, ModelError: the model cannot be served.
    """
    name = APP.format(name=plan.settings.name)
    logging.getLogger("ray.serve").setLevel(logging.INFO if plan.verbose else logging.ERROR)
    if not is_connected():
        check_port(plan.host, plan.port)
    # Ray sets signal handlers of its own when it starts.
    with ray_for(lambda: plan.cpus * plan.replicas[1] + 1, plan.verbose) as is_local, _signals() as stop:
        # A local Ray stops with everything on it; on a cluster, what other commands started keeps running.
        mine = _begin(plan) and not is_local
        me, is_ours = uuid.uuid4().hex, False
        try:
            host, port = _where(plan)
            before = _check_room(name)
            _check_resources(plan)
            if before is not None:
                _check_model(plan.settings)
                say(f"{name} is already served on this cluster; its replicas are replaced one by one")
                # Of commands that replace each other, the last one stops Ray Serve.
                mine = mine or before.is_started_by_raytf
            is_ours = before is None  # a running application stays until it is replaced
            handle = _deploy(plan, name, {_OWNER: me, _STARTED: mine})
            is_ours = True
            url = f"http://{reachable(host)}:{port}/v1/models/{urllib.parse.quote(plan.settings.name)}:predict"
            say(f"serving at {url}")
            say(f"try: {handle.example.remote(url).result(timeout_s=60)}")
            _stay(name, me, is_local, stop, say)
        finally:
            _end(name, me if is_ours else None, mine, say)


def check_port(host: str, port: int) -> None:
    """Refuse a host and port on which this machine cannot listen, before anything is started.

    Raises:
        ConfigError: another process listens there, or the host is not this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--host {host} --port {port}: {reason}. Choose a free port of this machine.") from error


@contextlib.contextmanager
def _signals() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM and Ctrl-C set; a second signal ends the process."""
    stop = threading.Event()

    def on_signal(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    with signal_handler(on_signal):
        yield stop


def _begin(plan: ServingPlan) -> bool:
    """Start Ray Serve unless it already runs; return whether this call started it."""
    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
        is_new = False
    except ValueError:
        is_new = True
    try:
        serve.start(
            proxy_location=ProxyLocation.HeadOnly if plan.proxies == "head" else ProxyLocation.EveryNode,
            http_options=HTTPOptions(host=plan.host, port=plan.port),
            # Proxies inherit the controller's environment, which names the middleware of `front`.
            controller_options=ControllerOptions(runtime_env={"env_vars": {front.VARIABLE: front.PLACE}}),
            logging_config=LoggingConfig(log_level="INFO" if plan.verbose else "WARNING", enable_access_log=False),
        )
    except Exception as error:  # a TimeoutError, or the reason why the proxy's process died
        raise ClusterError(f"Ray Serve cannot listen on {plan.host}:{plan.port}: {one_line(error, 300)}") from error
    return is_new


def _where(plan: ServingPlan) -> tuple[str, int]:
    """Return host and port of the proxies, which another command may have started.

    Raises:
        ConfigError: the proxies listen on another port than the plan's.
    """
    options = controller.http_options()
    if options.port != plan.port:
        raise ConfigError(
            f"--port {plan.port}: Ray Serve already runs on this cluster, on port {options.port}. Use --port "
            f"{options.port}, or stop it with `serve shutdown`."
        )
    return options.host or plan.host, options.port


def _check_room(name: str) -> RunningApplication | None:
    """Return the application of this name, or None if it does not run yet.

    Raises:
        ClusterError: another application runs.
    """
    for other, state in serve.status().applications.items():
        if other != name and state.status.value not in _NOT_THERE:
            raise ClusterError(
                f"Ray Serve on this cluster already serves the application {other!r}, and a cluster has one address. "
                "Stop it with Ctrl-C where it was started or with `serve shutdown`, or use another cluster."
            )
    application = _application(name)
    return None if application is None or application.status in _NOT_THERE else application


def _check_model(settings: ReplicaSettings) -> None:
    """Refuse a model that cannot be loaded before it replaces a working one: Ray Serve does not roll back.

    Raises:
        ModelError: the model cannot be loaded; the message says why.
    """
    try:
        ray.get(ray.remote(num_cpus=0)(load_once).remote(settings))
    except ray.exceptions.RayTaskError as error:
        raise ModelError(f"{one_line(error.cause, 500)} The running application stays as it is.") from error


def reachable(host: str) -> str:
    """Return the host of a URL with which a client on this machine reaches a server that listens on `host`."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{shown}]" if ":" in shown else shown


def _deploy(plan: ServingPlan, name: str, marks: dict[str, Any]) -> Any:
    low, high = plan.replicas
    ongoing = max(_BATCHES_AHEAD * plan.settings.batch_size, 16)
    sizes: dict[str, Any] = {"num_replicas": low}
    if high > low:
        sizes = {
            "autoscaling_config": {
                "min_replicas": low,
                "initial_replicas": low,
                "max_replicas": high,
                "target_ongoing_requests": plan.target,
                "upscale_delay_s": 5.0,
                "downscale_delay_s": 60.0,
            }
        }
    deployment = Replica.options(  # type: ignore[attr-defined]
        name=_DEPLOYMENT,
        user_config=marks,
        max_ongoing_requests=ongoing,
        ray_actor_options={"num_cpus": plan.cpus, "num_gpus": plan.gpus},
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
        graceful_shutdown_wait_loop_s=0.5,
        max_constructor_retry_count=3,
        **sizes,
    )
    try:
        return serve.run(deployment.bind(plan.settings), name=name, route_prefix="/")
    except (RuntimeError, ray.exceptions.RayError) as error:
        raise _why(name, error) from error


def _check_resources(plan: ServingPlan) -> None:
    have = ray.cluster_resources()
    for kind, each in (("CPU", plan.cpus), ("GPU", plan.gpus)):
        if each and have.get(kind, 0) < each:
            raise ClusterError(
                f"a replica needs {each:g} {kind}, and this cluster has {have.get(kind, 0):g}. Use fewer "
                f"--{kind.lower()}s-per-replica, or add nodes."
            )


def _why(name: str, error: Exception) -> Exception:
    """Return the error that kept a replica from starting."""
    message = ""
    with contextlib.suppress(Exception):
        application = serve.status().applications[name]
        message = " ".join(d.message for d in application.deployments.values()) or application.message
    text = message or str(error)
    for line in text.splitlines():
        kind, colon, rest = line.strip().partition("Error: ")
        if colon and "raytf.errors" in kind:
            return ModelError(rest.strip())
    return ClusterError(f"the model cannot be served: {one_line(text, 500)}")


class ApplicationOwner(enum.Enum):
    """The owner of an application."""

    OURS = "ours"
    COMING = "coming"  # another command is replacing it
    TAKEN = "taken"
    GONE = "gone"


@dataclass(frozen=True)
class RunningApplication:
    """An application that Ray Serve knows.

    Attributes:
        status: Ray Serve's status.
        owner: the command that deployed it last.
        is_started_by_raytf: whether a command started Ray Serve for it.
    """

    status: str
    owner: str
    is_started_by_raytf: bool = False


def owner_of(application: RunningApplication | None, me: str) -> ApplicationOwner:
    """Return who owns the application that the command `me` deployed; it is None if it no longer exists."""
    if application is None or application.status in _NOT_THERE:
        return ApplicationOwner.GONE
    # A command exits if its deployment fails, and leaves the application to the command before it.
    if application.owner == me or application.status == "DEPLOY_FAILED":
        return ApplicationOwner.OURS
    return ApplicationOwner.COMING if application.status == "DEPLOYING" else ApplicationOwner.TAKEN


def _application(name: str) -> RunningApplication | None:
    application = controller.details(_POLL_TIMEOUT)["applications"].get(name)
    if application is None:
        return None
    deployment = application["deployments"].get(_DEPLOYMENT) or {}
    config = (deployment.get("deployment_config") or {}).get("user_config") or {}
    status = str(getattr(application["status"], "value", application["status"]))
    return RunningApplication(status, str(config.get(_OWNER, "")), bool(config.get(_STARTED)))


def _stay(name: str, me: str, is_local: bool, stop: threading.Event, say: Callable[[str], None]) -> None:
    """Wait until a signal arrives, or another command stops or replaces the application.

    Raises:
        ClusterError: Ray no longer answers.
    """
    lost = 0
    while not stop.wait(_POLL_SECONDS):
        try:
            owner = owner_of(_application(name), me)
            lost = 0
        except Exception as error:  # the head may be restarting
            lost += 1
            if lost >= 5:
                raise ClusterError(f"Ray no longer answers: {one_line(error, 200)}", passes=True) from error
            continue
        if owner is ApplicationOwner.GONE:
            say("another command stopped it")
            return
        if owner is ApplicationOwner.TAKEN and not is_local:  # a local Ray would stop with this command
            say("another command has replaced it")
            return


def _end(name: str, me: str | None, mine: bool, say: Callable[[str], None]) -> None:
    """Stop what this command deployed and started, and nothing else.

    Args:
        me: this command; None if it deployed nothing.
        mine: whether this command started Ray Serve.
    """
    began = time.monotonic()
    try:
        is_ours = me is not None and owner_of(_application(name), me) is ApplicationOwner.OURS
        if is_ours:
            say("draining: requests in progress are answered, new ones are refused")
            serve.delete(name)
        if mine and not serve.status().applications:
            with _process.no_stderr():  # Ray prints long reports about tasks of the actors that it stops
                serve.shutdown()
        if is_ours:
            say(f"stopped after {time.monotonic() - began:.1f} s")
    except Exception as error:  # Ray may have failed, or the same signal stopped it
        say(f"Ray had already stopped: {one_line(error, 200)}")
