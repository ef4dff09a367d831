"""AWS for the tests of `raytf check`: moto's server, and before it what moto lacks.

moto (5.2) has no policy simulation, no quotas of EC2, and refuses nobody. A small server in front answers these in the
shapes of AWS's API reference, and hands everything else to moto:

- SimulatePrincipalPolicy evaluates the policies that the role has in moto, with the conditions that cluster-configs/iam
  uses; IAM itself knows more.
- GetServiceQuota answers from a table, and so does GetParameter for AWS's own parameters, which nobody may write.
- an operation of `denied` is refused as IAM refuses it.
"""

from __future__ import annotations

import fnmatch
import http.client
import json
import logging
import re
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from xml.sax.saxutils import escape

import boto3
from moto.server import ThreadedMotoServer

REGION = "us-west-2"
#: What an account has that asked for some GPUs: L-... -> vCPUs.
QUOTAS = {"L-1216C47A": 64.0, "L-DB2E81BA": 64.0, "L-3819A6DF": 64.0, "L-34B43A08": 64.0}
SSM_IMAGE = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
HEAD_SSM_IMAGE = "/aws/service/canonical/ubuntu/server/22.04/stable/current/amd64/hvm/ebs-gp2/ami-id"


def reset(server: tuple[str, int]) -> None:
    """Empty moto's account, which all of its servers in one process share."""
    connection = http.client.HTTPConnection(*server, timeout=60)
    connection.request("POST", "/moto-api/reset")
    assert connection.getresponse().status == 200
    connection.close()


class Front:
    """The server; `quotas` and `denied` may be changed between calls."""

    def __init__(self) -> None:
        self.quotas, self.denied, self.calls = dict(QUOTAS), set[str](), list[str]()
        self.parameters: dict[str, str] = {}
        self._clients: dict[str, Any] = {}
        self._moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
        self._moto.start()
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.behind = self._moto.get_host_and_port()
        reset(self.behind)
        front = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def _any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, headers, data = front.answer(self.command, self.path, dict(self.headers), body)
                self.send_response(status)
                for key, value in headers.items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = _any

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        reset(self.behind)
        self._server.shutdown()
        self._server.server_close()
        self._moto.stop()

    def client(self, name: str) -> Any:
        """A client of moto itself, past what is denied."""
        if name not in self._clients:
            host, port = self.behind
            self._clients[name] = boto3.client(name, region_name=REGION, endpoint_url=f"http://{host}:{port}")
        return self._clients[name]

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        lower = {k.lower(): v for k, v in headers.items()}
        form = dict(urllib.parse.parse_qsl(body.decode(errors="replace"))) if method == "POST" else {}
        operation = form.get("Action") or lower.get("x-amz-target", "").rpartition(".")[2]
        operation = operation or path.rpartition("/operation/")[2].strip("/")
        if operation:
            self.calls.append(operation)
        if operation in self.denied:
            return self._refuse(operation, form)
        if operation == "SimulatePrincipalPolicy":
            return 200, {"Content-Type": "text/xml"}, self._simulate(form).encode()
        if operation in ("GetServiceQuota", "GetAWSDefaultServiceQuota"):
            return self._quota(json.loads(body)["QuotaCode"])
        if operation == "GetParameter" and json.loads(body)["Name"] in self.parameters:
            name = json.loads(body)["Name"]
            found = {"Name": name, "Type": "String", "Value": self.parameters[name], "Version": 1}
            kind = {"Content-Type": "application/x-amz-json-1.1"}
            return 200, kind, json.dumps({"Parameter": {**found, "DataType": "aws:ec2:image"}}).encode()
        return self._pass_on(method, path, headers, body)

    def _refuse(self, operation: str, form: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        said = f"User: arn:aws:iam::123456789012:user/me is not authorized to perform: {operation}"
        if not form:
            return (
                400,
                {"Content-Type": "application/x-amz-json-1.1", "x-amzn-errortype": "AccessDeniedException"},
                (json.dumps({"__type": "AccessDeniedException", "Message": said}).encode()),
            )
        if form.get("Version") == "2016-11-15":  # EC2 has a shape of its own
            code = "UnauthorizedOperation"
            inner = f"<Errors><Error><Code>{code}</Code><Message>{said}</Message></Error></Errors>"
            return 403, {"Content-Type": "text/xml"}, f"<Response>{inner}<RequestID>r</RequestID></Response>".encode()
        inner = f"<Error><Type>Sender</Type><Code>AccessDenied</Code><Message>{said}</Message></Error>"
        text = f"<ErrorResponse>{inner}<RequestId>r</RequestId></ErrorResponse>"
        return 403, {"Content-Type": "text/xml"}, text.encode()

    def _quota(self, code: str) -> tuple[int, dict[str, str], bytes]:
        kind = {"Content-Type": "application/x-amz-json-1.1"}
        if code not in self.quotas:
            return 400, kind, json.dumps({"__type": "NoSuchResourceException", "Message": "no such quota"}).encode()
        quota = {
            "ServiceCode": "ec2",
            "ServiceName": "Amazon Elastic Compute Cloud (Amazon EC2)",
            "QuotaArn": f"arn:aws:servicequotas:{REGION}:123456789012:ec2/{code}",
            "QuotaCode": code,
            "Value": self.quotas[code],
            "Unit": "None",
            "Adjustable": True,
            "GlobalQuota": False,
        }
        return 200, kind, json.dumps({"Quota": quota}).encode()

    def _pass_on(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Any:
        connection = http.client.HTTPConnection(*self.behind, timeout=60)
        try:
            # moto tells services apart by the signature's scope, and buckets by the path.
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            drop = ("content-length", "transfer-encoding", "connection", "date", "server")
            return answer.status, {k: v for k, v in answer.getheaders() if k.lower() not in drop}, answer.read()
        finally:
            connection.close()

    def _simulate(self, form: dict[str, str]) -> str:
        listed = {
            key: [v for k, v in sorted(form.items(), key=lambda kv: _order(kv[0])) if k.startswith(f"{key}.member.")]
            for key in ("ActionNames", "ResourceArns")
        }
        context: dict[str, str] = {}
        for key, value in form.items():
            found = re.fullmatch(r"ContextEntries\.member\.(\d+)\.ContextKeyName", key)
            if found:
                context[value] = form[f"ContextEntries.member.{found[1]}.ContextKeyValues.member.1"]
        statements = self._statements(form["PolicySourceArn"])
        rows = "".join(
            f"<member><EvalActionName>{action}</EvalActionName><EvalResourceName>{escape(arn)}</EvalResourceName>"
            f"<EvalDecision>{'allowed' if _allows(statements, action, arn, context) else 'implicitDeny'}</EvalDecision>"
            "<MatchedStatements/><MissingContextValues/></member>"
            for action in listed["ActionNames"]
            for arn in listed["ResourceArns"]
        )
        return (
            '<SimulatePrincipalPolicyResponse xmlns="https://iam.amazonaws.com/doc/2010-05-08/">'
            f"<SimulatePrincipalPolicyResult><IsTruncated>false</IsTruncated><EvaluationResults>{rows}"
            "</EvaluationResults></SimulatePrincipalPolicyResult><ResponseMetadata><RequestId>r</RequestId>"
            "</ResponseMetadata></SimulatePrincipalPolicyResponse>"
        )

    def _statements(self, arn: str) -> list[dict[str, Any]]:
        iam, name = self.client("iam"), arn.rpartition("/")[2]
        if ":user/" in arn:
            names = iam.list_user_policies(UserName=name)["PolicyNames"]
            texts = [iam.get_user_policy(UserName=name, PolicyName=p)["PolicyDocument"] for p in names]
        else:
            names = iam.list_role_policies(RoleName=name)["PolicyNames"]
            texts = [iam.get_role_policy(RoleName=name, PolicyName=p)["PolicyDocument"] for p in names]
        return [statement for text in texts for statement in text["Statement"]]


def _order(key: str) -> int:
    return int(key.rpartition(".")[2]) if key.rpartition(".")[2].isdigit() else 0


def _allows(statements: list[dict[str, Any]], action: str, arn: str, context: dict[str, str]) -> bool:
    return any(
        s["Effect"] == "Allow"
        and _hits(s["Action"], action)
        and _hits(s["Resource"], arn)
        and all(
            key in context and _hits(wanted, context[key], exact=kind == "StringEquals")
            for kind, keys in s.get("Condition", {}).items()
            for key, wanted in keys.items()
        )
        for s in statements
    )


def _hits(patterns: str | list[str], value: str, exact: bool = False) -> bool:
    every = [patterns] if isinstance(patterns, str) else patterns
    return any(p == value if exact else fnmatch.fnmatchcase(value, p) for p in every)
