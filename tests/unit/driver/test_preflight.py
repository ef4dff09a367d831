"""What the driver refuses before any worker starts, as far as that needs no Ray."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time

import numpy as np
import pytest

import raytf
from raytf.checkpoint import manifest
from raytf.checkpoint.naming import name_of
from raytf.config.train_config import TrainConfig
from raytf.driver import preflight
from raytf.driver.preflight import cpus_here, why_on_cpus
from raytf.errors import CheckpointError, ClusterError, ConfigError, DamagedFileError, StorageError
from raytf.storage.storage import Storage
from tests.support.checkpoints import save


@pytest.mark.parametrize(
    ("settings", "cpus"),
    [
        ({"workers": "1"}, 1),
        ({"workers": "1", "strategy": "parameter-server"}, 3),
        ({"strategy": "mirrored", "logical_devices": 4}, 4),
    ],
)
def test_a_ray_of_this_machine_has_room_for_the_run(settings, cpus):
    assert cpus_here(TrainConfig.of(**settings)) == cpus


@pytest.mark.parametrize("strategy", ["multi-worker-mirrored", "parameter-server"])
def test_a_ray_of_this_machine_has_no_room_for_more_workers_than_its_memory(strategy):
    assert cpus_here(TrainConfig.of(workers="1:1000000", strategy=strategy)) < 1000000
    with pytest.raises(ClusterError, match=r"--workers 1000000: this machine's .* Use --workers \d+ or fewer"):
        cpus_here(TrainConfig.of(workers="1000000", strategy=strategy))


def test_more_workers_than_fit_leave_nothing(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = TrainConfig.of(workers="1000000", storage=str(tmp_path / "runs"))
    with pytest.raises(ClusterError, match="workers=1000000"):
        raytf.fit(lambda: None, np.zeros((8, 1)), np.zeros(8), config=config)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("text", [b"", b"{", b'{"steps": 5}', b'{"steps": "5"}', b"[" * 5000])
def test_a_result_that_cannot_be_read_is_made_again_or_the_run_refused(tmp_path, text):
    run, said = Storage(str(tmp_path)), []
    run.put("result.json", text)
    with pytest.raises(DamagedFileError, match="no checkpoint to rebuild it from"):
        preflight.finished(run, 5, said.append)
    save(run, 5)
    assert preflight.finished(run, 5, said.append) is None
    assert "rebuilt from the newest checkpoint" in said[0]
    run.put("result.json", b'{"steps": 5, "metrics": {}, "weights_sha256": ""}')
    assert preflight.finished(run, 5)["steps"] == 5
    assert preflight.finished(run, 6) is None


@pytest.mark.parametrize("name", ["checkpoints", "attempts", "steps", "ledger", "files", "tensorboard", "export"])
@pytest.mark.parametrize("is_link", [False, True])
def test_what_is_no_folder_is_refused_before_anything_starts(tmp_path, name, is_link):
    (tmp_path / "elsewhere").mkdir()
    preflight.check_folder(Storage(str(tmp_path / "new")))
    run = tmp_path / "run"
    run.mkdir()
    preflight.check_folder(Storage(str(run)))
    if is_link:
        (run / name).symlink_to(tmp_path / "elsewhere")
    else:
        (run / name).write_text("")
    with pytest.raises(
        DamagedFileError, match=f"{name} is damaged: .*link" if is_link else "where a folder is expected"
    ):
        preflight.check_folder(Storage(str(run)))


def test_a_folder_without_write_permission_is_refused_before_a_start(tmp_path):
    # Root writes wherever permission bits forbid it, but not to a read-only mount.
    inner = tmp_path / "runs" / "a" / "checkpoints"
    inner.mkdir(parents=True)
    mounts = f"mount --bind {inner} {inner} && mount -o remount,bind,ro {inner}"
    look = (
        "from raytf.driver import preflight; from raytf.storage.storage import Storage; "
        f"preflight.check_folder(Storage({str(tmp_path / 'runs' / 'a')!r}))"
    )
    preflight.check_folder(Storage(str(tmp_path / "runs" / "a")))
    command = ["unshare", "-rm", "sh", "-c", f"{mounts} || exit 77; exec {sys.executable} -c {shlex.quote(look)}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("no mount namespace here")
    assert f"cannot write {inner}: Read-only file system. Choose a folder in which this user may write." in done.stderr
    assert os.listdir(tmp_path / "runs" / "a") == ["checkpoints"]


def test_a_bucket_that_refuses_to_write_is_refused_before_anything_starts(behind, proxy):
    behind.preflight()
    proxy.refuse_writes()
    began = time.monotonic()
    with pytest.raises(StorageError, match="Check the credentials") as refused:
        behind.preflight()
    assert refused.value.kind == "denied"
    assert time.monotonic() - began < 15


def test_what_callbacks_may_write_through_is_refused(tmp_path):
    (tmp_path / "other.csv").write_text("mine")
    (tmp_path / "run" / "files" / "inner").mkdir(parents=True)
    preflight.check_folder(Storage(str(tmp_path / "run")))
    (tmp_path / "run" / "files" / "inner" / "log.csv").symlink_to(tmp_path / "other.csv")
    with pytest.raises(DamagedFileError, match=r"inner/log\.csv is damaged: it is a link"):
        preflight.check_folder(Storage(str(tmp_path / "run")))


@pytest.mark.parametrize("name", ["result.json", "model.keras", "architecture.json", "lease.json"])
def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(DamagedFileError, match="where a file is expected"):
        preflight.check_folder(Storage(str(tmp_path)))


@pytest.mark.parametrize("text", ["²", "٣", "x", "", "-1", "1.5", "9" * 5000])
def test_logical_shards_that_are_no_number(text):
    with pytest.raises(CheckpointError, match="which is not a number"):
        preflight.stored_shards({"--logical-shards": text})
    assert preflight.stored_shards({"--logical-shards": "16"}) == 16
    assert preflight.stored_shards({}) is None


def test_the_identity_is_that_of_the_newest_checkpoint_that_can_be_read(tmp_path):
    run = Storage(str(tmp_path))
    manifest.write(run, name_of(1, "a"), 1, [], {"identity": {"--seed": "1"}})
    manifest.write(run, name_of(2, "a"), 2, [], {"identity": ["a list"]})
    save(run, 3)
    run.put(f"checkpoints/{name_of(4, 'a')}/MANIFEST.json", b"{")
    assert preflight.stored_identity(run) == {"--seed": "1"}


@pytest.mark.parametrize(
    ("fits", "of_all_kinds", "each", "words"),
    [
        (1, 2, 1.0, ["of several kinds", "--mixed-gpus", "--workers 1 those of one kind"]),
        (1, 1, 1.0, ["too few for 2 workers", "--workers 1 uses it"]),
        (0, 0, 4.0, ["too few CPUs", "--cpus-per-worker"]),
    ],
)
def test_why_gpus_stay_idle_says_what_would_use_them(fits, of_all_kinds, each, words):
    text = why_on_cpus(2, fits, of_all_kinds, each)
    assert all(word in text for word in [*words, "training on CPUs"])


def test_a_refusal_names_settings_as_the_program_passed_them():
    x, y = np.zeros((8, 1)), np.zeros(8)
    with pytest.raises(ConfigError, match=r"^keep_best='val_loss': there is no validation data\."):
        raytf.fit(lambda: None, x, y, keep_best="val_loss")
    with pytest.raises(ConfigError, match=r"^--keep-best val_loss: there is no validation data"):
        raytf.fit(lambda: None, x, y, config=TrainConfig.among({"keep_best": "val_loss"}))
    with pytest.raises(ConfigError, match=r"^logical_shards=2 with up to 4 workers"):
        raytf.fit(lambda: None, x, y, logical_shards=2, workers=4)
