"""The command's decisions: what must stay, what a job says of its flags, and one clear line for what cannot be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raytf.config.objective import MetricObjective
from raytf.config.train_config import TrainConfig
from raytf.errors import ConfigError, RunMismatchError
from raytf.storage.storage import Storage
from raytf.tune import search_record
from raytf.tune.space import SearchSpace
from raytf.tune.trial import reason
from raytf.tune.tuner import Search, describe, identity, run

ROOT = Path(__file__).parents[3]
MNIST = str(ROOT / "jobs" / "mnist.py")
PS = "parameter-server"
ONE = ["--search", "learning_rate=grid(0.1)"]


def identity_of(*texts: str, **settings: Any) -> dict[str, str]:
    """Of a search over `texts`, by a job whose flags have these values."""
    config = TrainConfig.of(**settings)
    values = {name: getattr(getattr(config, section), name) for name, section in config.settings.items()}
    search = Search(MNIST, texts, "tune", "s3://a", MetricObjective.of("val_loss"))
    return identity(search, SearchSpace(texts), {"learning_rate": 0.1, "dropout": 0.5} | values)


#: Settings of raytf that a trial's learning depends on; a new one is either here or may change while a search goes on.
LEARNED = (
    *("cpus_per_worker", "epochs", "steps", "global_batch_size", "logical_shards", "seed", "scale_learning_rate"),
    *("base_batch_size", "warmup_epochs", "mixed_precision", "jit", "exact", "reduction", "compress_gradients"),
)


def test_a_search_that_goes_on_must_keep_what_its_trials_learn_from():
    kept = {name.removeprefix("--").replace("-", "_") for name in identity_of("dropout=grid(0,0.5)")}
    of_search = {"job", "search", "metric", "scheduler", "tune_seed", "try_default"}
    assert kept == {*LEARNED, "learning_rate", *of_search}
    assert identity_of("dropout=grid(0,0.5)", seed=1)["--seed"] == "1"


@pytest.mark.parametrize(
    "settings",
    [
        {"workers": "1:4", "use_gpu": False},
        {"show_cluster": True, "log_device_placement": True, "communication": "ring"},
        {"strategy": "mirrored", "logical_devices": 2},
        {"histograms_every": 10, "verbose": True},
        {"keep": 9, "keep_best": "val_loss", "checkpoint_every_steps": 5},
    ],
    ids=str,
)
def test_a_search_may_continue_with_other_values_of_what_changes_no_result(settings: dict[str, Any]):
    assert identity_of("dropout=grid(0,0.5)", **settings) == identity_of("dropout=grid(0,0.5)")


def test_a_search_with_parameter_servers_keeps_how_they_learn_not_how_many():
    mirrored, asynchronous = identity_of("dropout=grid(0,1)"), identity_of("dropout=grid(0,1)", strategy=PS)
    assert asynchronous == mirrored | {"--strategy": PS, "--sync-replicas": "False"}
    assert identity_of("dropout=grid(0,1)", strategy=PS, ps=3) == asynchronous
    together = identity_of("dropout=grid(0,1)", strategy=PS, sync_replicas=True)
    assert together["--sync-replicas"] == "True"
    assert identity_of("dropout=grid(0,1)", strategy=PS, sync_replicas=True, replicas_to_aggregate=1) == together


def test_a_search_over_strategies_does_not_keep_that_of_one_trial():
    text = f"strategy=grid(mirrored,'{PS}')"
    assert identity_of(text, strategy=PS)["--search"] == identity_of(text)["--search"]
    assert "--strategy" not in identity_of(text, strategy=PS)


def test_a_job_tells_what_its_flags_say():
    values = describe(MNIST, ["--learning-rate=0.5", "--workers", "1:3"])
    assert values["learning_rate"] == 0.5
    assert values["workers"] == "1:3"
    assert values["epochs"] is None


@pytest.mark.parametrize(
    ("job", "flags", "words"),
    [
        ("jobs/none.py", [], "jobs/none.py: there is no such file"),
        (MNIST, ["--learning-rat=1"], "--learning-rat: unknown flag. Did you mean --learning-rate"),
        (MNIST, ["--learning-rate=x"], "learning-rate"),
    ],
)
def test_flags_that_a_job_refuses_are_told(job: str, flags: list[str], words: str):
    with pytest.raises(ConfigError, match=words) as caught:
        describe(job, flags)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("page", ["print('no flags')", "import raytf\nraise SystemExit(0)"])
def test_a_job_without_raytfs_flags_is_refused(tmp_path: Path, page: str):
    job = tmp_path / "job.py"
    job.write_text(page)
    with pytest.raises(ConfigError, match=r"did not report its flags.*raytf\.cli\(main\)"):
        describe(str(job), [])


@pytest.mark.parametrize(
    ("output", "code", "expected"),
    [
        ("a\nerror: no such bucket\n", 2, "no such bucket"),
        ("error: first\nmore\nerror: last\nwords", 1, "last"),
        ("Traceback\nValueError: x\n", 1, "exit code 1: ValueError: x"),
        ("epoch 1\n", -9, "killed by SIGKILL: epoch 1"),
        ("", 3, "exit code 3"),
    ],
)
def test_why_a_command_failed(output: str, code: int, expected: str):
    assert reason(output, code) == expected


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (ONE, ["No job given", "raytf tune jobs/mnist.py"]),
        ([MNIST], ["nothing to search", "--search 'learning_rate="]),
        ([MNIST, "--search", "learning_rate=1"], ["--search 'learning_rate=1'", "none of uniform"]),
        ([MNIST, *ONE, "--trials", "0"], ["--trials 0", "1 or more"]),
        ([MNIST, *ONE, "--trials", "2"], ["--trials 2", "the grid has 1 points"]),
        ([MNIST, *ONE, "--metric", "something"], ["--metric something", "max:METRIC"]),
        ([MNIST, *ONE, "--name", "a/b"], ["a/b", "letters, digits"]),
        ([MNIST, *ONE, "--", "--run", "a"], ["--run belongs to the search", "--name"]),
        ([MNIST, *ONE, "--", "--status_file=a"], ["--status-file belongs to the search"]),
        ([MNIST, "--search", "storage=grid(a,b)"], ["--storage belongs to the search"]),
        ([MNIST, *ONE, "--", "--epoch", "1"], ["refuses", "--epoch"]),
        ([MNIST, *ONE, "--flags=--data 'digits"], ['--flags "--data \'digits"', "no closing quotation", "`--`"]),
        ([MNIST, "--search", "dropout=quniform(0,0.5,0.3)"], ["HIGH 0.5 is not a multiple of STEP 0.3"]),
        ([MNIST, "--search", "seed=randint(0,1e20)"], ["seed=randint(0, 1e+20)", "no value can be drawn"]),
        ([MNIST, *ONE, "--flags=--workers 0"], ["--workers 0", "1:4"]),
        ([MNIST, *ONE, "--flags=--strategy mirrored --workers 2"], ["--workers 2 with --strategy mirrored"]),
    ],
)
def test_bad_commands_end_in_one_line(tmp_path: Path, args: list[str], words: list[str]):
    command = [sys.executable, "-c", "from raytf.commands.main import main; main()", "tune"]
    where = [] if "--" in args else ["--storage", str(tmp_path)]
    done = subprocess.run([*command, *where, *args], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    for word in words:
        assert word in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("fields", "lacking"),
    [
        ("learning_rate: float = 0.1", "--workers"),
        ("learning_rate: float = 0.1\n    train: raytf.WorkerFlags = raytf.WorkerFlags()", "--run"),
    ],
)
def test_a_job_without_the_flags_of_a_run_is_refused_before_a_search(tmp_path: Path, fields: str, lacking: str):
    page = "from dataclasses import dataclass\nimport raytf\n@dataclass(frozen=True)\nclass Job:\n    {}\n"
    job = tmp_path / "job.py"
    job.write_text(page.format(fields) + "def main(mine: Job): pass\nif __name__ == '__main__': raytf.cli(main)\n")
    texts = ["learning_rate=grid(0.1)"]
    with pytest.raises(ConfigError, match=f"the job has no flag {lacking}. Its dataclass needs `train: raytf.Flags`"):
        run(Search(str(job), texts, "tune", str(tmp_path / "runs"), MetricObjective.of("val_loss")))
    assert not (tmp_path / "runs").exists()


def test_another_search_under_the_same_name_is_refused_before_a_trial_starts(tmp_path: Path):
    asked = Search(MNIST, ["dropout=grid(0,0.5)"], "tune", str(tmp_path), MetricObjective.of("val_loss"))
    values = describe(MNIST, ["--dropout", "0.5"])
    kept = identity(asked, SearchSpace(["dropout=grid(0,0.25)"]), values)
    search_record.keep_identity(Storage(str(tmp_path)).child("tune"), kept, "tune")
    with pytest.raises(RunMismatchError, match=r"search 'tune' in storage has other settings: --search: .*--name"):
        run(asked)
    assert [found.name for found in (tmp_path / "tune").iterdir()] == ["search"], "a trial has begun"
