"""Polls for notices of preemption of this node every few seconds, from a thread, and has Ray leave the node."""

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

#: Seconds between two polls. AWS asks for one every 5 s, Azure for one a second; time lost here is lost to saving.
POLL_SECONDS = 2.0
#: Pauses before each try to find out which cloud this is: the service may be slow while a machine starts.
_DETECT_PAUSES = (0.0, 5.0, 30.0)
#: Failures in a row for so long are worth a word. Azure answers the first request for events after up to two minutes.
_SILENCE_SECONDS = 180.0
#: Seconds within which Ray's head answers.
_RAY_SECONDS = 10.0


class NoticeWatch:
    """Reports each notice of a source once, and asks Ray to drain the node until Ray has accepted it.

    Args:
        source: the cloud's metadata service.
        node: what people call this node.
        say: takes a line for the user.
        event: takes the fields of an event for the ledger, by keyword.
        drain: has Ray drain the node: (reason, seconds until it stops); raises a ClusterError if Ray does not answer.
        follow_warnings: drain the node after a mere warning too.
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
        """Poll once and act on each notice. Never raises what a service or Ray may do wrong."""
        try:
            for notice in self._source.poll():
                self._heed(notice)
        except MetadataError as error:
            if not self._is_silent and self._clock() - self._well_at >= _SILENCE_SECONDS:
                self._is_silent = True
                self._say(f"node {self._node}: notices of preemption cannot be read: {error}; trying again")
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
    """Return the metadata service to ask, or None if there is none, which may take half a minute to find out.

    Args:
        notices: aws, gcp, azure, or auto to find out.
        url: base URL; the clouds' own by default.
        wait: sleeps.
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
    """Watch from a daemon thread as long as this process lives, unless notices are off.

    Args:
        config: names the cloud or the URL.
        node_id: Ray's id of this node, which stands for `{node_id}` in the URL.
        node, say, event, drain: see `NoticeWatch`.
        among: a name; only one of the processes on this node with the same name watches at a time.
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
    """Take a lock of this machine, held until the process exits in any way; None if another process has it."""
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind(f"\0{name}")
    except OSError:
        lock.close()
        return None
    return lock


def start_in_worker(config: NoticeSection, run: str, say: Callable[[str], None], event: Callable[..., None]) -> None:
    """Watch the node of a Ray Train worker; of several workers of a run on one node, one watches.

    Ray Train's local rank does not tell which: it takes nodes with one IP address for one.

    Args:
        config: names the cloud or the URL.
        run: the run's folder.
        say: takes a line for the user.
        event: takes an event's kind, and its fields by keyword.
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
    """Report to Ray that a node will be preempted: it places nothing there any more, and runs on it move away.

    Args:
        address: HOST:PORT of Ray's head.
        node_id: 56 hexadecimal digits.
        reason: for people.
        seconds: until the node stops, if known.

    Raises:
        ClusterError: Ray does not answer, or refuses.
    """
    from raytf._ray import state

    deadline = 0 if seconds is None else int((time.time() + seconds) * 1000)
    try:
        accepted, why = state.drain_for_preemption(address, node_id, reason, deadline, _RAY_SECONDS)
    except Exception as error:  # Ray's client raises errors of several kinds, which are not public
        raise ClusterError(
            f"Ray at {address} cannot be asked to drain node {node_id[:8]}: {one_line(error, 200)}"
        ) from None
    if not accepted:
        raise ClusterError(f"Ray refuses to drain node {node_id[:8]}: {why}")
