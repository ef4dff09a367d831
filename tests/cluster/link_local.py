"""The address of the clouds' metadata services, in a host: passes requests on to the service of that host's machine.

    python -m tests.cluster.link_local http://10.0.0.1:8000/i-0123

It runs as root in the host, which has 169.254.169.254 on its loopback.
"""

from __future__ import annotations

import http.client
import sys
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ADDRESS = "169.254.169.254"


def main() -> None:
    """Serve until it is killed."""
    service = urllib.parse.urlsplit(sys.argv[1])

    class Handler(BaseHTTPRequestHandler):
        def _pass_on(self) -> None:
            connection = http.client.HTTPConnection(service.netloc, timeout=30)
            headers = {key: value for key, value in self.headers.items() if key.lower() != "host"}
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            connection.request(self.command, service.path + self.path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
            connection.close()
            self.send_response_only(answer.status)
            for key, value in answer.getheaders():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_DELETE = _pass_on

    ThreadingHTTPServer((ADDRESS, 80), Handler).serve_forever()


if __name__ == "__main__":
    main()
