"""TrainConfig: flag names, defaults, and one clear message for each setting that cannot work."""

import dataclasses
import os
import pickle
import re

import numpy as np
import pytest

from raytf.config.train_config import MIN_LOGICAL_SHARDS, TrainConfig, as_keyword_arguments
from raytf.errors import ConfigError

SYNC_SERVERS = {"strategy": "parameter-server", "sync_replicas": True}
#: settings -> words of the message.
REFUSED = [
    ({"epochs": 1, "steps": 1}, ["--epochs", "--steps", "exclude"]),
    ({"epochs": 0}, ["epochs=0", "1 or more"]),
    ({"steps": -5}, ["steps=-5", "1 or more"]),
    ({"global_batch_size": 0}, ["global_batch_size=0", "1 or more"]),
    (
        {"global_batch_size": 130, **SYNC_SERVERS},
        ["--global-batch-size 130", "4 equal", "--global-batch-size 128", "--logical-shards 2"],
    ),
    ({"global_batch_size": 3, "workers": "2", **SYNC_SERVERS}, ["--global-batch-size 3", "Use --global-batch-size 4"]),
    ({"logical_shards": 0}, ["logical_shards=0", "1 or more"]),
    ({"logical_shards": 2, "workers": "1:4"}, ["--logical-shards 2", "4 workers", "at least 4"]),
    ({"seed": -1}, ["seed=-1", "0 or more"]),
    ({"steps_per_call": -1}, ["steps_per_call=-1"]),
    ({"checkpoint_every_steps": 0}, ["checkpoint_every_steps=0", "1 or more"]),
    ({"checkpoint_every_seconds": -1.0}, ["checkpoint_every_seconds=-1"]),
    ({"keep": 0}, ["keep=0", "1 or more"]),
    ({"max_failures": -2}, ["max_failures=-2", "-1 or more"]),
    ({"resize_every_seconds": -1.0}, ["resize_every_seconds=-1"]),
    ({"exact": True, "jit": True}, ["--exact with --jit", "XLA", "Leave out --jit"]),
    ({"exact": True, "reduction": "float"}, ["--exact with --reduction float", "order", "Leave out"]),
    ({"strategy": "parameter-server", "ps": 0}, ["ps=0", "1 or more"]),
    ({"ps": 1}, ["--ps", "--strategy is multi-worker-mirrored", "--strategy parameter-server"]),
    ({"strategy": "one-device", "sync_replicas": True}, ["--sync-replicas", "--strategy is one-device"]),
    ({"strategy": "parameter-server", "replicas_to_aggregate": 1}, ["--replicas-to-aggregate 1", "--sync-replicas"]),
    (
        {"strategy": "parameter-server", "sync_replicas": True, "replicas_to_aggregate": 3, "workers": "1:2"},
        ["--replicas-to-aggregate 3", "up to 2 workers", "expected 1 to 2"],
    ),
    (
        {"strategy": "parameter-server", "sync_replicas": True, "replicas_to_aggregate": 0},
        ["--replicas-to-aggregate 0", "expected 1 to 2"],
    ),
    ({"strategy": "parameter-server", "exact": True}, ["--exact", "parameter-server", "timing", "Leave it out"]),
    ({"strategy": "parameter-server", "sync_replicas": True, "exact": True}, ["--exact", "floats", "Leave it out"]),
    ({"strategy": "parameter-server", "compress_gradients": True}, ["--compress-gradients", "servers", "Leave it out"]),
    ({"strategy": "parameter-server", "communication": "ring"}, ["--communication ring", "parameter-server"]),
    ({"strategy": "parameter-server", "logical_devices": 2}, ["--logical-devices 2", "parameter-server", "--workers"]),
    ({"strategy": "parameter-server", "log_device_placement": True}, ["--log-device-placement", "--show-cluster"]),
    ({"strategy": "parameter-server", "snapshot_every_steps": 5}, ["--snapshot-every-steps", "Leave it out"]),
    ({"strategy": "parameter-server", "replace_stragglers": True}, ["--replace-stragglers", "slow worker"]),
    ({"strategy": "parameter-server", "mixed_precision": "float16"}, ["float16", "bfloat16"]),
    ({"cpus_per_worker": 0.0}, ["cpus_per_worker=0", "above 0"]),
    *[
        ({"workers": w}, [f"--workers {w}:", "1:4"])
        for w in ("", "0", "-1", "two", "3:2", "0:2", ":4", "1:2:3", "2-4", "1.5")
    ],
    *[
        ({"run": r}, ["run=", repr(r), "letters, digits"])
        for r in ("", ".hidden", "..", "a/b", "a b", "a\n", "a\\b", "s3://x")
    ],
]
#: What only Python can get wrong: the command line parses types.
WRONG_TYPES = [
    ({"exact": "yes"}, ["exact='yes'", "expected True or False"]),
    ({"exact": 1}, ["exact=1", "expected True or False"]),
    ({"epochs": "3"}, ["epochs='3'", "a whole number"]),
    ({"epochs": True}, ["epochs=True", "a whole number"]),
    ({"epochs": float("inf")}, ["epochs=inf", "a whole number"]),
    ({"seed": None}, ["seed=None", "a whole number"]),
    ({"global_batch_size": 12.5}, ["global_batch_size=12.5", "a whole number"]),
    ({"mixed_precision": "float8"}, ["mixed_precision='float8'", "one of off"]),
    ({"mixed_precision": 16}, ["mixed_precision=16", "one of off"]),
    ({"checkpoint_every_seconds": float("nan")}, ["checkpoint_every_seconds=nan"]),
    ({"run": 3}, ["run=3", "a string"]),
    ({"storage": 3}, ["storage=3", "a string or a path"]),
    ({"workers": 2.5}, ["workers=2.5", "a string or a whole number"]),
    ({"workers": "2:"}, ["--workers 2::"]),
    *[({"strategy": "parameter-server", "ps": n}, [f"ps={n!r}", "number"]) for n in ("x", 1.5, 0)],
    (
        {"strategy": "parameter-server", "sync_replicas": True, "replicas_to_aggregate": "x"},
        ["replicas_to_aggregate='x'", "a whole number"],
    ),
    ({"warmup_epochs": "x"}, ["warmup_epochs='x'", "number"]),
    ({"base_batch_size": "y"}, ["base_batch_size='y'", "number"]),
    ({"histograms_every": 2.5}, ["histograms_every=2.5", "whole"]),
]


def name(case):
    return ",".join(f"{k}={v!r}" for k, v in case.items()) if isinstance(case, dict) else ""


@pytest.mark.parametrize(("settings", "words"), REFUSED + WRONG_TYPES, ids=name)
def test_refused_with_one_clear_line(settings, words):
    with pytest.raises(ConfigError) as refused:
        TrainConfig.of(**settings).check()
    message = str(refused.value)
    assert [w for w in map(as_keyword_arguments, words) if w not in message] == []
    assert "--" not in message
    assert "\n" not in message


def test_what_is_not_at_its_default():
    assert TrainConfig().changed == {}
    config = TrainConfig.of(workers="1:3", exact=True, warm_workers=False, epochs=3, keep=TrainConfig().values["keep"])
    assert config.changed == {"--workers": "1:3", "--exact": "on", "--warm-workers": "off", "--epochs": "3"}


def test_a_value_of_python_becomes_that_of_the_flag(tmp_path):
    config = TrainConfig(
        workers=3,
        storage=tmp_path,
        epochs=np.int64(2),
        seed=1e3,
        exact=np.True_,
        hang_seconds=5,
        keep_best=None,
        warmup_epochs=np.float32(0.5),
    )
    config.check()
    texts = [repr(config.values[name]) for name in ("workers", "storage", "epochs", "seed", "exact", "hang_seconds")]
    assert texts == ["'3'", repr(str(tmp_path)), "2", "1000", "True", "5.0"]
    assert repr(config.rate.warmup_epochs) == "0.5"


def test_the_constructor_takes_settings_and_sections():
    settings = {"run": "a", "strategy": "mirrored", "workers": "1", "global_batch_size": 64}
    config = TrainConfig(**settings)
    assert config == TrainConfig.of(**settings) == TrainConfig().replace(**settings)
    assert dataclasses.replace(config, batch=TrainConfig().batch) == TrainConfig(
        run="a", strategy="mirrored", workers=1
    )
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_run_of_a_program_has_a_whole_name():
    config = TrainConfig.among({"run": "train", "exact": True})
    first = config.of_program("/runs/train", 1)
    assert (config.run_name, first.run_name, first.run.name, first.run.storage) == (
        "train",
        "train/1",
        "1",
        "/runs/train",
    )
    assert pickle.loads(pickle.dumps(first.replace(epochs=3))).run_name == "train/1"
    assert first.is_from_flags


def test_flags_are_checked_as_flags():
    config = TrainConfig.among({"keep": 0})
    with pytest.raises(ConfigError, match="--keep 0: expected a number, 1 or more"):
        config.check()
    config = TrainConfig.among({"exact": True}).replace(reduction="float")
    with pytest.raises(ConfigError, match=r"--exact with --reduction float: .*Leave out --reduction float, or --exact"):
        config.check()


@pytest.mark.parametrize(
    ("flags", "arguments"),
    [
        ("--exact with --no-jit: leave out --exact.", "exact=True with jit=False: leave out exact=True."),
        ("take --reduction fixed, or --logical-shards 4.", "take reduction='fixed', or logical_shards=4."),
        ("--epochs and --steps exclude each other", "epochs and steps exclude each other"),
        ("--run a: no. Choose another --run name.", "run='a': no. Choose another run name."),
        ("go on with --run a-2, or --workers 1:4.", "go on with run='a-2', or workers='1:4'."),
        ("--notice-url http://a:1: expected", "notice_url='http://a:1': expected"),
        ("--gpus-per-worker 0.5 with --use-gpu; more --workers", "gpus_per_worker=0.5 with use_gpu=True; more workers"),
        ("ray job submit --working-dir .", "ray job submit --working-dir ."),
    ],
)
def test_a_message_names_what_a_program_passes(flags, arguments):
    assert as_keyword_arguments(flags) == arguments


def test_defaults_are_fine():
    TrainConfig().check()


@pytest.mark.parametrize("run", ["default", "mnist-1", "a_b.c", "7", "Grün"])
def test_good_run_names(run):
    TrainConfig.of(run=run).check()


@pytest.mark.parametrize(("workers", "expected"), [("1", (1, 1)), ("2", (2, 2)), ("1:4", (1, 4)), ("3:3", (3, 3))])
def test_worker_range(workers, expected):
    assert TrainConfig.of(workers=workers).cluster.worker_range == expected


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("epoch", "epochs"), ("worker", "workers"), ("global_batchsize", "global_batch_size"), ("kep", "keep")],
)
def test_unknown_setting_has_a_suggestion(wrong, right):
    with pytest.raises(ConfigError, match=f"unknown setting '{wrong}'.*Did you mean '{right}'"):
        TrainConfig(**{wrong: 1})


def test_unknown_setting_without_a_near_one_lists_all():
    with pytest.raises(
        ConfigError, match=r"unknown setting 'xyzzy'.*Settings are: .*checkpoint_every_seconds.*workers"
    ):
        TrainConfig.of(xyzzy=1)


def test_of_puts_settings_into_their_sections():
    config = TrainConfig.of(run="a", workers="1:4", epochs=2, global_batch_size=64, jit=True, keep=5)
    assert config.run.run == "a"
    assert config.cluster.workers == "1:4"
    assert config.length.epochs == 2
    assert config.batch.global_batch_size == 64
    assert config.compute.jit is True
    assert config.checkpoints.keep == 5


def test_a_configuration_takes_what_it_knows_of_a_jobs_flags():
    config = TrainConfig.among({"learning_rate": 0.1, "ps": 3, "workers": "1:4", "dropout": None, "jit": True})
    assert config == TrainConfig.of(ps=3, workers="1:4", jit=True)


def test_replace_leaves_the_rest_and_the_original():
    before = TrainConfig.of(epochs=2, seed=3)
    after = before.replace(seed=4)
    assert (after.length.epochs, after.batch.seed, before.batch.seed) == (2, 4, 3)


def test_sections_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().batch.seed = 1


def test_names_of_settings_are_unique():
    config = TrainConfig()
    names = [f.name for s in dataclasses.fields(config) for f in dataclasses.fields(getattr(config, s.name))]
    assert len(names) == len(set(names))


def test_lasting_fills_only_what_the_user_left_open():
    assert TrainConfig().lasting(epochs=3).length.epochs == 3
    assert TrainConfig.of(epochs=7).lasting(epochs=3).length.epochs == 7
    assert TrainConfig.of(steps=7).lasting(epochs=3).length.epochs is None


@pytest.mark.parametrize("workers", ["1", "2", "3", "4", "1:4"])
def test_logical_shards_are_the_same_for_few_workers(workers):
    assert TrainConfig.of(workers=workers).logical_shards == MIN_LOGICAL_SHARDS


@pytest.mark.parametrize(
    ("workers", "each", "shards"),
    [("1", 1, 1), ("2", 1, 2), ("1:3", 1, 4), ("8", 0.5, 8), ("1:16", 1, 16), ("1", 4, 4), ("1", 6, 8)],
)
def test_on_gpus_there_are_no_more_logical_shards_than_gpus_need(workers, each, shards):
    assert TrainConfig.of(workers=workers).shards_on_gpus(each) == shards


def test_logical_shards_grow_with_workers_and_can_be_given():
    assert TrainConfig.of(workers="1:8").logical_shards == 8
    assert TrainConfig.of(workers="1:8", logical_shards=16).logical_shards == 16


def test_storage_uri(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert TrainConfig().storage_uri == f"{tmp_path}/raytf-runs"
    assert TrainConfig.of(storage="runs").storage_uri == os.path.join(tmp_path, "runs")
    assert TrainConfig.of(storage="s3://b/~/x").storage_uri == "s3://b/~/x"


@pytest.mark.parametrize(("size", "shards"), [(130, 4), (3, 4), (1, 4), (7, 5), (1000, 7)])
def test_any_batch_can_be_cut_but_with_parameter_servers_whose_advice_works(size, shards):
    config = TrainConfig.of(global_batch_size=size, logical_shards=shards, workers="1")
    config.check()
    config = config.replace(strategy="parameter-server", sync_replicas=True)
    with pytest.raises(ConfigError) as refused:
        config.check()
    advice = re.findall(r"(global_batch_size|logical_shards)=(\d+)", str(refused.value).partition("Use ")[2])
    assert advice
    for name, value in advice:
        config.replace(**{name: int(value)}).check()


@pytest.mark.parametrize(("workers", "shards"), [("1", 4), ("2", 4), ("4", 4), ("5", 8), ("1:9", 16)])
def test_default_shards_are_a_power_of_two_that_divides_the_default_batch(workers, shards):
    config = TrainConfig.of(workers=workers)
    config.check()
    assert config.logical_shards == shards


def test_a_batch_is_one_part_of_asynchronous_workers_else_all_aggregated():
    alone = TrainConfig.of(strategy="parameter-server", workers="1:6", global_batch_size=50)
    alone.check()
    assert (alone.logical_shards, alone.parts, alone.strategy.helpers) == (1, 1, 2)
    together = alone.replace(sync_replicas=True, global_batch_size=64, ps=3)
    together.check()
    assert (together.logical_shards, together.parts, together.strategy.helpers) == (8, 6, 4)
    assert together.replace(replicas_to_aggregate=2).parts == 2
    assert TrainConfig.of(workers="3").strategy.helpers == 0
