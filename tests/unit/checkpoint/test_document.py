"""What checkpoints say: one class, whose JSON is that of every raytf before it."""

from __future__ import annotations

import json

import pytest

from raytf.checkpoint.document import CheckpointDocument

#: As raytf wrote it into manifests and into memory before there was a class for it.
TOTALS = {"train_seconds": 1.5, "imbalance_seconds": 0.5, "stopped_early": True, "best": ["val_loss", 0.25]}
SLOW = {"identity": {"model": "a"}, "history": [{"epoch": 0, "step": 7, "val_loss": 0.25}]}
MANIFEST = {**TOTALS, **SLOW, "callbacks": {"0": {"wait": 3}}, "world_size": 2}
LIVE = {**TOTALS, "durable_step": 5, "world_size": 2, "weights_hash": 77}


def test_a_manifest_is_read_and_written_as_before():
    found = CheckpointDocument.parse(MANIFEST)
    assert json.loads(json.dumps(found.of_manifest())) == MANIFEST
    assert (found.best, found.callbacks, found.missing) == (("val_loss", 0.25), {"0": {"wait": 3}}, ())
    assert (found.durable_step, found.weights_hash) == (None, None)


def test_a_copy_in_memory_is_read_and_written_as_before():
    found = CheckpointDocument.parse({"attempt": "x", **SLOW, **LIVE})
    # The order of the keys, too: the bytes in memory are the same.
    assert json.dumps(found.live()) == json.dumps(LIVE)
    assert json.dumps(found.slow()) == json.dumps(SLOW)
    assert found.epochs == 1
    assert "weights_hash" not in CheckpointDocument().live()


def test_a_chain_is_kept_where_there_is_one():
    document = CheckpointDocument(chain="ab")
    for told in (document.of_manifest(), document.live()):
        assert CheckpointDocument.parse({**SLOW, **told}).chain == "ab"
    assert not {"chain"} & {*CheckpointDocument().of_manifest(), *CheckpointDocument().live()}


@pytest.mark.parametrize(
    "name", ["identity", "history", "train_seconds", "imbalance_seconds", "stopped_early", "callbacks"]
)
def test_what_is_needed_to_go_on_and_is_not_there_is_named(name: str):
    found = CheckpointDocument.parse({key: value for key, value in MANIFEST.items() if key != name})
    assert found.missing == (name,)


def test_what_other_versions_add_or_leave_out_does_no_harm():
    assert CheckpointDocument.parse({**MANIFEST, "missing": ["x"], "later": 1}) == CheckpointDocument.parse(MANIFEST)
    old = {key: value for key, value in MANIFEST.items() if key not in ("best", "world_size")}
    assert CheckpointDocument.parse(old).best is None
    assert CheckpointDocument.parse(old).missing == ()
