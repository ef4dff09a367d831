"""Polls for preemption notices of this node from a thread, every few seconds, and has Ray drain the node."""

from __future__ import annotations

import socket
import threading
import time
import zlib
from collections.abc import Callable

from raytf.cluster.preemption.notices import (
    LINK_LOCAL,
    TIMEOUT_SECONDS,
    MetadataError,
    Notice,
    NoticeSource,
    detect,
    sources,
)
from raytf.config.flags import NoticeSection
from raytf.errors import ClusterError, one_line

#: Seconds between two polls. AWS recommends 5 s, Azure 1 s; each second of delay leaves less time to save.
POLL_SECONDS = 2.0
#: Pauses before each attempt to detect the cloud: the service may be slow while a machine starts.
_DETECT_PAUSES = (0.0, 5.0, 30.0)
#: Seconds of failed polls before the user is warned. Azure may take two minutes to answer the first request for events.
_SILENCE_SECONDS = 180.0
#: Timeout of a drain request to Ray's head.
_RAY_SECONDS = 10.0


class NoticeWatch:
    """Reports each notice of a source once, and asks Ray to drain the node until Ray has accepted it.

    Args:
        source: the cloud's metadata service.
        node: this node's name in messages.
        say: prints a line for the user.
        event: writes an event to the ledger, with its fields as keywords.
        drain: called with (reason, seconds until the node stops); raises a ClusterError if Ray does not accept.
        follow_warnings: drain the node after a warning too.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        source: NoticeSource,
        node: str,
        say: Callable[[str], None],
        event: Callable[..., None],
        drain: Callable[[str, float | None], None],
        follow_warnings: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._source, self._node, self._say, self._event, self._drain = source, node, say, event, drain
        self._follow_warnings, self._clock = follow_warnings, clock
        self._seen: set[str] = set()
        self._accepted: set[str] = set()
        self._refused = ""
        self._well_at = clock()
        self._is_silent = False

    def poll(self) -> None:
        """Poll once and act on each notice. Errors of the metadata service and of Ray are reported, not raised."""
        try:
            for notice in self._source.poll():
                self._heed(notice)
        except MetadataError as error:
            if not self._is_silent and self._clock() - self._well_at >= _SILENCE_SECONDS:
                self._is_silent = True
                self._say(f"node {self._node}: preemption notices cannot be read: {error}; trying again")
            return
        self._well_at, self._is_silent = self._clock(), False

    def _heed(self, notice: Notice) -> None:
        if notice.kind not in self._seen:
            self._seen.add(notice.kind)
            when = "" if notice.seconds is None else f", in {notice.seconds:.0f} s"
            self._say(f"notice for node {self._node}: {notice.text}{when}")
            self._event(cloud=notice.cloud, notice=notice.kind, deadline_seconds=notice.seconds, leaves=notice.leaves)
        if notice.kind in self._accepted or not (notice.leaves or self._follow_warnings):
            return
        try:
            self._drain(f"{notice.cloud}: {notice.kind}", notice.seconds)
        except ClusterError as error:
            if str(error) != self._refused:
                self._refused = str(error)
                self._say(f"node {self._node}: {error}; trying again")
            return
        self._accepted.add(notice.kind)


def find(notices: str, url: str | None, wait: Callable[[float], object] = time.sleep) -> NoticeSource | None:
    """Return the metadata service to poll, or None if no service answers. Detection may take half a minute.

    Args:
        notices: aws, gcp, azure, or auto to detect the cloud.
        url: base URL; by default the address that all clouds use.
        wait: sleeps for a number of seconds.
    """
    url = url or LINK_LOCAL
    if notices != "auto":
        return sources(url, TIMEOUT_SECONDS)[notices]
    for pause in _DETECT_PAUSES:
        wait(pause)
        cloud = detect(url)
        if cloud is not None:
            return sources(url, TIMEOUT_SECONDS)[cloud]
    return None


def start(
    config: NoticeSection,
    node_id: str,
    node: str,
    say: Callable[[str], None],
    event: Callable[..., None],
    drain: Callable[[str, float | None], None],
    among: str | None = None,
) -> threading.Thread | None:
    """Start a daemon thread that polls until this process exits, unless notices are off.

    Args:
        config: selects the cloud or the URL.
        node_id: Ray's id of this node, which replaces `{node_id}` in the URL.
        node, say, event, drain: see `NoticeWatch`.
        among: the name of a group of processes on this node, of which only one polls at a time.
    """
    if config.notices == "off":
        return None
    url = config.notice_url and config.notice_url.replace("{node_id}", node_id)

    def watch() -> None:
        turn = None
        while among is not None and turn is None:
            turn = _take_turn(f"raytf-notices-{zlib.crc32(among.encode()):08x}-{node_id}")
            if turn is None:
                time.sleep(POLL_SECONDS)
        source = find(config.notices, url)
        if source is None:
            return
        watch = NoticeWatch(source, node, say, event, drain, config.follow_warnings)
        while True:
            watch.poll()
            time.sleep(POLL_SECONDS)

    thread = threading.Thread(target=watch, daemon=True, name="raytf-notices")
    thread.start()
    return thread


def _take_turn(name: str) -> socket.socket | None:
    """Return a machine-wide lock that is held until this process exits, or None if another process holds it."""
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind(f"\0{name}")
    except OSError:
        lock.close()
        return None
    return lock


def start_in_worker(config: NoticeSection, run: str, say: Callable[[str], None], event: Callable[..., None]) -> None:
    """Poll for notices of a Ray Train worker's node. Only one of a run's workers on the node polls.

    Ray Train's local rank cannot pick that worker, because it treats nodes that share an IP address as one node.

    Args:
        config: selects the cloud or the URL.
        run: the run's folder.
        say: prints a line for the user.
        event: writes an event of a kind to the ledger, with its fields as keywords.
    """
    import ray

    context = ray.get_runtime_context()
    node_id, address = context.get_node_id(), context.gcs_address
    start(
        config,
        node_id,
        f"{ray.util.get_node_ip_address()} ({node_id[:8]})",
        say,
        lambda **fields: event("notice", node=node_id, **fields),
        lambda reason, seconds: drain_node(address, node_id, reason, seconds),
        among=run,
    )


def drain_node(address: str, node_id: str, reason: str, seconds: float | None) -> None:
    """Report to Ray that a node will be preempted. Ray then places nothing on it, and its runs move to other nodes.

    Args:
        address: HOST:PORT of Ray's head.
        node_id: 56 hexadecimal digits.
        reason: the reason to show to users.
        seconds: until the node stops, if known.

    Raises:
        ClusterError: Ray does not answer, or refuses to drain the node.
    """
    from raytf._ray import state

    deadline = 0 if seconds is None else int((time.time() + seconds) * 1000)
    try:
        accepted, why = state.drain_for_preemption(address, node_id, reason, deadline, _RAY_SECONDS)
    except Exception as error:  # Ray's client raises several kinds of errors, which are not public
        raise ClusterError(
            f"Ray at {address} cannot be asked to drain node {node_id[:8]}: {one_line(error, 200)}"
        ) from None
    if not accepted:
        raise ClusterError(f"Ray refuses to drain node {node_id[:8]}: {why}")
