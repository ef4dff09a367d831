"""Digests of steps on storage: those that the weights have seen, and damage is noticed."""

from __future__ import annotations

import json

import numpy as np
import pytest

from raytf.checkpoint.step_rows import StepRows
from raytf.distributed.step_digest import DigestKind, DigestLayout
from raytf.errors import DamagedFileError
from raytf.runs import digest_log, run_log
from raytf.storage.storage import Storage

FIRST, SECOND = "20260101T000000.000-ffffff", "20260101T000001.000-000000"
LAYOUT = DigestLayout(3, ("kernel", "bias", "loss and metrics"))
WIDER = DigestLayout(3, ("kernel", "bias", "loss and metrics", "more"), DigestKind.DEVICE)


@pytest.fixture
def run(tmp_path):
    return Storage(str(tmp_path / "run"))


def digests(steps: int, value: int, layout: DigestLayout = LAYOUT) -> np.ndarray:
    found = np.arange(steps * layout.bytes, dtype=np.uint8).reshape(steps, layout.bytes)
    return found + np.uint8(value)


def write(
    run: Storage, attempt: str, first: int, told: np.ndarray | None, layout: DigestLayout | None = LAYOUT
) -> None:
    log, steps = run_log.StepLog(run, attempt, layout), 3 if told is None else len(told)
    log.add(first, 0, np.arange(steps, dtype=float), np.zeros(steps), told)
    log.write(log.take())


def test_digests_come_back_beside_their_steps(run):
    told = digests(3, 1)
    write(run, FIRST, 1, told)
    found = digest_log.read(run, run_log.STEPS)
    assert [found.of(step) for step in range(5)] == [None, *((LAYOUT, row.tobytes()) for row in told), None]
    (name,) = (name for name in run.list(run_log.STEPS) if name.endswith(".csv"))
    lines = run.get(f"{run_log.STEPS}/{name}").decode().splitlines()
    assert lines[0] == "step,epoch,loss,learning_rate,gradient_norm,digest,weights"
    assert lines[1].split(",")[5] == f"{int.from_bytes(told[0, :8].tobytes(), 'little'):016x}"
    assert run_log.read_steps(run.uri)["step"].tolist() == [1, 2, 3]


def test_a_later_attempt_replaces_those_from_its_start(run):
    before, after = digests(4, 1), digests(1, 9, WIDER)
    write(run, FIRST, 1, before)
    write(run, SECOND, 3, after, WIDER)
    found = digest_log.read(run, run_log.STEPS)
    assert found.of(2) == (LAYOUT, before[1].tobytes())
    assert found.of(3) == (WIDER, after[0].tobytes())
    assert found.of(4) is None


def test_an_attempt_without_digests_replaces_those_of_an_earlier_one(run):
    write(run, FIRST, 1, digests(4, 1))
    write(run, SECOND, 3, None, None)
    found = digest_log.read(run, run_log.STEPS)
    assert [found.of(step) is not None for step in range(1, 6)] == [True, True, False, False, False]


def test_rows_that_are_none_come_back_from_arrays():
    again = StepRows.of_arrays(StepRows().arrays())
    assert (len(again), again.digests.shape, again.weights) == (0, (0, 0), {})


def test_steps_without_digests_have_none(run):
    write(run, FIRST, 1, None, None)
    assert digest_log.read(run, run_log.STEPS).of(1) is None
    log = run_log.StepLog(run, SECOND, LAYOUT)
    log.restore(StepRows.of_arrays({"numbers": np.array([[2.0, 0, 0, 0]])}))  # of a raytf that had none
    log.add(3, 0, np.zeros(1), np.zeros(1), digests(1, 5))
    log.write(log.take())
    found = digest_log.read(run, run_log.STEPS)
    assert found.of(2) is None
    assert found.of(3) == (LAYOUT, digests(1, 5)[0].tobytes())


def test_hashes_of_the_weights_are_noted_where_they_are_known(run):
    log = run_log.StepLog(run, FIRST)
    log.add(1, 0, np.zeros(2), np.zeros(2))
    log.weigh(2, 0xABC)
    log.add(3, 0, np.zeros(1), np.zeros(1))
    log.weigh(2, 0xDEF)  # the last row is another one
    kept = StepRows.of_arrays(log.since(1).arrays())
    assert dict(kept.weights) == {2: 0xABC}
    log.write(log.take())
    text = run.get(f"{run_log.STEPS}/{run.list(run_log.STEPS)[0]}").decode()
    assert [line.split(",")[6] for line in text.splitlines()[1:]] == ["", "0000000000000abc", ""]


@pytest.mark.parametrize("damage", ["cut", "flipped", "header", "empty"])
def test_damage_is_named(run, damage):
    write(run, FIRST, 1, digests(3, 1))
    (name,) = (name for name in run.list(run_log.STEPS) if name.endswith(digest_log.SUFFIX))
    data = run.get(f"{run_log.STEPS}/{name}")
    data = {
        "cut": data[:-1],
        "flipped": data[:-1] + bytes([data[-1] ^ 1]),
        "header": data[1:],
        "empty": b"",
    }[damage]
    run.put(f"{run_log.STEPS}/{name}", data)
    with pytest.raises(DamagedFileError, match=name):
        digest_log.read(run, run_log.STEPS)


def in_old_words(run: Storage, on_device: bool) -> None:
    """Have the segments as a raytf wrote them that had no kinds."""
    for name in run.list(run_log.STEPS):
        if name.endswith(digest_log.SUFFIX):
            head, _, raw = run.get(f"{run_log.STEPS}/{name}").partition(b"\n")
            header = json.loads(head)
            del header["kind"]
            run.put(f"{run_log.STEPS}/{name}", json.dumps({**header, "on_device": on_device}).encode() + b"\n" + raw)


@pytest.mark.parametrize("on_device", [True, False])
def test_what_an_older_raytf_wrote_is_read_and_gone_on_with(run, on_device):
    assert not digest_log.are_old(run, run_log.STEPS)
    write(run, FIRST, 1, digests(3, 1))
    assert not digest_log.are_old(run, run_log.STEPS)
    in_old_words(run, on_device)
    (segment,) = digest_log.read(run, run_log.STEPS).segments
    assert segment.layout.kind == (DigestKind.DEVICE if on_device else DigestKind.WHOLE)
    assert digest_log.are_old(run, run_log.STEPS) == (not on_device)
    run.put(f"{run_log.STEPS}/000000000009-{SECOND}{digest_log.SUFFIX}", b"damaged")
    assert digest_log.are_old(run, run_log.STEPS) == (not on_device)


def test_a_kind_of_a_newer_raytf_is_refused(run):
    write(run, FIRST, 1, digests(3, 1))
    (name,) = (name for name in run.list(run_log.STEPS) if name.endswith(digest_log.SUFFIX))
    data = run.get(f"{run_log.STEPS}/{name}").replace(b'"folded"', b'"better"')
    run.put(f"{run_log.STEPS}/{name}", data)
    with pytest.raises(DamagedFileError, match="'kind' is none of folded, device, whole, so a newer raytf"):
        digest_log.read(run, run_log.STEPS)


def test_rows_are_cut_and_joined():
    rows = StepRows.joined(
        [
            StepRows(np.array([[1.0, 0, 0, 0], [2, 0, 0, 0]]), digests(2, 0), {2: 7}),
            StepRows(np.array([[3.0, 0, 0, 0]]), np.zeros((1, 0), np.uint8), {3: 8}),
        ]
    )
    assert rows.numbers[:, 0].tolist() == [1, 2, 3]
    assert rows.digests[2].tolist() == [0] * LAYOUT.bytes
    assert (dict(rows.after(2).weights), dict(rows.part(1).weights)) == ({3: 8}, {2: 7, 3: 8})
    assert len(rows.part(2)) == 1
    assert len(StepRows.joined([])) == 0
