"""A client of Ray's job server, and the packages that are uploaded to it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
from ray._private import ray_constants
from ray._private.runtime_env import packaging
from ray.dashboard.modules.job import common
from ray.job_submission import JobSubmissionClient


@dataclass(frozen=True)
class RequestLimits:
    """The limits of a request.

    Attributes:
        connect, silence: timeouts in seconds for the connection, and between two bytes.
        seconds: timeout for the whole request, since a server may send a byte now and then.
        most_bytes: maximum size of the answer.
    """

    connect: float
    silence: float
    seconds: float
    most_bytes: int


class TimedClient(JobSubmissionClient):
    """Ray's client, which limits the time and the bytes of each answer.

    Args:
        address: http://HOST:PORT.
        limits: returns the limits of a request for its method and path.
    """

    def __init__(self, address: str, limits: Callable[[str, str], RequestLimits]):
        self._limits = limits
        super().__init__(address)

    def _do_request(self, method: str, endpoint: str, **kwargs: Any) -> Any:
        limits = self._limits(method, endpoint)

        def take(response: requests.Response, *_: Any, **__: Any) -> None:
            """Read the body, before other code reads it without a limit."""
            body = bytearray()
            for piece in response.iter_content(1 << 16):
                body += piece
                if len(body) > limits.most_bytes:
                    raise ValueError(f"the answer has more than {limits.most_bytes >> 20} MiB")
            response._content = bytes(body)
            response.encoding = response.encoding or "utf-8"  # otherwise requests guesses it from the whole body

        kwargs |= {"timeout": (limits.connect, limits.silence), "stream": True, "hooks": {"response": take}}
        ask = super()._do_request
        return _within(limits.seconds, lambda: ask(method, endpoint, **kwargs))

    def get(self, path: str) -> requests.Response:
        return self._do_request("GET", path)


def _within(seconds: float, ask: Callable[[], Any]) -> Any:
    """Run a request in a thread with a timeout for the whole of it, since its own timeouts restart with each byte.

    Raises:
        Timeout: the answer was not complete in time.
    """
    outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((ask(), None))
        except BaseException as error:
            outcome.put((None, error))

    threading.Thread(target=run, daemon=True, name="raytf-request").start()
    try:
        answer, error = outcome.get(timeout=seconds)
    except queue.Empty:
        raise requests.Timeout from None
    if error is not None:
        raise error
    return answer


def actor_name(job: str) -> str:
    """Return the name of the actor that runs a submitted job."""
    return common.JOB_ACTOR_NAME_TEMPLATE.format(job_id=job)


def pack(folder: str, path: Path, honour_gitignore: bool, logger: logging.Logger) -> None:
    """Write a working directory into a .zip file, as Ray does.

    Raises:
        OSError: something cannot be read or written.
    """
    excludes = ray_constants.get_runtime_env_default_excludes()
    packaging.create_package(folder, path, include_gitignore=honour_gitignore, excludes=excludes, logger=logger)
