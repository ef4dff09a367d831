"""REST clients of Google Cloud and Azure. They send each request once, and wait for its answer for a few seconds.

Neither cloud's library is needed, only a token from `gcloud`, from application credentials, or from `az`.
"""

from __future__ import annotations

import json
import shutil
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
from requests.auth import AuthBase

from raytf.doctor.document import Document
from raytf.doctor.local_environment import tool_output

_SECONDS = 8.0
#: The maximum number of pages to read of a list.
_PAGES = 20
_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
#: API -> its URL, unless gcloud's own variables CLOUDSDK_API_ENDPOINT_OVERRIDES_... set another.
_GOOGLE = {
    "compute": "https://compute.googleapis.com/compute/v1",
    "cloudresourcemanager": "https://cloudresourcemanager.googleapis.com/v1",
    "iam": "https://iam.googleapis.com/v1",
    "serviceusage": "https://serviceusage.googleapis.com/v1",
    "storage": "https://storage.googleapis.com/storage/v1",
    "tpu": "https://tpu.googleapis.com/v2",
}


class RestError(Exception):
    """An error that an API returned, or the lack of an answer.

    Attributes:
        status: the HTTP status, or 0 if there was no complete answer.
        reason: the API's own name of the error, such as PERMISSION_DENIED or AuthorizationFailed.
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
    """Adds a token to a request. A plain header would be replaced if a `.netrc` has an entry for the host."""

    token: str

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self.token}"
        return request


@dataclass(frozen=True)
class RestClient:
    """A client of an API.

    Attributes:
        root: the start of all URLs, such as https://compute.googleapis.com/compute/v1.
        token: an OAuth token.
        headers: additional headers.
    """

    root: str
    token: str
    headers: tuple[tuple[str, str], ...] = ()

    def get(self, path: str, **query: str) -> Any:
        """Return the JSON at a path.

        Raises:
            RestError: the status is not 2xx, or there is no answer.
        """
        return self._ask(path, query, None)

    def find(self, path: str, **query: str) -> Any:
        """Return the JSON at a path, or None for a 404. Raise the same errors as `get` otherwise."""
        try:
            return self.get(path, **query)
        except RestError as problem:
            if not problem.is_missing:
                raise
            return None

    def post(self, path: str, body: dict[str, Any], **query: str) -> Any:
        """Return the answer to a query that needs a body. It is never used to change anything."""
        return self._ask(path, query, body)

    def pages(self, path: str, items: str, **query: str) -> list[Any]:
        """Return all entries of a paged list of Google or Azure.

        Raises:
            RestError: as in `get`, or there are too many pages.
        """
        entries: list[Any] = []
        for _ in range(_PAGES):
            answer = self.get(path, **query)
            entries += answer.get(items) or []
            following = answer.get("nextPageToken")
            link = str(answer.get("nextLink") or "")
            if following:
                query = {**query, "pageToken": following}
            elif link.startswith(self.root):  # the token must not be sent to another host
                path, _, rest = link.removeprefix(self.root).partition("?")
                query = dict(urllib.parse.parse_qsl(rest))
            else:
                return entries
        raise RestError(0, "", f"{path}: more than {_PAGES} pages; only {len(entries)} entries were read")

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
                allow_redirects=False,  # a redirect could send the token to another host
            )
            if answer.status_code // 100 == 2:
                return answer.json() if answer.content else {}
        except (OSError, ValueError) as problem:  # the errors of requests
            raise RestError(0, "", f"{urllib.parse.urlsplit(self.root).netloc}: {_cause(problem)}") from None
        raise _refusal(answer)


def _cause(problem: Exception) -> object:
    """Return the cause of an error, without the layers of libraries around it."""
    inner = problem.args[0] if problem.args else problem
    return getattr(inner, "reason", inner)


def _refusal(answer: requests.Response) -> RestError:
    """Return the error in an answer. Google: {"error": {"message", "status", "errors": [{"reason"}]}}; Azure: {"error":
    {"code", "message"}}."""
    try:
        body = answer.json().get("error", {})
        body = body if isinstance(body, dict) else {"message": str(body)}
    except (OSError, ValueError, AttributeError):
        body = {}
    parts = [part for key in ("details", "errors") for part in body.get(key) or () if isinstance(part, dict)]
    words = [body.get("status"), *(part.get("reason") for part in parts), body.get("code")]
    reason = " ".join(str(word) for word in words if word)
    return RestError(answer.status_code, reason, str(body.get("message") or answer.reason))


class NoCredentials(Exception):
    """There are no credentials. The message is advice on how to get some."""


@dataclass(frozen=True)
class GoogleAccount:
    """A project of Google Cloud.

    Attributes:
        source: where the token comes from.
        environ: the environment, which may override endpoints.
        payer: the project whose API quota is used; empty for the token's own.
    """

    project: str
    token: str
    source: str
    environ: Mapping[str, str] = field(default_factory=dict)
    payer: str = ""

    def api(self, name: str) -> RestClient:
        root = self.environ.get(f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{name.upper()}", "").rstrip("/")
        # A user's application credentials name the project whose API quota they use.
        payer = (("x-goog-user-project", self.payer),) if self.payer else ()
        return RestClient(root or _GOOGLE[name], self.token, payer)


@dataclass(frozen=True)
class AzureAccount:
    """A subscription, with a client of Azure Resource Manager, whose paths start with /subscriptions."""

    subscription: str
    arm: RestClient

    def path(self, rest: str = "") -> str:
        """Return a path below the subscription."""
        return f"/subscriptions/{self.subscription}{rest}"

    def get(self, rest: str, version: str, **query: str) -> Any:
        """Return the JSON at a path below the subscription, from a version of its API."""
        return self.arm.get(self.path(rest), **{"api-version": version}, **query)

    def find(self, rest: str, version: str) -> Any:
        """Return the JSON at a path below the subscription, or None if it does not exist."""
        return self.arm.find(self.path(rest), **{"api-version": version})

    def pages(self, rest: str, version: str, **query: str) -> list[Any]:
        """Return all entries of a list below the subscription."""
        return self.arm.pages(self.path(rest), "value", **{"api-version": version}, **query)


def google_account(document: Document, environ: Mapping[str, str]) -> GoogleAccount:
    """Return the project of a cluster, with a token.

    Raises:
        NoCredentials: there is no valid token.
        RestError: the token server does not answer.
    """
    project = str(document.get("provider", "project_id", default=""))
    credentials = document.get("provider", "gcp_credentials")
    if isinstance(credentials, dict) and credentials.get("type") == "credentials_token":
        return GoogleAccount(project, str(credentials.get("credentials")), "provider.gcp_credentials", environ)
    token = environ.get("CLOUDSDK_AUTH_ACCESS_TOKEN")
    if token:
        return GoogleAccount(project, token, "CLOUDSDK_AUTH_ACCESS_TOKEN", environ)
    home = Path(environ.get("HOME", "~")).expanduser()
    config = Path(environ.get("CLOUDSDK_CONFIG", home / ".config" / "gcloud"))
    file = Path(environ.get("GOOGLE_APPLICATION_CREDENTIALS") or config / "application_default_credentials.json")
    if file.is_file():
        application = _application_token(file)
        if application:
            return GoogleAccount(project, application[0], str(file), environ, application[1])
    if shutil.which("gcloud", path=environ.get("PATH")):
        output = tool_output(["gcloud", "auth", "print-access-token", "--quiet"], environ)
        if output:
            return GoogleAccount(project, output, "gcloud", environ)
    raise NoCredentials(
        "Run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS to a service account's file"
    )


def _application_token(file: Path) -> tuple[str, str] | None:
    """Return a token and the project whose API quota it uses, or None without Google's library."""
    try:
        import google.auth
        import google.auth.transport.requests as transport
    except ImportError:
        return None  # gcloud may have a token
    try:
        credentials, _ = google.auth.load_credentials_from_file(str(file), scopes=[_SCOPE])
        credentials.refresh(transport.Request())
    except google.auth.exceptions.TransportError as problem:
        raise RestError(0, "", f"Google's token server: {problem}") from None
    # Google's library reads keys before it checks that the file contains a mapping.
    except (OSError, ValueError, TypeError, AttributeError, google.auth.exceptions.GoogleAuthError) as problem:
        raise NoCredentials(
            f"Renew {file}, which is refused ({type(problem).__name__}): `gcloud auth application-default login`"
        ) from None
    return str(credentials.token), str(getattr(credentials, "quota_project_id", None) or "")


def azure_account(document: Document, environ: Mapping[str, str]) -> AzureAccount:
    """Return the subscription of a cluster, with the token of `az`, the only one that Ray uses.

    Raises:
        NoCredentials: `az` is not installed, or has no token.
    """
    if not shutil.which("az", path=environ.get("PATH")):
        raise NoCredentials("Install the Azure CLI, which Ray needs too, and run `az login`")
    output = tool_output(["az", "account", "get-access-token", "--output", "json"], environ)
    try:
        token: Any = json.loads(output)
    except ValueError:
        token = None
    if not isinstance(token, dict) or not token.get("accessToken"):
        raise NoCredentials("Run `az login`")
    root = tool_output(["az", "cloud", "show", "--query", "endpoints.resourceManager", "--output", "tsv"], environ)
    subscription = document.get("provider", "subscription_id") or token.get("subscription", "")
    return AzureAccount(
        str(subscription), RestClient((root or "https://management.azure.com").rstrip("/"), token["accessToken"])
    )
