"""JSON over HTTP for the clouds whose libraries are not installed: one try, time-outs of seconds, no redirect."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any

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


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    # A token follows a redirect wherever it leads.
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


@dataclass(frozen=True)
class Rest:
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
        return self._ask(path, query, json.dumps(body).encode())

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

    def _ask(self, path: str, query: dict[str, str], body: bytes | None) -> Any:
        url = f"{self.root}{path}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        headers = {"Authorization": f"Bearer {self.token}", "Accept": "application/json", **dict(self.headers)}
        if body is not None:
            headers["Content-Type"] = "application/json"
        request = urllib.request.Request(url, body, headers)
        try:
            with urllib.request.build_opener(_NoRedirect).open(request, timeout=_SECONDS) as answer:
                return json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as problem:
            raise _refusal(problem) from None
        except (OSError, http.client.HTTPException, ValueError) as problem:
            host = urllib.parse.urlsplit(self.root).netloc
            raise RestError(0, "", f"{host}: {getattr(problem, 'reason', problem)}") from None


def _refusal(problem: urllib.error.HTTPError) -> RestError:
    """Google: {"error": {"message", "status", "errors": [{"reason"}]}}; Azure: {"error": {"code", "message"}}."""
    try:
        said = json.loads(problem.read()).get("error", {})
        said = said if isinstance(said, dict) else {"message": str(said)}
    except (OSError, ValueError, AttributeError):
        said = {}
    details = [d.get("reason") for d in said.get("details") or () if isinstance(d, dict) and d.get("reason")]
    errors = [e.get("reason") for e in said.get("errors") or () if isinstance(e, dict) and e.get("reason")]
    words = [said.get("status"), *details, *errors, said.get("code")]
    reason = " ".join(str(word) for word in words if word)
    return RestError(problem.code, reason, str(said.get("message") or problem.reason))
