"""Whatever names a store lists: nothing is written outside the folder, and no file there is changed."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from raytf.errors import StorageError
from raytf.storage import local_files
from raytf.storage.local_files import StoredFile, is_plain
from raytf.storage.storage import Storage

PARTS = st.sampled_from(
    [
        "..",
        ".",
        "",
        "a",
        "b.txt",
        "link",
        "link-to-file",
        "hard",
        "\\",
        "..\\x",
        "C:",
        "c:x",
        "\0",
        "\n",
        "~",
        "é",
        "a b",
        "-rf",
    ]
)
NAMES = st.one_of(st.lists(PARTS, min_size=1, max_size=5).map("/".join), st.text(max_size=12))


class Hostile(Storage):
    """A folder that lists and holds what names somebody made up."""

    def __init__(self, names):
        super().__init__("/nowhere")
        self.names = names

    def files(self, name="", skipped=None):
        return [StoredFile(name, 7, 0.0) for name in sorted(self.names) if not name.endswith("/")]

    def get(self, name):
        return b"hostile"


def fetched(names, target: Path) -> str:
    """Copy what a store lists; why that was refused."""
    try:
        Hostile(names).get_tree("tree", str(target))
    except StorageError as error:
        return str(error)
    return ""


def everything(folder: Path) -> dict:
    """Each path with what it holds, links not followed."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
    return found


@settings(max_examples=150)
@given(st.sets(NAMES, min_size=1, max_size=4))
@example({"../outside/file"})
@example({"link/file"})
@example({"link-to-file"})
@example({"hard"})
@example({"a", "a/b"})
@example({"ok", "a/../../outside/new"})
def test_nothing_outside_a_folder_is_touched(names):
    with tempfile.TemporaryDirectory(prefix="raytf-names-") as base:
        outside, target = Path(base, "outside"), Path(base, "target")
        outside.mkdir()
        target.mkdir()
        (outside / "file").write_bytes(b"mine")
        (outside / "linked").write_bytes(b"mine too")
        (target / "link").symlink_to(outside)
        (target / "link-to-file").symlink_to(outside / "file")
        os.link(outside / "linked", target / "hard")
        before, inside = everything(outside), everything(target)
        root = set(os.listdir("/"))

        refused = fetched(names, target)

        files = [name for name in names if name[-1:] != "/"]
        if not refused:
            assert all(is_plain(name) and (target / name).read_bytes() == b"hostile" for name in files)
        elif not all(map(is_plain, files)):
            assert everything(target) == inside  # refused before the first one is written
        assert not {"\n", "\0", "\x1b"} & set(refused)
        assert everything(outside) == before
        assert set(os.listdir(base)) == {"outside", "target"}
        assert set(os.listdir("/")) == root
        given = [f"{name}/" for name in names]
        found = [name for name in everything(target) if not any(one.startswith(f"{name}/") for one in given)]
        assert not [name for name in found if ".tmp-" in name]


@given(NAMES)
def test_a_plain_name_stays_below_its_folder(name):
    if is_plain(name):
        assert os.path.normpath(f"/folder/{name}") == f"/folder/{name}"


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "/",
        "/etc/x",
        "../x",
        "a/../x",
        "a//b",
        "a/./b",
        "a/",
        "a\\b",
        "\\\\host\\x",
        "C:x",
        "c:/x",
        "a\0",
        "\x1b[2J",
    ],
)
def test_names_that_are_refused(name):
    assert not is_plain(name)


@pytest.mark.parametrize("name", ["a", "a/b.txt", "...", "..a", "a..", "ab:c", "weights-00:1", " ", "é/ü", "-x", "~"])
def test_names_that_are_plain(name):
    assert is_plain(name)


def test_a_file_in_the_place_of_a_folder_is_an_error(tmp_path):
    local_files.put_inside(str(tmp_path), "a", b"x")
    with pytest.raises(OSError, match="a"):
        local_files.put_inside(str(tmp_path), "a/b", b"x")
    assert (tmp_path / "a").read_bytes() == b"x"
