"""Damage is found: by sizes, and by every byte; what a resume restores is the newest whole checkpoint."""

import threading
import zlib

import pytest

from raytf.checkpoint import codec, manifest, naming, verify
from raytf.checkpoint.verify import Worth
from raytf.storage.storage import Storage
from tests.support.checkpoints import save, share


@pytest.fixture(params=["folder", "s3", "gcs"])
def run(request, tmp_path):
    if request.param == "folder":
        return Storage(str(tmp_path / "run"))
    return Storage(request.getfixturevalue("gcs") if request.param == "gcs" else request.getfixturevalue("s3")("run"))


@pytest.fixture
def folder(tmp_path):
    return Storage(str(tmp_path / "run"))


def states(findings):
    return [(f.step, f.state) for f in findings]


def flip(run, name, at=100):
    data = bytearray(run.get(name))
    data[at] ^= 1
    run.put(name, bytes(data))


def test_whole_ones_newest_first(run):
    for step in (9, 10, 2):
        save(run, step)
    found = verify.verify(run)
    assert states(found) == [(10, Worth.WHOLE), (9, Worth.WHOLE), (2, Worth.WHOLE)]
    assert verify.inspect(run) == found
    assert all(f.bytes == sum(x.bytes for x in run.files(f"{manifest.FOLDER}/{f.name}")) > 0 for f in found)
    assert verify.restorable(found).step == 10


def test_a_flipped_bit_is_seen_by_reading_alone(run):
    save(run, 1)
    flip(run, share(save(run, 2), 1))
    assert states(verify.inspect(run)) == [(2, Worth.WHOLE), (1, Worth.WHOLE)]
    found = verify.verify(run)
    assert states(found) == [(2, Worth.DAMAGED), (1, Worth.WHOLE)]
    assert found[0].problems == ("share-00001.safetensors has a wrong checksum",)
    assert verify.restorable(found).step == 1


def test_every_single_flip_in_a_share_is_found(folder):
    name = share(save(folder, 1, shares=1))
    for at in range(0, len(folder.get(name)), 97):
        flip(folder, name, at)
        assert states(verify.verify(folder)) == [(1, Worth.DAMAGED)]
        flip(folder, name, at)
    assert states(verify.verify(folder)) == [(1, Worth.WHOLE)]


def test_truncated_and_deleted_files_are_seen_by_size(run):
    cut, gone = save(run, 1), save(run, 2)
    run.put(share(cut), run.get(share(cut))[:-1])
    run.delete(share(gone, 1))
    for look in (verify.inspect, verify.verify):
        found = look(run)
        assert states(found) == [(2, Worth.DAMAGED), (1, Worth.DAMAGED)]
        assert found[0].problems == ("share-00001.safetensors is missing",)
        assert "has 2879 of 2880 bytes" in found[1].problems[0]
    assert verify.restorable(found) is None


def test_a_share_of_another_save_is_damage(folder):
    old, new = save(folder, 1), save(folder, 2)
    folder.put(share(new), folder.get(share(old)))  # of the same size
    assert states(verify.verify(folder)) == [(2, Worth.DAMAGED), (1, Worth.WHOLE)]


def test_a_manifest_of_another_save_is_damage(folder):
    old, new = save(folder, 1), save(folder, 2)
    path = f"{manifest.FOLDER}/{{}}/{manifest.FILE}"
    folder.put(path.format(new), folder.get(path.format(old)))
    found = verify.inspect(folder)
    assert states(found) == [(2, Worth.DAMAGED), (1, Worth.WHOLE)]
    assert "of step 1" in found[0].problems[0]


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"body": [], "crc32": 0}'])
def test_a_manifest_that_cannot_be_read(folder, data):
    name = save(folder, 1)
    folder.put(f"{manifest.FOLDER}/{name}/{manifest.FILE}", data)
    found = verify.verify(folder)
    assert states(found) == [(1, Worth.DAMAGED)]
    assert found[0].problems[0].startswith("the manifest")


def test_an_unfinished_one_is_no_damage(run):
    save(run, 1)
    save(run, 2, complete=False)
    found = verify.verify(run)
    assert states(found) == [(2, Worth.UNFINISHED), (1, Worth.WHOLE)]
    assert verify.restorable(found).step == 1


def test_other_folders_are_no_checkpoints(folder):
    save(folder, 1)
    folder.put(f"{manifest.FOLDER}/notes/{manifest.FILE}", b"x")
    folder.put(f"{manifest.FOLDER}/stray", b"x")
    assert states(verify.verify(folder)) == [(1, Worth.WHOLE)]


def test_a_newer_raytf_is_said_and_not_called_damage(folder):
    name = save(folder, 1)
    body = {"version": manifest.VERSION + 1}
    crc = zlib.crc32(manifest.dump(body))
    folder.put(f"{manifest.FOLDER}/{name}/{manifest.FILE}", manifest.dump({"body": body, "crc32": crc}))
    older = save(folder, 0)
    newer, whole = verify.verify(folder)
    assert (newer.state, whole.state, whole.name) == (Worth.NEWER, Worth.WHOLE, older)
    assert "Update raytf" in newer.problems[0]


def test_retention_at_the_same_time_is_no_damage(folder):
    """A live run deletes while others verify: what is deleted is left out, and nothing is called damaged."""
    for step in range(1, 40):
        save(folder, step)
    start = threading.Barrier(2)

    def retain():
        start.wait()
        for step in range(1, 39):
            name = f"{manifest.FOLDER}/{step:012d}-a-0000"
            folder.delete(f"{name}/{manifest.FILE}")
            folder.delete(name)

    thread = threading.Thread(target=retain)
    thread.start()
    start.wait()
    while thread.is_alive():
        assert Worth.DAMAGED not in [f.state for f in verify.verify(folder)]
    thread.join()
    assert states(verify.verify(folder)) == [(39, Worth.WHOLE)]


def test_shares_that_were_never_right_are_damage(folder):
    """Right checksums of bytes that hold no tensors, or other ones."""
    for step, data, problem in ((1, b"x" * 100, "not a safetensors file"), (2, codec.encode({}), "other tensors")):
        name = naming.name_of(step, "a")
        file = {
            "file": "share-00000.safetensors",
            "bytes": len(data),
            "crc32c": codec.checksum([data]),
            "names": ["kernel"],
        }
        folder.put(share(name), data)
        manifest.write(folder, name, step, [file], {})
        found = verify.verify(folder)[0]
        assert (found.step, found.state) == (step, Worth.DAMAGED)
        assert problem in found.problems[0]


def test_a_share_that_a_manifest_names_often_is_not_read_as_often(folder):
    name = save(folder, 1, shares=1)
    body = manifest.read(folder, name)
    manifest.write(folder, name, 1, body["shares"] * 5_000, body["document"])
    (found,) = verify.verify(folder)
    assert found.state is Worth.DAMAGED
    assert found.problems == ("the manifest cannot be read ('shares' names a file more than once)",)
