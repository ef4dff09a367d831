"""JSON over HTTP for the clouds whose libraries are not installed: one try, time-outs of seconds, no redirect."""

from __future__ import annotations

import urllib.parse
from dataclasses import dataclass
from typing import Any

import requests
from requests.auth import AuthBase

_SECONDS = 8.0
#: Pages of a list; a project with more machines than these hold is not one that raytf has started.
_PAGES = 20


class RestError(Exception):
    """What an API answered instead of what was wanted.

    Attributes:
        status: of HTTP; 0 where nobody answered.
        reason: the API's own word, such as PERMISSION_DENIED or AuthorizationFailed.
    """

    def __init__(self, status: int, reason: str, message: str):
        super().__init__(message)
        self.status, self.reason = status, reason

    @property
    def is_missing(self) -> bool:
        return self.status == 404

    @property
    def is_denied(self) -> bool:
        return self.status == 403


@dataclass(frozen=True)
class _Bearer(AuthBase):
    """The token as `requests` wants it: a header would lose to what a `.netrc` has for the host."""

    token: str

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self.token}"
        return request


@dataclass(frozen=True)
class RestClient:
    """An API.

    Attributes:
        root: what paths start from, such as https://compute.googleapis.com/compute/v1.
        token: an OAuth token.
        headers: more headers.
    """

    root: str
    token: str
    headers: tuple[tuple[str, str], ...] = ()

    def get(self, path: str, **query: str) -> Any:
        """The JSON at a path.

        Raises:
            RestError: anything but a 200.
        """
        return self._ask(path, query, None)

    def post(self, path: str, body: dict[str, Any], **query: str) -> Any:
        """The JSON that an API answers to a question that is too long for an address; never used to change anything."""
        return self._ask(path, query, body)

    def pages(self, path: str, items: str, **query: str) -> list[Any]:
        """All entries of a list that comes in pages, as Google's and Azure's do.

        Raises:
            RestError: anything but a 200, or more pages than anybody waits for.
        """
        found: list[Any] = []
        for _ in range(_PAGES):
            answer = self.get(path, **query)
            found += answer.get(items) or []
            following = answer.get("nextPageToken")
            link = str(answer.get("nextLink") or "")
            if following:
                query = {**query, "pageToken": following}
            elif link.startswith(self.root):  # to nobody else does the token go
                path, _, rest = link.removeprefix(self.root).partition("?")
                query = dict(urllib.parse.parse_qsl(rest))
            else:
                return found
        raise RestError(0, "", f"{path}: more than {_PAGES} pages; what comes after {len(found)} entries was not seen")

    def _ask(self, path: str, query: dict[str, str], body: dict[str, Any] | None) -> Any:
        try:
            answer = requests.request(
                "GET" if body is None else "POST",
                f"{self.root}{path}",
                params=query,
                json=body,
                headers={"Accept": "application/json", **dict(self.headers)},
                auth=_Bearer(self.token),
                timeout=_SECONDS,
                allow_redirects=False,  # a token follows a redirect wherever it leads
            )
            if answer.status_code // 100 == 2:
                return answer.json() if answer.content else {}
        except (OSError, ValueError) as problem:  # errors of requests are both
            raise RestError(0, "", f"{urllib.parse.urlsplit(self.root).netloc}: {_cause(problem)}") from None
        raise _refusal(answer)


def _cause(problem: Exception) -> object:
    """What has happened, without the layers of libraries around it."""
    inner = problem.args[0] if problem.args else problem
    return getattr(inner, "reason", inner)


def _refusal(answer: requests.Response) -> RestError:
    """Google: {"error": {"message", "status", "errors": [{"reason"}]}}; Azure: {"error": {"code", "message"}}."""
    try:
        said = answer.json().get("error", {})
        said = said if isinstance(said, dict) else {"message": str(said)}
    except (OSError, ValueError, AttributeError):
        said = {}
    details = [d.get("reason") for d in said.get("details") or () if isinstance(d, dict) and d.get("reason")]
    errors = [e.get("reason") for e in said.get("errors") or () if isinstance(e, dict) and e.get("reason")]
    words = [said.get("status"), *details, *errors, said.get("code")]
    reason = " ".join(str(word) for word in words if word)
    return RestError(answer.status_code, reason, str(said.get("message") or answer.reason))
