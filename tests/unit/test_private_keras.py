"""What raytf takes of Keras's insides is there."""

from __future__ import annotations

import ast

import pytest

from raytf import _keras
from tests.support import private_names

ROOMS = {path.name: path for path in sorted((private_names.PACKAGE / "_keras").glob("*.py"))}
SEEN = private_names.listed(_keras.SEEN)


@pytest.mark.parametrize("path", sorted(SEEN))
def test_what_is_taken_is_there(path: str):
    private_names.find(path)


def test_the_version_in_which_it_was_seen_may_be_installed():
    assert _keras.VERSION.startswith("3.15.")


@pytest.mark.parametrize("file", ROOMS)
def test_all_that_a_room_takes_is_there(file: str):
    tree = ast.parse(ROOMS[file].read_text())
    assert private_names.missing(tree, SEEN) == []
    assert private_names.foreign(tree) - {path.rpartition(".")[2] for path in SEEN} == set()
