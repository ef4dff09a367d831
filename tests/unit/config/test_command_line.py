"""Commands as processes: flags in; one line and an exit code out."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import typing

import pytest

from raytf.config import setting
from raytf.config.train_config import TrainConfig

SECTIONS = typing.get_type_hints(TrainConfig).values()
SCRIPT = """
    import json, sys, time
    from dataclasses import asdict, dataclass, field
    import raytf

    @dataclass(frozen=True)
    class Job:
        '''A job.'''
        act: str = "show"
        '''What to do.'''
        train: raytf.Flags = field(default_factory=raytf.TrainConfig)

    def main(job: Job) -> None:
        if job.act == "show":
            print(json.dumps(asdict(job.train)))
        elif job.act == "check":
            job.train.check()
        elif job.act == "storage":
            raise raytf.StorageError("no space", "full")
        elif job.act == "job":
            raise raytf.JobError("your callback raised ZeroDivisionError: division by zero", "Traceback: line 7")
        elif job.act == "defect":
            raise KeyError("a defect")
        elif job.act == "interrupt":
            raise KeyboardInterrupt
        elif job.act == "wait":
            print("ready", flush=True)
            while True:
                time.sleep(1)
        elif job.act == "begin-ray":
            from raytf import _process
            with _process.held_back():
                print("ready", flush=True)
                time.sleep(2)
                print("begun", flush=True)
            time.sleep(60)
        elif job.act == "thread":
            import threading
            threading.Thread(target=threading.Event().wait).start()  # as a storage call that is never answered
            print("said before")
            raise raytf.ConfigError("wrong")

    raytf.cli(main)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    script = tmp_path_factory.mktemp("cli") / "job.py"
    script.write_text(textwrap.dedent(SCRIPT))

    def start(*args):
        env = os.environ | {"COLUMNS": "80"}
        return subprocess.run([*start.command, *args], capture_output=True, text=True, timeout=60, env=env)

    start.command = [sys.executable, str(script)]
    return start


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], None),
        (["--use-gpu"], True),
        (["--no-use-gpu"], False),
        (["--use-gpu", "False"], False),
        (["--use-gpu", "--run", "a"], True),
        (["--run", "a", "--no-use-gpu", "--keep", "2"], False),
    ],
    ids=["open", "on", "off", "value", "then-flag", "between-flags"],
)
def test_gpu_switches(run, args, expected):
    done = run(*args)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["cluster"]["use_gpu"] is expected


@pytest.mark.parametrize(("args", "expected"), [([], True), (["--no-warm-workers"], False)])
def test_warm_workers_can_be_switched_off(run, args, expected):
    done = run(*args)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["cluster"]["warm_workers"] is expected


def test_flags_have_no_prefixes(run):
    done = run("--run", "a", "--workers", "1:4", "--epochs", "2", "--global-batch-size", "64", "--jit", "--keep", "9")
    assert done.returncode == 0, done.stderr
    config = json.loads(done.stdout)
    assert (config["run"]["run"], config["cluster"]["workers"], config["length"]["epochs"]) == ("a", "1:4", 2)
    assert (config["batch"]["global_batch_size"], config["compute"]["jit"], config["checkpoints"]["keep"]) == (
        64,
        True,
        9,
    )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--act", "check", "--global-batch-size", "0"], "error: --global-batch-size 0"),
        (["--act", "check", "--workers", "x"], "error: --workers x"),
        (["--act", "storage"], "error: no space"),
    ],
    ids=["batch", "workers", "storage"],
)
def test_a_refusal_is_one_line_and_exit_code_2(run, args, words):
    done = run(*args)
    assert done.returncode == 2
    assert done.stderr.startswith(words)
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_an_error_of_the_job_shows_its_traceback_and_exits_1(run):
    done = run("--act", "job")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "Traceback: line 7",
        "error: your callback raised ZeroDivisionError: division by zero",
    ]


def test_a_defect_keeps_its_traceback(run):
    done = run("--act", "defect")
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr
    assert "KeyError: 'a defect'" in done.stderr


def test_an_interrupt_says_how_to_go_on(run):
    done = run("--act", "interrupt")
    assert done.returncode == 130
    assert done.stderr.splitlines() == ["interrupted; the same command continues from the last checkpoint."]


@pytest.mark.parametrize(
    ("act", "number"), [("wait", signal.SIGTERM), ("wait", signal.SIGHUP), ("begin-ray", signal.SIGTERM)]
)
def test_a_signal_ends_a_command_as_an_interrupt_does_with_a_code_of_its_own(run, act, number):
    # Where the tests run under nohup, or behind a shell's `&`, it would ignore signals as they do.
    command = ["env", f"--default-signal={number.name.removeprefix('SIG')}", *run.command, "--act", act]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with started:
        try:
            assert started.stdout.readline() == b"ready\n"
            started.send_signal(number)
            out, said = started.communicate(timeout=60)
        finally:
            started.kill()
    text = f"told to stop ({number.name}); the same command continues from the last checkpoint.\n"
    assert (started.returncode, said.decode()) == (128 + number, text)
    assert out == (b"begun\n" if act == "begin-ray" else b""), "what must not be interrupted was"


def test_a_hanging_thread_does_not_hold_the_exit_nor_swallow_output(run):
    done = run("--act", "thread")
    assert (done.returncode, done.stdout, done.stderr) == (2, "said before\n", "error: wrong\n")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--epoch", "3"], "--epoch: unknown flag. Did you mean --epochs?"),
        (["--epoch=3"], "--epoch: unknown flag. Did you mean --epochs?"),
        (["--zzz"], "--zzz: unknown flag. --help lists the flags."),
        (["--epochs", "two"], "--epochs two: expected a whole number."),
        (["--epochs"], "--epochs: expected a whole number, such as --epochs 2."),
        (["--keep", "--exact"], "--keep: expected a whole number, such as --keep 3."),
        (["--hang-seconds", "soon"], "--hang-seconds soon: expected a number."),
        (
            ["--mixed-precision", "bfloat"],
            "--mixed-precision bfloat: expected one of off, bfloat16, float16. Did you mean bfloat16?",
        ),
        (["train"], "train: expected a flag, such as --help."),
        (["--epochs", "0"], "--epochs 0: expected a number, 1 or more."),
        (["--workers", "two"], "--workers two: expected a number such as 2, or the fewest and the most such as 1:4 "
         "(both at least 1)."),
        (["--global_batch_size", "-3"], "--global-batch-size -3: expected a number, 1 or more."),
    ],
)  # fmt: skip
def test_what_no_run_can_have_is_refused_before_the_program_does_anything(run, args, message):
    done = run("--act", "defect", *args)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {message}\n")


def test_help_that_nobody_reads_ends_quietly(run):
    done = subprocess.Popen([*run.command, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    done.stdout.close()
    assert (done.wait(60), done.stderr.read()) == (128 + signal.SIGPIPE, b"")
    done.stderr.close()


def test_help_shows_what_is_usual_and_help_all_every_setting(run):
    usual, done = run("--help"), run("--help-all")
    assert (usual.returncode, done.returncode) == (0, 0)
    assert usual.stdout.startswith(f"usage: python {run.command[1]} [flags]\n\nA job.\n\n  --act TEXT")
    assert "--workers N|MIN:MAX" in usual.stdout
    assert "--logical-shards" not in usual.stdout
    assert all(f" {its.flag}" in done.stdout for section in SECTIONS for its in setting.of(section))
    assert max(map(len, usual.stdout.splitlines()[1:])) <= 80  # the first one has the path of the program
