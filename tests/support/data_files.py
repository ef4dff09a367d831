"""Small data in files, made as people make them: with libraries other than raytf where there is one."""

from __future__ import annotations

import struct
from pathlib import Path

import google_crc32c
import numpy as np
from PIL import Image

from raytf.data import Spec
from raytf.data.sources.tf_example import encode, feature
from raytf.data.sources.tfrecord_files import frame


def masked(data):
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def framed(records):
    """TFRecord framing, written out once more."""
    out = b""
    for data in records:
        length = struct.pack("<Q", len(data))
        out += length + struct.pack("<I", masked(length)) + data + struct.pack("<I", masked(data))
    return out


def examples(**arrays):
    """Examples of arrays by name."""
    arrays = {name: np.asarray(a) for name, a in arrays.items()}
    features = [feature(name, Spec(a.shape[1:], a.dtype.name)) for name, a in arrays.items()]
    return list(encode(features, list(arrays.values())))


def tfrecords(folder, files=(10, 3), side=4):
    """Files of some records each; pixel = record, label = record % 5. Returns (folder, images, labels)."""
    folder.mkdir(parents=True, exist_ok=True)
    n = sum(files)
    image = np.broadcast_to(np.arange(n, dtype=np.uint8)[:, None, None, None], (n, side, side, 1))
    label = np.arange(n) % 5
    start = 0
    for i, count in enumerate(files):
        part = slice(start, start + count)
        data = frame(examples(image=image[part], label=label[part])) if count else b""
        (folder / f"{i}.tfrecord").write_bytes(data)
        start += count
    return str(folder), image, label


def pictures(folder, per_class=3, classes=("cat", "dog"), size=(6, 5), ending="png", mode="RGB"):
    """Images of one colour each: pixel = 10 * record."""
    for c, name in enumerate(classes):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(per_class):
            value = 10 * (c * per_class + i)
            colour = value if mode == "L" else (value, value, value)
            Image.new(mode, size[::-1], colour).save(folder / name / f"{i}.{ending}")
    return str(folder)


def put_tree(storage, folder, name):
    """Copy a local folder's files to below a name on storage."""
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file():
            storage.put(f"{name}/{path.relative_to(folder)}", path.read_bytes())
