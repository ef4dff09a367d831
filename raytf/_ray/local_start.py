"""Have `ray.init` start a Ray on this machine without processes that a run does not need."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ray._private import node, services

#: Of `ray.init`: no idle processes ahead of any use, which an actor with an environment of its own cannot take, and
#: which hold up those that are wanted; and as many processes may start at once as a run has, for each is mostly its own
#: imports.
SYSTEM_CONFIG = {"prestart_worker_first_driver": False, "worker_maximum_startup_concurrency": 16}


@contextlib.contextmanager
def without_helpers(shows_logs: bool) -> Iterator[None]:
    """Have `ray.init` start no API server, no autoscaler and no log monitor while the `with` statement lasts.

    It has no option for that. Without the dashboard the API server has nothing but Ray's usage statistics, and
    `ray.init` waits for it for a second; the autoscaler cannot add to one machine; the reader of logs has nobody who
    listens.

    Args:
        shows_logs: the driver shows what workers print, so the reader of logs is wanted.
    """

    def no_server(*_: Any, **__: Any) -> tuple[str, None]:
        return "", None

    def nothing(_: node.Node) -> None:
        pass

    replaced = [(services, "start_api_server", no_server), (node.Node, "start_monitor", nothing)]
    if not shows_logs:
        replaced.append((node.Node, "start_log_monitor", nothing))
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
