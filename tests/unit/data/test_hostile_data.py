"""Data files that promise or unpack to more than there is: one clear DataError, in bounded memory."""

import gzip
import io
import os
import resource
import struct
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from PIL import Image

from raytf.data.image_datasets import load_images, open_splits, read_idx
from raytf.data.sources import ImageFolderSource, NpzSource
from raytf.errors import DataError

SPLITS = ("x_train", "y_train", "x_test", "y_test")
NOISE = np.random.default_rng(7).bytes(300)


def idx(shape, kind=0x08, body=b""):
    return struct.pack(">HBB", 0, kind, len(shape)) + struct.pack(f">{len(shape)}I", *shape) + body


def bomb(head, mebibytes):
    out = io.BytesIO()
    with gzip.GzipFile(fileobj=out, mode="wb", compresslevel=9) as file:
        file.write(head)
        for _ in range(mebibytes):
            file.write(bytes(1 << 20))
    return out.getvalue()


def npy(shape, dtype="<u1", body=b""):
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": dtype, "fortran_order": False, "shape": shape})
    return out.getvalue() + body


def archive(path, **members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            file.writestr(f"{name}.npy", data)


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (idx([2, 2], body=b"1234"), ""),
        (idx([2, 2], body=b"123"), "promises 4 bytes, 3 are there"),
        (idx([2, 2], body=b"12345"), "promises 4 bytes, more are there"),
        (idx([2**32 - 1] * 4, body=b"1"), "are read as a whole"),
        (idx([2**32 - 1] * 255), "are read as a whole"),
        (idx([1, 2])[:9], "no IDX header|does not begin"),
        (b"\0\0", "does not begin"),
        (b"", "does not begin"),
        (gzip.compress(idx([2, 2], body=b"1234"), mtime=0)[:-9], "cannot be read"),
        (b"\x1f\x8b" + NOISE[:40], "cannot be read"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_idx_files(tmp_path, data, word, packed):
    path = tmp_path / "f"
    path.write_bytes(gzip.compress(data) if packed and not data.startswith(b"\x1f\x8b") else data)
    if not word:
        assert read_idx(path).tolist() == [[49, 50], [51, 52]]
        return
    with pytest.raises(DataError, match=word) as said:
        read_idx(path)
    assert "\n" not in str(said.value)


def test_a_gzip_without_limit_takes_no_memory(tmp_path):
    """512 MiB of zeros behind a header of 4 bytes, in a process that may have 300 MiB more than it has."""
    (tmp_path / "bomb.gz").write_bytes(bomb(idx([2, 2]), 512))
    assert os.path.getsize(tmp_path / "bomb.gz") < 1 << 20
    code = (
        "import resource, sys\nfrom raytf.data.image_datasets import read_idx\nfrom raytf.errors import DataError\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n    read_idx(sys.argv[1])\nexcept DataError as error:\n    print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "bomb.gz")], capture_output=True, text=True, timeout=120
    )
    said, grown = done.stdout.splitlines()
    assert "more are there" in said
    assert int(grown) < 50 << 10  # KiB


@pytest.mark.parametrize(
    "member",
    [
        npy((10**12, 28, 28)),
        npy((10**30,)),
        npy((4, 2, 2), "|O", b"\x80\x04cos\nsystem\n(S'id'\ntR."),
        npy((4, 2, 2))[:-20],
        b"",
        b"\x93NUMPY\x01\x00\xff\xff" + b"[" * 9000,
        b"\x93NUMPY\x09\x00" + bytes(64),
        b"not an array at all",
    ],
)
def test_members_of_an_npz(tmp_path, member):
    good = npy((4,), "<i8", bytes(32))
    path = tmp_path / "d.npz"
    archive(path, **{name: member if name.startswith("x") else good for name in SPLITS})
    with pytest.raises(DataError):
        load_images(str(path))
    with pytest.raises(DataError):
        open_splits(str(path))
    archive(path, x=member, y=good)
    with pytest.raises(DataError):
        NpzSource(str(path)).take(np.arange(2))


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04" + bytes(40), NOISE, b"PK\x05\x06" + bytes(18)])
def test_what_is_no_archive(tmp_path, data):
    path = tmp_path / "mnist.npz"
    path.write_bytes(data)
    for read in (load_images, open_splits, NpzSource):
        with pytest.raises(DataError):
            read(str(path))
    done = subprocess.run(
        [sys.executable, "-c", "from raytf.commands.main import main; main()", "data", "check", str(path)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode in (1, 2)


def test_an_image_of_a_thousand_million_pixels(tmp_path):
    for split in ("train", "test"):
        (tmp_path / split / "a").mkdir(parents=True)
        file = io.BytesIO()
        Image.new("L", (1, 1)).save(file, "PNG")
        data = bytearray(file.getvalue())
        data[16:24] = struct.pack(">II", 60_000, 60_000)
        import zlib

        data[29:33] = struct.pack(">I", zlib.crc32(bytes(data[12:29])))
        (tmp_path / split / "a" / "i.png").write_bytes(data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError):
        ImageFolderSource(str(tmp_path / "train"))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10
