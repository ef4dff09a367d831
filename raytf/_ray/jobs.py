"""Ray's job server and the packages that it takes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import requests
from ray._private import ray_constants
from ray._private.runtime_env import packaging
from ray.dashboard.modules.job import common
from ray.job_submission import JobSubmissionClient

SEEN = {
    "ray._private.ray_constants.get_runtime_env_default_excludes": "2.60.0",
    "ray._private.runtime_env.packaging.create_package": "2.60.0",
    "ray.dashboard.modules.job.common.JOB_ACTOR_NAME_TEMPLATE": "2.60.0",
    "ray.dashboard.modules.job.sdk.JobSubmissionClient._do_request": "2.60.0",
}


class TimedClient(JobSubmissionClient):
    """Ray's, with an end to each request: a machine that vanishes closes no connection.

    Args:
        address: http://HOST:PORT.
        timeout: by the method of a request, seconds as `requests` takes them.
    """

    def __init__(self, address: str, timeout: Callable[[str], Any]):
        self._timeout = timeout
        super().__init__(address)

    def _do_request(self, method: str, endpoint: str, **kwargs: Any) -> Any:
        kwargs.setdefault("timeout", self._timeout(method))
        return super()._do_request(method, endpoint, **kwargs)

    def get(self, path: str) -> requests.Response:
        """The answer to a GET of the server."""
        return self._do_request("GET", path)


def actor_name(job: str) -> str:
    """Name of the actor that runs a submitted job."""
    return common.JOB_ACTOR_NAME_TEMPLATE.format(job_id=job)


def pack(folder: str, path: Path, honour_gitignore: bool, logger: logging.Logger) -> None:
    """Write a working directory into a .zip file, as Ray does.

    Raises:
        OSError: something cannot be read or written.
    """
    excludes = ray_constants.get_runtime_env_default_excludes()
    packaging.create_package(folder, path, include_gitignore=honour_gitignore, excludes=excludes, logger=logger)
