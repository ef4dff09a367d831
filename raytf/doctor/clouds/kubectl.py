"""A read-only client of a Kubernetes API server. It calls kubectl, which has the credentials."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from raytf.doctor.document import Document
from raytf.errors import one_line

_SECONDS = 8


class KubeError(Exception):
    """An error that kubectl reported. `reason` is the server's, such as NotFound, or empty if no server answered."""

    def __init__(self, message: str, reason: str = ""):
        super().__init__(message)
        self.reason = reason


def segment(name: object) -> str:
    """Return a name from a manifest as one segment of an API path, with all special characters quoted."""
    return quote(str(name), safe="").replace(".", "%2E") if str(name) in (".", "..") else quote(str(name), safe="")


def plural(kind: str) -> str:
    """Return the API's plural name of a kind: rayclusters for RayCluster."""
    return f"{kind.lower()}s"


def namespace_of(document: Document, default: str) -> str:
    """Return the namespace of a manifest's object."""
    namespace = document.get("metadata", "namespace")
    return namespace if isinstance(namespace, str) and namespace else default


@dataclass(frozen=True)
class Kubectl:
    """An API server, through kubectl.

    Attributes:
        tool: the path of kubectl.
        environ: the shell's environment, with KUBECONFIG and the variables of credential plugins.
    """

    tool: str
    environ: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def installed(cls, environ: Mapping[str, str]) -> Kubectl | None:
        tool = shutil.which("kubectl", path=environ.get("PATH"))
        return cls(tool, environ) if tool else None

    def context(self) -> str:
        """Return the name of the context that kubectl uses, or an empty string if there is none."""
        try:
            return self._run(["config", "current-context"]).strip()
        except KubeError:
            return ""

    def namespace(self) -> str:
        try:
            namespace = self._run(["config", "view", "--minify", "--output", "jsonpath={..namespace}"])
        except KubeError:
            return "default"
        return namespace.strip() or "default"

    def get(self, path: str) -> Any:
        """Return the JSON at a path of the API, such as /api/v1/nodes.

        Raises:
            KubeError: the server refuses, or there is none.
        """
        try:
            return json.loads(self._run(["get", f"--raw={path}"]))
        except (ValueError, RecursionError):
            raise KubeError(f"the API server's answer for {path} is not JSON") from None

    def find(self, path: str) -> Any:
        """Return the JSON at a path of the API, or None if it does not exist. Raises like `get`."""
        try:
            return self.get(path)
        except KubeError as problem:
            if problem.reason != "NotFound":
                raise
            return None

    def has(self, kind: str, name: object, namespace: str, api: str = "/api/v1") -> bool:
        """Return whether an object of a kind exists. Raises like `get`."""
        return self.find(f"{api}/namespaces/{segment(namespace)}/{plural(kind)}/{segment(name)}") is not None

    def may(self, verb: str, resource: str, namespace: str) -> bool:
        done = self._call(["auth", "can-i", f"--namespace={namespace}", "--", verb, resource])
        # With the answer `no`, kubectl exits with 1.
        return done.stdout.strip() != "no" and _output(done).strip().startswith("yes")

    def _run(self, arguments: list[str]) -> str:
        return _output(self._call(arguments))

    def _call(self, arguments: list[str]) -> subprocess.CompletedProcess[str]:
        limit = [] if arguments[0] == "config" else [f"--request-timeout={_SECONDS}s"]
        command = [self.tool, *limit, *arguments]
        try:
            return subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=2 * _SECONDS,
                check=False,
                stdin=subprocess.DEVNULL,
                env=dict(self.environ),
            )
        except (OSError, subprocess.TimeoutExpired):
            raise KubeError(f"kubectl {arguments[0]} did not answer within {2 * _SECONDS} s") from None


def _output(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode == 0:
        return done.stdout
    text = done.stderr.strip()
    if "You must be logged in to the server" in text:
        raise KubeError(one_line(text, 240), "Unauthorized")
    _, mark, rest = text.partition("Error from server (")
    raise KubeError(one_line(text, 240), rest.partition(")")[0] if mark else "")
