"""An HTTP server on the loopback that answers as a cloud's control plane does: recorded shapes, changed by tests.

The shapes are those of Google's discovery documents, of Azure's REST reference and of Kubernetes' OpenAPI; no cloud was
asked. Where google-api-python-client is installed, a test compares the fields of Google's answers with its documents.
"""

from __future__ import annotations

import json
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Recorded:
    """Answers by path.

    Attributes:
        routes: path (without its query) -> JSON; a status and JSON; or a function of the query and the body.
        asked: what was asked for: method, path and query, authorization, body.
        denied: beginnings of paths that are refused with 403.
    """

    def __init__(self, routes: dict[str, Any], refusal: Any = None, missing: Any = None):
        self.routes, self.asked, self.denied = routes, list[tuple[str, str, str, Any]](), set[str]()
        self._refusal, self._missing = refusal, missing
        recorded = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def _any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                token = self.headers.get("Authorization", "")
                is_json = "json" in self.headers.get("Content-Type", "")
                asked = json.loads(body) if body and is_json else body or None
                status, answer = recorded.answer(self.command, self.path, token, asked)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = _any

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method: str, target: str, token: str, body: Any) -> tuple[int, Any]:
        path, _, query = target.partition("?")
        path = urllib.parse.unquote(path)
        self.asked.append((method, target, token, body))
        if any(path.startswith(start) for start in self.denied):
            return 403, self._refusal
        if path not in self.routes:
            return 404, self._missing
        found = self.routes[path]
        if callable(found):
            found = found(urllib.parse.parse_qs(query), body)
        return found if isinstance(found, tuple) else (200, found)
