"""Commands as processes: flags in; one line and an exit code out."""

import json
import signal
import subprocess
import sys
import textwrap

import pytest

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
        return subprocess.run([*start.command, *args], capture_output=True, text=True, timeout=60)

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
    assert done.stderr.splitlines() == ["interrupted; the same command goes on from the last checkpoint."]


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
    text = f"told to stop ({number.name}); the same command goes on from the last checkpoint.\n"
    assert (started.returncode, said.decode()) == (128 + number, text)
    assert out == (b"begun\n" if act == "begin-ray" else b""), "what must not be interrupted was"


def test_a_hanging_thread_does_not_hold_the_exit_nor_swallow_output(run):
    done = run("--act", "thread")
    assert (done.returncode, done.stdout, done.stderr) == (2, "said before\n", "error: wrong\n")


def test_an_unknown_flag_exits_2_and_names_it(run):
    done = run("--epoch", "3")
    assert done.returncode == 2
    assert "--epoch" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_shows_every_setting(run):
    done = run("--help")
    assert done.returncode == 0
    shown = (
        "--run",
        "--storage",
        "--workers",
        "--use-gpu",
        "--no-use-gpu",
        "--epochs",
        "--steps",
        "--logical-shards",
        "--keep",
    )
    assert [flag for flag in shown if flag not in done.stdout] == []
