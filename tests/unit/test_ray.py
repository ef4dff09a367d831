"""Whether a node's raylet lives: what answers does, and not what the system answers for."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import grpc

from raytf import _ray
from raytf._ray import Answer


def node(name: str, port: int) -> dict:
    return {"NodeID": name, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}


def test_who_answers_lives_who_says_nothing_is_silent_and_where_nobody_listens_one_is_refused():
    server = grpc.server(ThreadPoolExecutor(1))  # it knows no method, and says so
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with socket.socket() as frozen, socket.socket() as closed:
        frozen.bind(("127.0.0.1", 0))
        frozen.listen()  # the system takes connections, and nobody reads
        closed.bind(("127.0.0.1", 0))
        asked = [node("lives", port), node("frozen", frozen.getsockname()[1]), node("closed", closed.getsockname()[1])]
        found = _ray.ask(asked)
    server.stop(None).wait()
    assert found == {"lives": Answer.LIVES, "frozen": Answer.SILENT, "closed": Answer.REFUSES}
