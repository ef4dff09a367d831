"""The hosts of a cloud on the loopback: an HTTPS proxy that answers for them itself.

Ray's code and the clouds' own client libraries run as they are. Only their environment sends them here:
`https_proxy`, and a certificate that they are told to trust. What is addressed to any other host is refused: nothing
leaves the machine.
"""

from __future__ import annotations

import datetime
import http.server
import ipaddress
import json
import ssl
import threading
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Request:
    """What a client asked for; `body` is what its JSON or its form says."""

    method: str
    host: str
    path: str
    query: Mapping[str, str]
    body: Any

    def __str__(self) -> str:
        return f"{self.method} https://{self.host}{self.path}"


@dataclass(frozen=True)
class Answer:
    """What it is told, as JSON."""

    body: Any
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


Service = Callable[[Request], Answer]


class Loopback:
    """Such a proxy; a context manager.

    Attributes:
        environ: what sends a client here.
        certificate: the file that a client must trust; `environ` names it too.
        faults: exceptions of the services, which a client saw as an answer 500.
    """

    def __init__(self, services: Mapping[str, Service], folder: Path) -> None:
        self.certificate, key = _certificate(list(services), folder)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, key)
        self.faults: list[Exception] = []
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(services, context, self.faults))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        address = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.environ = {
            **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), address),
            **dict.fromkeys(("no_proxy", "NO_PROXY"), ""),
            **dict.fromkeys(("HTTPLIB2_CA_CERTS", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"), str(self.certificate)),
        }

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(
    services: Mapping[str, Service], context: ssl.SSLContext, faults: list[Exception]
) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 60
        host = ""

        def do_CONNECT(self) -> None:
            self.host = self.path.rsplit(":", 1)[0]
            if self.host not in services:
                self.send_error(403, f"{self.host} is not on this loopback")
                return
            self.send_response(200)
            self.end_headers()
            try:
                self.connection = context.wrap_socket(self.connection, server_side=True)
            except OSError:  # the client does not trust it, and says so itself
                self.close_connection = True
                return
            self.rfile = self.connection.makefile("rb")
            self.wfile = self.connection.makefile("wb", buffering=0)
            self.close_connection = False

        def answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            raw = self.rfile.read(length)
            if not self.host:
                self.send_error(404, "no plain HTTP is answered here")
                return
            url = urllib.parse.urlsplit(self.path)
            query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
            try:
                body = _read(raw, self.headers.get("Content-Type") or "")
                request = Request(self.command, self.host, urllib.parse.unquote(url.path), query, body)
                answer = services[self.host](request)
            except Exception as fault:
                faults.append(fault)
                answer = Answer({"error": {"code": 500, "message": repr(fault)}}, 500)
            text = b"" if answer.status == 204 else json.dumps(answer.body).encode()
            self.send_response(answer.status)
            for name, value in {"Content-Type": "application/json", **answer.headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_PUT = do_POST = do_PATCH = do_DELETE = do_HEAD = answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


def _read(raw: bytes, kind: str) -> Any:
    if not raw:
        return None
    if "x-www-form-urlencoded" in kind:
        return dict(urllib.parse.parse_qsl(raw.decode()))
    return json.loads(raw)


def _certificate(hosts: list[str], folder: Path) -> tuple[Path, Path]:
    """A certificate for the hosts that vouches for itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "raytf's tests")])
    now = datetime.datetime.now(datetime.UTC)
    names: list[x509.GeneralName] = [x509.DNSName(host) for host in hosts]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([*names, x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    files = folder / "cloud.pem", folder / "cloud.key"
    files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return files
