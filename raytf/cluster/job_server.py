"""A client of Ray's job server, which may be unreachable for a while."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import requests
from ray.exceptions import AuthenticationError

from raytf._ray import jobs
from raytf.cluster import local_ray
from raytf.cluster.autostop import without_timer
from raytf.cluster.resubmission import JobSighting
from raytf.errors import ClusterError, DamagedFileError, one_line
from raytf.storage import untrusted_json

#: Limits of most requests, of reading a job's whole log, and of uploads, whose answers may take minutes.
_LIMITS = jobs.RequestLimits(5.0, 30.0, 30.0, 32 << 20)
_LOG_LIMITS = jobs.RequestLimits(5.0, 30.0, 300.0, 256 << 20)
_UPLOAD_LIMITS = jobs.RequestLimits(5.0, 300.0, 1800.0, 1 << 20)
#: Keys in the metadata of jobs that raytf submits: the name of the job, and its origin.
MARK, ORIGIN = "raytf", "raytf_origin"
_ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
#: Seconds between two attempts to read a job's log.
_AGAIN_SECONDS = 1.0
_TEXT = untrusted_json.optional(untrusted_json.text)


def _code(value: Any) -> str | None:
    """Return what is wrong with an exit code (negative for a signal), or None if it is valid."""
    return None if type(value) is int and abs(value) < 2**31 else "is not an exit code"


#: Shapes that the server's answers must have.
_JOB = untrusted_json.record(
    {"status": untrusted_json.text},
    {
        **dict.fromkeys(("message", "error_type", "entrypoint", "submission_id"), _TEXT),
        "driver_exit_code": untrusted_json.optional(_code),
        "start_time": untrusted_json.optional(untrusted_json.finite),
        "metadata": untrusted_json.optional(untrusted_json.values(untrusted_json.anything)),
    },
)
_JOBS = untrusted_json.each(_JOB)
_LOG = untrusted_json.record({}, {"logs": _TEXT})
_ACTORS = untrusted_json.record({"result": untrusted_json.each(untrusted_json.record({"state": untrusted_json.text}))})
_ACTORS = untrusted_json.record({"data": untrusted_json.record({"result": _ACTORS})})


class AwayError(Exception):
    """Raised if the head does not answer, or is not ready yet."""


def _limits(method: str, path: str) -> jobs.RequestLimits:
    return _UPLOAD_LIMITS if method == "PUT" else _LOG_LIMITS if path.endswith("/logs") else _LIMITS


class JobServer:
    """The job server of a cluster.

    Args:
        address: http://HOST:PORT.

    Raises:
        AwayError: from each method, if the server does not answer.
        ClusterError: from each method, if the server refuses the request; the message says why.
    """

    def __init__(self, address: str):
        self.address = address
        # In Ray's client, these variables take precedence over the address.
        for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
            os.environ.pop(name, None)
        for module in ("job.sdk", "dashboard_sdk"):
            logging.getLogger(f"ray.dashboard.modules.{module}").setLevel(logging.ERROR)
        self._client = self._ask(lambda: jobs.TimedClient(address, _limits))

    def submit(self, name: str, command: str, runtime_env: dict[str, Any], metadata: dict[str, str]) -> None:
        """Submit a job. A repeated call, such as after a lost answer, does not submit it again."""
        try:
            self._ask(
                lambda: self._client.submit_job(
                    entrypoint=command, submission_id=name, runtime_env=runtime_env, metadata={MARK: name, **metadata}
                )
            )
        except ClusterError as error:
            if "already exists" not in str(error):
                raise

    def inspect(self, name: str) -> JobSighting:
        sight = self._details(name)
        if sight.status in (None, *_ENDED) or not self._is_watcher_dead(name):
            return sight
        # The job may have ended between the two requests: its status is final before its watcher exits.
        sight = self._details(name)
        is_dead = sight.status is not None and sight.status not in _ENDED
        return JobSighting(sight.status, sight.code, sight.error, is_dead, sight.text)

    def running(self, command: str, origin: str) -> str | None:
        """Return the name of an unfinished job that raytf submitted with this command and origin, or None."""
        for job in self._newest_first():
            is_same = without_timer(str(job.get("entrypoint"))) == without_timer(command)
            is_ours = is_same and (job.get("metadata") or {}).get(ORIGIN) == origin
            name = job.get("submission_id")
            if is_ours and name and job["status"] not in _ENDED and not self._is_watcher_dead(name):
                return str(name)
        return None

    def newest(self) -> tuple[str, str] | None:
        """Return the name and the command of the job that raytf submitted last, if there is one."""
        for job in self._newest_first():
            name = job.get("submission_id")
            if name and (job.get("metadata") or {}).get(MARK):
                return str(name), without_timer(str(job.get("entrypoint") or ""))
        return None

    def count(self) -> tuple[int, int]:
        """Return how many jobs have not ended, and how many jobs Ray knows. Drivers without a submission count too."""
        known = self._get("/api/jobs/", _JOBS)
        unfinished = [job.get("submission_id") for job in known if job["status"] not in _ENDED]
        return sum(not (name and self._is_watcher_dead(name)) for name in unfinished), len(known)

    def log(self, name: str) -> str:
        return str(self._get(f"/api/jobs/{name}/logs", _LOG).get("logs") or "")

    def stop(self, name: str) -> None:
        """Stop a job with SIGTERM, and with SIGKILL some seconds later."""
        self._ask(lambda: self._client.stop_job(name))

    def follow(self, name: str, show: Callable[[str], None]) -> Follower:
        """Start a thread that shows a job's log."""
        return Follower(lambda: self._client.tail_job_logs(name), show)

    def _newest_first(self) -> list[dict[str, Any]]:
        return sorted(self._get("/api/jobs/", _JOBS), key=lambda job: job.get("start_time") or 0, reverse=True)

    def _details(self, name: str) -> JobSighting:
        job = self._get(f"/api/jobs/{name}", _JOB, missing="does not exist")
        if job is None:
            return JobSighting(None)
        return JobSighting(
            job["status"], job.get("driver_exit_code"), job.get("error_type"), text=job.get("message") or ""
        )

    def _is_watcher_dead(self, name: str) -> bool:
        # After a restart of the head, Ray reads the status of jobs from its store without checking it, but knows the
        # state of the actor that started the command.
        actor = jobs.actor_name(name)
        query = f"filter_keys=name&filter_predicates=%3D&filter_values={actor}"
        actors = self._get(f"/api/v0/actors?{query}", _ACTORS)["data"]["result"]["result"]
        return {actor["state"] for actor in actors} == {"DEAD"}

    def _get(self, path: str, shape: untrusted_json.Shape, missing: str | None = None) -> Any:
        """Return a path's JSON, checked against a shape, or None if the server answers 404 with the text `missing`."""
        answer = self._ask(lambda: self._client.get(path))
        if answer.status_code == 404 and missing is not None and missing in answer.text:
            return None
        if answer.status_code != 200:
            raise AwayError(f"{path}: {answer.status_code} {one_line(answer.text[:1000], 200)}")
        try:
            return untrusted_json.parse(answer.content, path, shape)
        except DamagedFileError:  # usually from a proxy in front of the server
            raise AwayError(f"{path}: not the answer of a job server: {one_line(answer.text[:1000], 100)}") from None

    def _ask(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except AuthenticationError as error:
            raise ClusterError(_authentication(self.address, str(error))) from None
        except requests.Timeout:
            raise AwayError("no answer in time") from None
        except (requests.ConnectionError, ConnectionError):
            raise AwayError("no connection") from None
        except (requests.RequestException, ValueError) as error:
            raise AwayError(one_line(error, 200)) from None
        except (KeyError, TypeError, AttributeError, RecursionError):  # Ray's client does not check the JSON
            raise AwayError("not the answer of a job server") from None
        except RuntimeError as error:
            text = one_line(error)
            if "status code 4" in text:  # the head answers 5xx until it is ready
                raise ClusterError(f"the job server at {self.address} refused the request: {text[-400:]}") from None
            raise AwayError(text[-200:]) from None


class Follower:
    """Shows the output of a job. Reconnects if the connection breaks, without showing anything twice.

    Args:
        tail: yields the log from its beginning, in parts.
        show: called with each new part.
    """

    def __init__(self, tail: Callable[[], Any], show: Callable[[str], None]):
        self._tail, self._show = tail, show
        self._shown = 0
        self._lock = threading.Lock()
        self._round = 0
        self.renew()

    def renew(self) -> None:
        """Reconnect, because the connection may lead to a machine that no longer exists."""
        with self._lock:
            self._round += 1
        threading.Thread(target=self._run, args=(self._round,), daemon=True, name="raytf-log").start()

    def finish(self, log: str) -> None:
        """Show the part of the whole log that was not shown yet, and stop."""
        with self._lock:
            self._round += 1
            self._put(log[self._shown :])

    def stop(self) -> None:
        with self._lock:
            self._round += 1

    def _run(self, number: int) -> None:
        asyncio.run(self._read(number))

    async def _read(self, number: int) -> None:
        while self._round == number:
            seen = 0
            try:
                async for part in self._tail():
                    with self._lock:
                        if self._round != number:
                            return
                        self._put(part[max(0, self._shown - seen) :])
                    seen += len(part)
            except Exception:  # whatever the server sent, the next connection may succeed
                pass
            await asyncio.sleep(_AGAIN_SECONDS)

    def _put(self, text: str) -> None:
        self._shown += len(text)
        if text:
            self._show(text)


def reach(address: str) -> JobServer:
    """Return the job server at an address, which must answer now.

    Raises:
        ClusterError: nothing answers there, or the server requires another token.
    """
    try:
        return JobServer(address)
    except AwayError as error:
        raise ClusterError(
            f"No job server of Ray answers at {address} ({error}). Pass the dashboard of a running head, such as "
            "http://127.0.0.1:8265; `ray dashboard CLUSTER.yaml` forwards that port from a cloud."
        ) from None


def _authentication(address: str, text: str) -> str:
    is_on = os.environ.get("RAY_AUTH_MODE", "").lower() == "token"
    wants = text.startswith("Authentication required") or not (is_on and local_ray.token())
    mode = "" if is_on else "Set RAY_AUTH_MODE=token. "
    return (
        f"the cluster at {address} {'needs a token' if wants else 'does not accept this token'}. {mode}"
        "RAY_AUTH_TOKEN, the file RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token must contain the head's token."
    )
