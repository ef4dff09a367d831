"""What raytf takes of Ray's insides is there, and taken in one place; and whether a node lives that answers."""

from __future__ import annotations

import ast
import re
import socket
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from ray.core.generated.common_pb2 import ActorDeathCause, ActorDiedErrorContext
from ray.exceptions import RayActorError

from raytf import _ray
from raytf._ray import raylets, state
from raytf._ray.raylets import NodeReply
from tests.support import private_names


def node(name: str, port: int) -> dict:
    return {"NodeID": name, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}


def test_a_raylet_is_alive_silent_or_refusing_as_its_port_answers():
    server = grpc.server(ThreadPoolExecutor(1))  # it knows no method, and says so
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with socket.socket() as frozen, socket.socket() as closed:
        frozen.bind(("127.0.0.1", 0))
        frozen.listen()  # the system takes connections, and nobody reads
        closed.bind(("127.0.0.1", 0))
        asked = [node("lives", port), node("frozen", frozen.getsockname()[1]), node("closed", closed.getsockname()[1])]
        found = raylets.ask(asked)
    server.stop(None).wait()
    assert found == {"lives": NodeReply.LIVES, "frozen": NodeReply.SILENT, "closed": NodeReply.REFUSES}


@pytest.mark.parametrize(
    ("reason", "with_node"),
    [
        (ActorDiedErrorContext.NODE_DIED, True),
        (ActorDiedErrorContext.WORKER_DIED, False),
        (ActorDiedErrorContext.RAY_KILL, False),
    ],
)
def test_what_ray_knows_of_a_death_and_its_error_does_not_say(reason: int, with_node: bool):
    cause = ActorDeathCause(actor_died_error_context=ActorDiedErrorContext(reason=reason))
    table = {"0a": {"DeathCause": cause}}
    assert state.died_with_node(RayActorError("0a"), lambda actor: table[actor]) is with_node
    assert not state.died_with_node(RayActorError("0b"), lambda actor: {})
    assert not state.died_with_node(RayActorError(), lambda actor: table[actor])


ROOMS = {path.stem: path for path in sorted((private_names.PACKAGE / "_ray").glob("*.py"))}
SEEN = private_names.listed(_ray.SEEN)


@pytest.mark.parametrize("path", sorted(SEEN))
def test_what_is_taken_of_ray_is_there(path: str):
    private_names.find(path)


def test_the_version_in_which_it_was_seen_may_be_installed():
    assert re.fullmatch(r"2\.60\.\d+", _ray.VERSION)


@pytest.mark.parametrize("name", ROOMS)
def test_all_that_a_room_takes_is_there(name: str):
    assert private_names.missing(ast.parse(ROOMS[name].read_text()), SEEN) == []


def test_what_does_not_exist_is_not_found():
    for path in ("ray._private.nowhere", "ray._private.node.Node.no_such_thing", "no_such_library.at_all"):
        with pytest.raises(LookupError):
            private_names.find(path)


def test_no_other_module_takes_anything_private():
    rooms = ("_ray/", "_keras/", "_tensorflow/")
    found = {
        name: sorted(private_names.taken(tree) | private_names.foreign(tree))
        for name, tree in private_names.modules()
        if not name.startswith(rooms)
    }
    assert {name: taken for name, taken in found.items() if taken} == {}


def test_rooms_know_nothing_of_raytf():
    for name, tree in private_names.modules():
        if name.startswith(("_ray/", "_keras/", "_tensorflow/")):
            imports = [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
            imports += [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
            own = f"raytf.{name.partition('/')[0]}"
            assert [one for one in imports if one.startswith("raytf") and one != own] == [], name
