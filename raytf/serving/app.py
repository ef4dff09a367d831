"""Ray Serve on the driver's side: starts replicas, says where they answer, and drains them at the end."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray import serve
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.schema import LoggingConfig

from raytf import quiet
from raytf.connecting import is_connected, ray_for
from raytf.errors import ClusterError, ConfigError, ModelError, one_line
from raytf.serving.replica import Replica, Settings

#: Name of the Ray Serve application.
APP = "raytf-{name}"
#: Seconds between two looks whether the application is still there.
_LOOK_SECONDS = 2.0
#: Most seconds for answers that are under way when the server ends.
DRAIN_SECONDS = 30.0
#: A replica may hold so many batches of requests; more wait before it.
_BATCHES_AHEAD = 4


@dataclass(frozen=True)
class Plan:
    """How a model is served.

    Attributes:
        replicas: fewest and most.
        target: requests under way in each replica, from which the number of replicas follows.
        cpus, gpus: of each replica.
        proxies: where HTTP is listened to.
    """

    settings: Settings
    host: str
    port: int
    replicas: tuple[int, int]
    target: float
    cpus: float
    gpus: float
    proxies: Literal["head", "every-node"]
    verbose: bool


def run(plan: Plan, say: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C; then requests under way are answered, and what was started is stopped.

    Args:
        say: told what happens; where the model answers, and how to try it, as soon as it does.

    Raises:
        ClusterError, ConfigError, ModelError: says what is wrong and how to mend it.
    """
    name = APP.format(name=plan.settings.name)
    logging.getLogger("ray.serve").setLevel(logging.INFO if plan.verbose else logging.ERROR)
    if not is_connected():
        check_port(plan.host, plan.port)
    # Handlers not before Ray is there: it sets some of its own.
    with ray_for(lambda: plan.cpus * plan.replicas[1] + 1, plan.verbose) as is_local, _signals() as stop:
        # A Ray of one's own ends with all that runs on it; on a cluster, what was not started here stays.
        mine = _begin(plan) and not is_local
        try:
            host, port = _where(plan)
            _check_room(name, say)
            handle = _deploy(plan, name)
            url = f"http://{reachable(host)}:{port}/v1/models/{urllib.parse.quote(plan.settings.name)}:predict"
            say(f"serving at {url}")
            say(f"try: {handle.example.remote(url).result(timeout_s=60)}")
            _stay(name, stop, say)
        finally:
            _end(name, mine, say)


def check_port(host: str, port: int) -> None:
    """Refuse a port that cannot be listened to, before anything is started.

    Raises:
        ConfigError: somebody else listens there, or the host is not this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, OverflowError) as error:
        said = getattr(error, "strerror", None) or error
        raise ConfigError(f"--host {host} --port {port}: {said}. Give a free port of this machine.") from error


@contextlib.contextmanager
def _signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and Ctrl-C set; a second one ends the process."""
    stop = threading.Event()

    def tell(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, tell) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _begin(plan: Plan) -> bool:
    """Have Ray Serve run; whether it did not before."""
    before = _is_serving()
    location = ProxyLocation.HeadOnly if plan.proxies == "head" else ProxyLocation.EveryNode
    try:
        serve.start(
            proxy_location=location,
            http_options=HTTPOptions(host=plan.host, port=plan.port),
            logging_config=LoggingConfig(log_level="INFO" if plan.verbose else "WARNING", enable_access_log=False),
        )
    except Exception as error:  # a TimeoutError, or whatever the proxy's process died of
        raise ClusterError(f"Ray Serve cannot listen on {plan.host}:{plan.port}: {one_line(error, 300)}") from error
    return not before


def _is_serving() -> bool:
    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return False
    return True


def _where(plan: Plan) -> tuple[str, int]:
    """Host and port of the proxies, which another command may have started.

    Raises:
        ConfigError: they are not the ones that were asked for.
    """
    client: Any = serve.context._get_global_client()
    options = client.http_config
    if options.port != plan.port:
        raise ConfigError(
            f"--port {plan.port}: Ray Serve runs on this cluster already, on port {options.port}. Give --port "
            f"{options.port}, or end it with `serve shutdown`."
        )
    return options.host or plan.host, options.port


def _check_room(name: str, say: Callable[[str], None]) -> None:
    for other, state in serve.status().applications.items():
        if other == name:
            say(f"{name} is served on this cluster already; its replicas are replaced one after the other")
        elif state.status.value not in ("DELETING", "NOT_STARTED"):
            raise ClusterError(
                f"Ray Serve on this cluster serves the application {other!r} already, and a cluster has one address. "
                "End it with Ctrl-C where it was started or with `serve shutdown`, or use another cluster."
            )


def reachable(host: str) -> str:
    """A host that is listened to, as it stands in a URL for somebody on that machine."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{shown}]" if ":" in shown else shown


def _deploy(plan: Plan, name: str) -> Any:
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
        name="model",
        max_ongoing_requests=ongoing,
        ray_actor_options={"num_cpus": plan.cpus, "num_gpus": plan.gpus},
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
        graceful_shutdown_wait_loop_s=0.5,
        max_constructor_retry_count=3,
        **sizes,
    )
    _check_resources(plan)
    try:
        return serve.run(deployment.bind(plan.settings), name=name, route_prefix="/")
    except (RuntimeError, ray.exceptions.RayError) as error:
        raise _why(name, error) from error


def _check_resources(plan: Plan) -> None:
    have = ray.cluster_resources()
    for kind, each in (("CPU", plan.cpus), ("GPU", plan.gpus)):
        if each and have.get(kind, 0) < each:
            raise ClusterError(
                f"a replica needs {each:g} {kind}, and this cluster has {have.get(kind, 0):g}. Give fewer "
                f"--{kind.lower()}s-per-replica, or add nodes."
            )


def _why(name: str, error: Exception) -> Exception:
    """What kept a replica from starting, in a line."""
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


def _stay(name: str, stop: threading.Event, say: Callable[[str], None]) -> None:
    """Wait for a signal, or for somebody who ends the application.

    Raises:
        ClusterError: Ray is gone.
    """
    lost = 0
    while not stop.wait(_LOOK_SECONDS):
        try:
            application = serve.status().applications.get(name)
            lost = 0
        except Exception as error:  # the head may be restarting
            lost += 1
            if lost >= 5:
                raise ClusterError(f"Ray does not answer any more: {one_line(error, 200)}", passes=True) from error
            continue
        if application is None or application.status.value in ("DELETING", "NOT_STARTED"):
            say("somebody else has ended it")
            return


def _end(name: str, mine: bool, say: Callable[[str], None]) -> None:
    say("draining: requests under way are answered, no new ones are taken")
    began = time.monotonic()
    try:
        serve.delete(name)
        if mine:
            with quiet.no_stderr():  # Ray tells at length of tasks of actors that it was told to end
                serve.shutdown()
        say(f"stopped after {time.monotonic() - began:.1f} s")
    except Exception as error:  # Ray may be what has failed, or was ended by the same signal
        say(f"Ray has ended before: {one_line(error, 200)}")
