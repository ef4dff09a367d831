"""Whether a node's raylet lives: what answers does, and not what the system answers for."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from ray.core.generated.common_pb2 import ActorDeathCause, ActorDiedErrorContext
from ray.exceptions import RayActorError

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


@pytest.mark.parametrize(
    ("reason", "with_node"),
    [
        (ActorDiedErrorContext.NODE_DIED, True),
        (ActorDiedErrorContext.WORKER_DIED, False),
        (ActorDiedErrorContext.RAY_KILL, False),
    ],
)
def test_what_ray_knows_of_a_death_and_its_error_does_not_say(reason, with_node):
    cause = ActorDeathCause(actor_died_error_context=ActorDiedErrorContext(reason=reason))
    table = {"0a": {"DeathCause": cause}}
    assert _ray.died_with_node(RayActorError("0a"), lambda actor: table[actor]) is with_node
    assert not _ray.died_with_node(RayActorError("0b"), lambda actor: {})
    assert not _ray.died_with_node(RayActorError(), lambda actor: table[actor])
