"""What a person gets wrong, typed for real: one line, the right exit code, and how long it took to be told.

    python -m tests.stress.mistakes

Ends with 1 where something is not told in one line or with another exit code. The seconds are for a quiet machine: 1.5
for what is known when the command line is read, 12 for mistakes in a model and its data; slower ones are marked.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from raytf.testing.storage_proxy import StorageProxy

ROOT = Path(__file__).resolve().parents[2]
AT_ONCE, OF_A_MODEL = 1.5, 12.0
_JOB = [sys.executable, str(ROOT / "jobs" / "mnist.py"), "--data", "digits"]
_RAYTF = [sys.executable, "-m", "raytf"]

#: Flags of a job -> words of the line.
FLAGS = {
    "--epochs 0": "--epochs 0",
    "--epochs -1": "--epochs -1",
    "--epochs two": "--epochs two",
    "--epochs": "--epochs: expected a whole number",
    "--steps 0": "--steps 0",
    "--steps 5 --epochs 2": "--epochs",
    "--workers two": "--workers two",
    "--workers 0": "--workers 0",
    "--workers 3:1": "--workers 3:1",
    "--workrs 2": "Did you mean --workers",
    "2": "expected a flag",
    "--global-batch-size 0": "--global-batch-size 0",
    "--warmup-epochs -1": "--warmup-epochs -1",
    "--learning-rate fast": "--learning-rate fast",
    "--model resnet": "--model resnet",
    "--model mpl": "Did you mean mlp",
    "--strategy mirored": "Did you mean mirrored",
    "--strategy mirrored --workers 4": "--workers 4",
    "--ps 2": "--ps",
    "--exact --reduction float": "--reduction float",
    "--seed x": "--seed x",
    "--keep 0": "--keep 0",
    "--hang-seconds -1": "--hang-seconds -1",
    "--checkpoint-every-steps -5": "--checkpoint-every-steps -5",
    "--notices amazon": "--notices amazon",
    "--track mlfow": "--track mlfow",
    "--run ../x": "--run '../x'",
    "--storage ftp://host/runs": "ftp",
    "--storage s3:/bucket": "two slashes",
    "--storage /proc/runs": "/proc/runs",
    "--storage / --run proc": "cannot write /",
    "--storage /dev/null/runs": "/dev/null/runs",
    "--status-file /no/such/folder/s.json": "--status-file",
}
#: Commands of raytf -> words of the line.
COMMANDS = {
    "shw": "Did you mean raytf show",
    "train": "Did you mean raytf run",
    "fit": "Did you mean raytf run",
    "show": "expected RUN",
    "show nope": "nope",
    "show train": "train",
    "runs /no/such/folder": "/no/such/folder",
    "report nope": "nope",
    "verify nope": "nope",
    "export nope": "nope",
    "serve nope": "nope",
    "predict nope in.csv out.csv": "nope",
    "predict nope": "expected INPUT",
    "rm": "No run given",
    "rm nope --yes": "is not a run",
    "replay nope --step 1": "nope",
    "replay nope": "expected --step",
    "bisect nope nope": "nope",
    "prove nope": "nope",
    "tune": "No job given",
    "tune nope.py --search learning_rate=grid(1,2)": "nope.py",
    f"tune {ROOT}/jobs/mnist.py --search learning_rate=unifrom(1,2)": "unifrom",
    "data convert": "expected SRC",
    "data convert digits out --to csv": "--to csv",
    "data check /no/such/folder": "/no/such/folder",
    "check nope.yaml": "nope.yaml",
    "init": "expected FOLDER",
    "init x --cluster aws-gpu-spt": "Did you mean aws-gpu-spot",
    "run": "No script given",
    "run nope.py": "nope.py",
    "ui --host 0.0.0.0": "--token",
    "ui /nonexistent": "/nonexistent",
    "node": "No command given",
}
#: Settings of a program -> words of the line.
SETTINGS = {
    "raytf.TrainConfig.of(exact='yes')": "exact='yes'",
    "raytf.TrainConfig(wrokers=2)": "Did you mean 'workers'",
    "raytf.TrainConfig(workers=2.5)": "workers=2.5",
    "raytf.TrainConfig(keep=0)": "keep=0",
}
#: What a program does wrong, as Python that follows `_PROGRAM` -> words of the line.
PROGRAMS = {
    "raytf.fit(model, x, y[:10], config=config)": "10",
    "raytf.fit(model, x[:, :3], y, config=config)": "3",
    "raytf.fit(model, x, y.astype(str), config=config)": "y has dtype",
    "raytf.fit(model, x, config=config)": "labels are missing",
    "raytf.fit(model, x[:0], y[:0], config=config)": "there are no records",
    "raytf.fit(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]), x, y, config=config)": "compile",
    "raytf.fit(lambda: None, (x, y), config=config)": "None",
    "raytf.fit(lambda: 1 / 0, (x, y), config=config)": "ZeroDivisionError",
    "model.compile('adam', 'mse'); raytf.fit(model, x, np.zeros((64, 3)), config=config)": "does not accept the labels",
    "raytf.fit(model, x, y, config=config.replace(epohcs=3))": "epohcs",
    "raytf.fit(model, x, y, batch_size=0, config=config)": "batch_size=0",
    "raytf.fit(model, x, y, exact='yes')": "exact='yes'",
    "raytf.fit(model, x, y, wrokers=2)": "Did you mean 'workers'",
    "raytf.fit(model, x, y, config={})": "config is a dict",
}
_OF_SETTINGS = """
import dataclasses
import raytf

@dataclasses.dataclass
class Job:
    pass

def main(job: Job):
    ...

raytf.cli(main)
"""
_PROGRAM = """
import dataclasses
import keras, numpy as np, raytf

@dataclasses.dataclass
class Job:
    pass

def main(job: Job):
    x, y = np.zeros((64, 4), "float32"), np.zeros(64, "int32")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy")
    config = raytf.TrainConfig.of(workers="1", storage="runs")
    ...

raytf.cli(main)
"""


@dataclass(frozen=True)
class Mistake:
    """What is typed, and what should be said.

    Attributes:
        name: for people.
        command: of the shell.
        words: that the line has.
        codes: one of which is the exit code.
        seconds: in which it should be told.
        before: a command that is typed first, and is none.
    """

    name: str
    command: list[str]
    words: str
    codes: tuple[int, ...] = (2,)
    seconds: float = AT_ONCE
    before: tuple[str, ...] = ()


def mistakes(folder: Path, refusing: str) -> Iterator[Mistake]:
    """Return all mistakes.

    Args:
        folder: to write programs into.
        refusing: HOST:PORT of an S3 server that refuses to write.
    """
    bucket = f"s3://bucket/runs?endpoint_override={refusing}&scheme=http&region=us-east-1"
    yield Mistake("mnist.py --storage s3://bucket/runs", [*_JOB, "--storage", bucket], "Check the credentials")
    for flags, words in FLAGS.items():
        yield Mistake(f"mnist.py {flags}", [*_JOB, *flags.split()], words)
    for text, words in COMMANDS.items():
        yield Mistake(f"raytf {text.replace(str(ROOT), '')}", [*_RAYTF, *text.split()], words, (1, 2))
    for number, (text, words) in enumerate(SETTINGS.items()):
        file = folder / f"settings-{number}.py"
        file.write_text(_OF_SETTINGS.replace("...", text))
        yield Mistake(f"program: {text}", [sys.executable, str(file)], words)
    for number, (text, words) in enumerate(PROGRAMS.items()):
        file = folder / f"program-{number}.py"
        file.write_text(_PROGRAM.replace("...", text))
        yield Mistake(f"program: {text}", [sys.executable, str(file)], words, (1, 2), OF_A_MODEL)
    finished = (*_JOB, "--steps", "2")
    yield Mistake("another model", [*finished, "--model", "mlp"], "pass --new", (2,), OF_A_MODEL, finished)
    copy = folder / "copy" / "mnist.py"
    copy.parent.mkdir()
    copy.write_text(Path(_JOB[1]).read_text())
    yield Mistake("another program", [sys.executable, str(copy), *finished[2:]], "--run NAME", (2,), OF_A_MODEL)


def wrong(mistake: Mistake, code: int, said: str) -> str:
    """What is wrong with an answer; empty where it is right."""
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    own = "Traceback" in said and mistake.seconds == OF_A_MODEL  # where the job's own code raised, it is shown
    if code not in mistake.codes:
        return f"exit code {code}"
    if len(errors) != 1 or ("Traceback" in said and not own):
        return f"{len(errors)} lines"
    return "" if mistake.words in errors[0] else f"it does not say {mistake.words!r}: {errors[0]}"


def main() -> None:
    """Run the command."""
    failed, slow, count = 0, 0, 0
    with tempfile.TemporaryDirectory(prefix="raytf-mistakes-") as home, StorageProxy("127.0.0.1:9") as server:
        server.refuse_writes()
        env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        env |= {"HOME": home, "PYTHONPATH": str(ROOT), "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
        for mistake in mistakes(Path(home), server.endpoint):
            if mistake.before:
                subprocess.run(mistake.before, cwd=home, env=env, capture_output=True, timeout=300, check=True)
            began = time.monotonic()
            done = subprocess.run(
                mistake.command, cwd=home, env=env, capture_output=True, text=True, timeout=300, check=False
            )
            seconds = time.monotonic() - began
            said = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", done.stdout + done.stderr)
            problem = wrong(mistake, done.returncode, said)
            count, failed, slow = count + 1, failed + bool(problem), slow + (seconds > mistake.seconds)
            late = " SLOW" if seconds > mistake.seconds else ""
            print(f"{seconds:5.1f} s{late}  {mistake.name}{f'   WRONG: {problem}' if problem else ''}", flush=True)
    print(f"{count} mistakes, {failed} told wrongly, {slow} slower than on a quiet machine")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
