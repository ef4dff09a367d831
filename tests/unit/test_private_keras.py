"""What raytf takes of Keras's insides is there."""

from __future__ import annotations

import ast

import pytest

from raytf import _keras
from raytf._keras import compiled_parts, live_objects, own_steps, updates
from tests.support import private_names

ROOMS = {
    "__init__.py": _keras.SEEN,
    "compiled_parts.py": compiled_parts.SEEN,
    "live_objects.py": live_objects.SEEN,
    "own_steps.py": own_steps.SEEN,
    "updates.py": updates.SEEN,
}
SEEN = {path: version for seen in ROOMS.values() for path, version in seen.items()}


@pytest.mark.parametrize("path", sorted(SEEN))
def test_what_is_taken_is_there(path: str):
    private_names.find(path)


def test_the_versions_in_which_it_was_seen_are_those_that_may_be_installed():
    assert all(version.startswith("3.15.") for version in SEEN.values())


@pytest.mark.parametrize("file", ROOMS)
def test_the_room_says_of_all_that_it_takes_where_it_was_seen(file: str):
    tree = ast.parse((private_names.PACKAGE / "_keras" / file).read_text())
    for path in private_names.taken(tree):
        assert [one for one in ROOMS[file] if one == path or one.startswith(f"{path}.")], path
    last = {path.rpartition(".")[2] for path in ROOMS[file]}
    assert private_names.foreign(tree) - last == set()
