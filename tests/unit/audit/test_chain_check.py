"""Whether a run's records fit together: 200 forgeries of one place each are found, and how sure a share of steps is."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from raytf.audit import chain_check
from raytf.audit.chain_check import Interval
from raytf.checkpoint import codec, manifest
from raytf.checkpoint.durable import DurableSave, DurableWriter
from raytf.checkpoint.manifest import CheckpointDocument
from raytf.checkpoint.naming import name_of
from raytf.distributed import step_digest
from raytf.distributed.step_digest import DigestLayout
from raytf.runs import run_log
from raytf.storage.storage import Storage

LAYOUT = DigestLayout(2, ("kernel", "loss and metrics"))
STEPS, EVERY = 60, 20
ATTEMPT = "20260101T000000.000-aaaaaa"


def make(folder: Path) -> Storage:
    """A run of three checkpoints, as raytf writes it."""
    run, rng = Storage(str(folder)), np.random.default_rng(0)
    digests = rng.integers(0, 256, (STEPS, LAYOUT.bytes), np.uint8)
    losses, rates = rng.random(STEPS).astype(np.float32), np.full(STEPS, 0.5, np.float32)
    log, chain, before = run_log.StepLog(run, ATTEMPT, LAYOUT), step_digest.GENESIS, None
    for step in range(EVERY, STEPS + 1, EVERY):
        part = slice(step - EVERY, step)
        log.add(step - EVERY + 1, 0, losses[part], rates[part], digests[part])
        log.write(log.take())
        told = list(zip(losses[part].tolist(), rates[part].tolist(), strict=True))
        chain = step_digest.chained(chain, step - EVERY + 1, told, [row.tobytes() for row in digests[part]])
        document = CheckpointDocument(chain=chain.hex())
        save = DurableSave(step, {"model/kernel": rng.random(50).astype(np.float32)}, document)
        link = before
        asked = (lambda: None, lambda step: None, lambda step, link=link: link)
        writer = DurableWriter(run, name_of(step, ATTEMPT), 0, 1, save, *asked)
        writer.write_share()
        writer.write_manifest()
        before = writer.link
    return run


def test_what_raytf_writes_fits_together(tmp_path: Path):
    found = chain_check.check(make(tmp_path / "run"))
    assert (found.problems, found.notes, found.steps, len(found.checkpoints)) == ((), (), STEPS, 3)
    assert chain_check.intervals(found.checkpoints) == [
        Interval(None, name_of(20, ATTEMPT)),
        Interval(name_of(20, ATTEMPT), name_of(40, ATTEMPT)),
        Interval(name_of(40, ATTEMPT), name_of(60, ATTEMPT)),
    ]


def _flip(run: Storage, path: str, draw: random.Random, begin: int = 0) -> None:
    data = bytearray(run.get(path))
    data[draw.randrange(begin, len(data))] ^= 1 << draw.randrange(8)
    run.put(path, bytes(data))


def changed_weights(run: Storage, draw: random.Random) -> None:
    name = draw.choice(manifest.list_complete(run))
    _flip(run, f"checkpoints/{name}/share-00000.safetensors", draw)


def changed_weights_with_their_checksums(run: Storage, draw: random.Random) -> None:
    """Of any checkpoint but the last, whose manifest nobody names."""
    name = draw.choice(manifest.list_complete(run)[1:])
    pieces = codec.parts({"model/kernel": np.full(50, draw.random(), np.float32)})
    run.put(f"checkpoints/{name}/share-00000.safetensors", pieces)
    body = manifest.read(run, name)
    body["shares"][0] |= {"crc32c": codec.checksum(pieces), "bytes": sum(piece.nbytes for piece in pieces)}
    _write(run, name, body)


def edited_chain(run: Storage, draw: random.Random) -> None:
    name = draw.choice(manifest.list_complete(run))
    body = manifest.read(run, name)
    chain = bytearray.fromhex(body["document"]["chain"])
    chain[draw.randrange(32)] ^= 1
    body["document"]["chain"] = chain.hex()
    _write(run, name, body)


def skipped_step(run: Storage, draw: random.Random) -> None:
    path = _log(run, ".csv")
    lines = run.get(path).decode().splitlines(keepends=True)
    del lines[draw.randrange(1, len(lines))]
    run.put(path, "".join(lines).encode())


def edited_loss(run: Storage, draw: random.Random) -> None:
    path = _log(run, ".csv")
    lines = run.get(path).decode().splitlines(keepends=True)
    at = draw.randrange(1, len(lines))
    parts = lines[at].split(",")
    column = draw.choice((2, 3))
    parts[column] = str(float(np.nextafter(np.float32(parts[column]), np.float32(2))))
    lines[at] = ",".join(parts)
    run.put(path, "".join(lines).encode())


def edited_digest(run: Storage, draw: random.Random) -> None:
    path = _log(run, ".digests")
    data = run.get(path)
    head, _, raw = data.partition(b"\n")
    changed = bytearray(raw)
    changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    header = json.loads(head) | {"crc32": zlib.crc32(bytes(changed))}
    run.put(path, json.dumps(header).encode() + b"\n" + bytes(changed))


def swapped_steps(run: Storage, draw: random.Random) -> None:
    """The rows of two steps, numbers and digests alike: other data came first."""
    one, other = draw.sample(range(STEPS), 2)
    path = _log(run, ".csv")
    lines = run.get(path).decode().splitlines(keepends=True)
    numbers = [line.split(",", 1) for line in lines[1:]]
    numbers[one][1], numbers[other][1] = numbers[other][1], numbers[one][1]
    run.put(path, "".join([lines[0], *(",".join(row) for row in numbers)]).encode())
    path = _log(run, ".digests")
    head, _, raw = run.get(path).partition(b"\n")
    rows = np.frombuffer(raw, np.uint8).reshape(STEPS, -1).copy()
    rows[[one, other]] = rows[[other, one]]
    header = json.loads(head) | {"crc32": zlib.crc32(rows.tobytes())}
    run.put(path, json.dumps(header).encode() + b"\n" + rows.tobytes())


def _log(run: Storage, suffix: str) -> str:
    (name,) = (name for name in run.list(run_log.STEPS) if name.endswith(suffix))
    return f"{run_log.STEPS}/{name}"


def _write(run: Storage, name: str, body: dict) -> None:
    run.put(
        f"checkpoints/{name}/{manifest.FILE}",
        manifest.dump({"body": body, "crc32": zlib.crc32(manifest.dump(body))}),
    )


FORGERIES: list[Callable[[Storage, random.Random], None]] = [
    *(changed_weights, changed_weights_with_their_checksums, edited_chain, skipped_step),
    *(edited_loss, edited_digest, swapped_steps),
]


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
def test_forgeries_of_one_place_are_found(tmp_path: Path, forge: Callable[[Storage, random.Random], None]):
    for number in range(30):
        run = make(tmp_path / f"{number}")
        forge(run, random.Random(f"{forge.__name__} {number}"))
        assert chain_check.check(run).problems, number


def test_a_share_of_the_steps_is_drawn():
    every = [Interval(None if i == 0 else name_of(10 * i, "a"), name_of(10 * i + 10, "a")) for i in range(50)]
    assert len(chain_check.draw(every, 0.0, 1)) == 1
    assert len(chain_check.draw(every, 0.1, 1)) == 5
    assert chain_check.draw(every, 1.0, 1) == every
    drawn = {tuple(chain_check.draw(every, 0.02, seed)) for seed in range(900)}
    assert len(drawn) == len(every)


@pytest.mark.parametrize(("computed", "forged"), [(0, 1), (10, 1), (10, 3), (30, 5), (100, 1)])
def test_the_chance_is_that_of_draws(computed: int, forged: int):
    draw, of = random.Random(0), 100
    hits = sum(min(draw.sample(range(of), forged)) < computed for _ in range(20_000))
    assert abs(hits / 20_000 - chain_check.chance(computed, of, forged)) < 0.02
