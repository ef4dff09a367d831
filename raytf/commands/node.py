"""`raytf node -- COMMAND ...`: run a Ray node that leaves in time, on SIGTERM as on a cloud's notice."""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, field

import tyro

from raytf.cluster.preemption import watcher
from raytf.cluster.preemption.init_process import Command, Raylet
from raytf.config.flags import NoticeSection
from raytf.config.terminal_text import say
from raytf.errors import ClusterError, ConfigError

#: Seconds between two checks whether a Ray node is up, and whether its workers have left.
_NODE_SECONDS = 0.5
#: Seconds between two checks whether the node is still up, and for which the command can outlive it.
_STAY_SECONDS, _FOLLOW_SECONDS = 5.0, 10.0
#: Seconds of the margin that are left for SIGKILL to take effect.
_KILL_SECONDS = 1.0


@dataclass(frozen=True)
class Node:
    """Run a Ray node that leaves in time, e.g. as the first process of a pod: raytf node -- ray start --block ...

    On SIGTERM, which Kubernetes sends before it kills a pod, Ray is asked to drain the node. The command is stopped
    once no Ray Train worker runs here, at the latest when the grace period is nearly over. The clouds' notices are
    watched too. After `ray stop`, which `ray start --block` outlives, the command is stopped.
    """

    command: tyro.conf.Positional[tuple[str, ...]] = ()
    """What to run, after `--`; it must stay in the foreground, as `ray start --block` does."""
    grace_seconds: float = 30.0
    """From SIGTERM to SIGKILL: terminationGracePeriodSeconds of the pod."""
    margin_seconds: float = 5.0
    """The part of that in which the command can stop by itself."""
    notices: tyro.conf.OmitArgPrefixes[NoticeSection] = field(default_factory=NoticeSection)

    def check(self) -> None:
        """Refuse what cannot work.

        Raises:
            ConfigError: says which flag, what was expected and how to fix it.
        """
        if not self.command:
            raise ConfigError("No command given. Usage: raytf node -- ray start --block --address=HEAD:6379")
        if not _KILL_SECONDS < self.margin_seconds < self.grace_seconds < float("inf"):
            raise ConfigError(
                f"--grace-seconds {self.grace_seconds:g} --margin-seconds {self.margin_seconds:g}: expected a margin "
                f"above {_KILL_SECONDS:g} s and below the grace period."
            )
        self.notices.check()


def main(flags: Node) -> None:
    """Run the command; exits with its code, 128 + N where signal N ended it."""
    flags.check()
    command = Command(flags.command)
    watching = False
    seen = time.monotonic()
    while command.code is None:
        raylet = command.raylet()
        if raylet is not None:
            seen = time.monotonic()
            if not watching:
                watching = True
                _watch_notices(flags.notices, raylet)
        elif watching and time.monotonic() - seen > _FOLLOW_SECONDS:
            _say("Ray has stopped here; stopping the command, which has not noticed")
            _end(command, time.monotonic() + flags.margin_seconds)
            break
        asked = command.wait(_STAY_SECONDS if watching else _NODE_SECONDS)
        if asked == signal.SIGTERM:
            _leave(command, flags.grace_seconds, flags.margin_seconds)
        elif asked is not None:
            command.send(asked)
    while command.code is None:
        command.wait(_NODE_SECONDS)
    sys.exit(command.code if command.code >= 0 else 128 - command.code)


def _leave(command: Command, grace: float, margin: float) -> None:
    """Have Ray leave this node, and end the command before the grace period is over."""
    end = time.monotonic() + grace
    last = end - margin
    raylet = command.raylet()
    if raylet is not None:
        _say(f"SIGTERM: asking Ray to drain node {raylet.node_id[:8]}, which stops in {grace:.0f} s")
        # Not here: Ray may take its time to answer, and the grace period runs.
        threading.Thread(target=_drain, args=(raylet, last - time.monotonic()), daemon=True).start()
        _wait_for_workers(command, last)
    _end(command, end - _KILL_SECONDS)


def _end(command: Command, last: float) -> None:
    """Send SIGTERM, and SIGKILL if the command still runs at a given time."""
    command.send(signal.SIGTERM)
    while command.code is None and (left := last - time.monotonic()) > 0:
        asked = command.wait(left)
        if asked is not None:
            command.send(asked)
    command.send(signal.SIGKILL)


def _wait_for_workers(command: Command, last: float) -> None:
    workers = command.workers()
    while command.code is None and workers and (left := last - time.monotonic()) > 0:
        if command.wait(min(_NODE_SECONDS, left)) is not None:
            return  # asked again: at once, then
        workers = command.workers()
    _say(f"{workers or 'no'} Ray Train worker{'s' if workers > 1 else ''} left here; stopping the command")


def _drain(raylet: Raylet, seconds: float) -> None:
    try:
        watcher.drain_node(raylet.head, raylet.node_id, "kubernetes: SIGTERM", seconds)
    except ClusterError as error:
        _say(str(error))


def _watch_notices(notices: NoticeSection, raylet: Raylet) -> None:
    watcher.start(
        notices,
        raylet.node_id,
        f"{socket.gethostname()} ({raylet.node_id[:8]})",
        _say,
        lambda **fields: None,
        lambda reason, seconds: watcher.drain_node(raylet.head, raylet.node_id, reason, seconds),
    )


def _say(message: str) -> None:
    say(f"raytf node: {message}", file=sys.stderr)
