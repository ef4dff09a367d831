"""A run's life after training, by commands: exported, served under load and faults, and used for predictions."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest

import raytf
from benchmarks.serving import load as serve_load
from raytf.inference import versions
from raytf.storage.storage import Storage
from raytf.testing import Job, environment
from raytf.testing.processes import free_port
from tests.ray.conftest import MNIST_JOB, PATIENCE, result_of

RAYTF = [sys.executable, "-c", "from raytf.commands.main import main; main()"]
TOKEN = "a token of the test"
MODEL = "/v1/models/digits"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, cluster: dict[str, str]) -> Path:
    """A finished run with checkpoints on its way; its end is version 1, step 12 is version 2."""
    folder = tmp_path_factory.mktemp("after")
    flags = ["--data", "digits", "--epochs", "6", "--workers", "1", "--no-warm-workers"]
    flags += ["--checkpoint-every-steps", "12", "--keep", "9"]
    command = [sys.executable, str(MNIST_JOB), *flags, "--storage", str(folder), "--run", "digits"]
    with Job(command, folder / "train.log", environment(RAY_ADDRESS=cluster["RAY_ADDRESS"])) as job:
        job.wait()
    with Job([*RAYTF, "export", str(folder / "digits"), "--step", "12"], folder / "export.log", environment()) as job:
        assert job.wait().splitlines()[-1] == f"{folder / 'digits' / 'export' / '2'} is version 2"
    return folder / "digits"


@pytest.fixture(scope="module")
def test_images() -> tuple[list, np.ndarray]:
    """The test images of the digits as JSON has them, and their labels."""
    source = raytf.load_images("digits").test
    images, labels = source.take(np.arange(source.records))
    return images.tolist(), labels


class Server:
    """A server that was started; `ask` asks it."""

    def __init__(self, job: Job, port: int):
        self.job, self.port, self.url = job, port, f"http://127.0.0.1:{port}{MODEL}"

    def ask(self, path: str, body: Any = None, token: str | None = TOKEN, **headers: str) -> tuple[int, Any]:
        """Status and JSON of an answer."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        given = headers | ({"Authorization": f"Bearer {token}"} if token else {})
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, given)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def states(self) -> dict[int, str]:
        """What the server says of each version."""
        status, answer = self.ask(MODEL)
        assert status == 200, answer
        return {int(row["version"]): row["state"] for row in answer["model_version_status"]}


def serving(log: Path, *flags: object, port: int | None = None, **env: str) -> Server:
    """Start a server and wait until it says that it serves."""
    port = port or free_port()
    command = [*RAYTF, "serve", *map(str, flags), "--port", str(port)]
    job = Job(command, log, environment(RAYTF_SERVE_TOKEN=TOKEN, **env))
    try:
        job.until(lambda: "try: " in job.output, PATIENCE)
    except BaseException:
        job.close()
        raise
    return Server(job, port)


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[Server]:
    """Version 2 and 1 behind a token, on a Ray of its own."""
    flags = ("--auth-token", "--versions", "latest:2", "--poll-seconds", 0.3, "--max-body-mb", 1)
    one = serving(run.parent / "serve.log", run, *flags)
    yield one
    one.job.close()


def test_requests_of_tensorflow_serving_are_answered(server: Server, run: Path, test_images):
    images, labels = test_images
    status, rows = server.ask(f"{MODEL}/versions/1:predict", {"instances": images})
    assert status == 200
    accuracy = float((np.array(rows["predictions"]).argmax(-1) == labels).mean())
    assert abs(accuracy - result_of(run)["metrics"]["test_accuracy"]) < 1e-6
    status, columns = server.ask(
        f"{MODEL}/versions/1:predict", {"signature_name": "serving_default", "inputs": {"input_layer": images[:5]}}
    )
    assert status == 200
    np.testing.assert_allclose(columns["outputs"], rows["predictions"][:5], rtol=1e-5)
    # The newest version is the one of step 12.
    default, named = (server.ask(f"{MODEL}{place}:predict", {"instances": images[:3]}) for place in ("", "/versions/2"))
    assert default == named
    assert not np.allclose(default[1]["predictions"], rows["predictions"][:3], atol=1e-3)

    assert server.states() == {1: "AVAILABLE", 2: "AVAILABLE"}
    status, answer = server.ask(f"{MODEL}/metadata")
    assert (status, answer["model_spec"]) == (200, {"name": "digits", "signature_name": "", "version": "2"})
    taken = answer["metadata"]["signature_def"]["signature_def"]["serving_default"]["inputs"]["input_layer"]
    assert [dim["size"] for dim in taken["tensor_shape"]["dim"]] == ["-1", "8", "8", "1"]
    assert server.ask("/healthz", token=None) == (200, {"status": "ok", "model": "digits", "version": "2"})


def test_what_is_said_at_the_start_is_a_request_that_works(server: Server):
    (line,) = (line for line in server.job.output.splitlines() if "try: " in line)
    command = line.partition("try: ")[2].replace("TOKEN", TOKEN)
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True).stdout
    assert len(json.loads(answer)["predictions"][0]) == 10


def test_bad_requests_get_a_clear_4xx(server: Server):
    predict = f"{MODEL}:predict"
    for path, body, status, text in (
        (predict, b"{", 400, "JSON Parse error"),
        (predict, {"instances": [1]}, 400, "has shape [1]. Expected float32 [?,8,8,1]"),
        (predict, {"instances": [1], "signature_name": "no"}, 400, "not found in signature def"),
        (f"{MODEL}:classify", {"examples": [{"x": 1}]}, 400, "raytf serves :predict only"),
        (f"{MODEL}/versions/7:predict", {"instances": [1]}, 404, "Specific(digits, 7). Versions served: 1, 2"),
        ("/v1/models/half:predict", {"instances": [1]}, 404, "Servable not found for request: Latest(half)"),
        (f"{MODEL}/versions/7", None, 404, "Could not find version 7"),
        (predict, None, 400, f"Malformed request: GET {predict}"),
        (predict, b" " * (32 << 20), 413, "larger than the limit of 1 MiB"),
        ("/nowhere", None, 404, "Not found"),
    ):
        found, answer = server.ask(path, body)
        assert (found, set(answer)) == (status, {"error"})
        assert text in answer["error"]
    for token in (None, "another", ""):
        assert server.ask(predict, {"instances": [1]}, token=token)[0] == 401
        assert server.ask(MODEL, token=token)[0] == 401


def test_a_new_version_goes_live_under_load_without_an_error(server: Server, run: Path, capsys):
    models, live = Storage(str(run / "export")), threading.Event()

    def publish(done: int) -> None:
        if done == 300:
            versions.publish(str(run / "export" / "1"), models, {"step": 72})

    def watch() -> None:
        while not live.is_set() and 3 not in server.states():
            time.sleep(0.1)
        live.set()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    first = outcome = serve_load.run(server.url, 2000, 16, token=TOKEN, on=publish)
    deadline = time.monotonic() + PATIENCE
    while not live.is_set() and not outcome.errors and time.monotonic() < deadline:
        outcome = serve_load.run(server.url, 200, 16, token=TOKEN)
    live.set()
    watcher.join(60)
    with capsys.disabled():
        print(f"\n2,000 requests: {first.errors} errors, p50 {first.p50} ms, p99 {first.p99} ms, {first.per_second}/s")
    assert (first.requests, first.errors, first.said) == (2000, 0, {"200": 2000})
    assert outcome.errors == 0, outcome.said
    assert server.states() == {2: "AVAILABLE", 3: "AVAILABLE"}
    assert server.ask("/healthz")[1]["version"] == "3"


def test_a_version_that_cannot_be_loaded_changes_nothing(server: Server, run: Path):
    broken = run / "export" / "9"
    before = server.states()
    broken.mkdir()
    (broken / "saved_model.pb").write_bytes(b"no model")
    server.job.until(lambda: server.states() == {9: "END", **before})
    assert server.ask("/healthz")[1]["version"] == str(max(before))
    shutil.rmtree(broken)
    server.job.until(lambda: server.states() == before)


def test_a_replica_that_dies_is_replaced(server: Server):
    for replica in server.job.processes("ServeReplica"):
        replica.send_signal(signal.SIGKILL)
        gone = replica.pid

    def answers() -> bool:
        try:
            return server.ask("/healthz")[0] == 200
        except (OSError, ValueError):
            return False

    server.job.until(lambda: not psutil.pid_exists(gone) and answers())
    assert server.states()


def test_sigterm_drains_and_leaves_nothing(server: Server):
    answered: list[serve_load.Outcome] = []
    load = threading.Thread(target=lambda: answered.append(serve_load.run(server.url, 3000, 8, token=TOKEN)))
    load.start()
    time.sleep(1)
    members = server.job.processes()
    server.job.process.send_signal(signal.SIGTERM)
    assert server.job.ended() == 0
    load.join(PATIENCE)
    (outcome,) = answered
    assert outcome.said["200"] > 0
    # What came after the signal was refused; what was under way was answered.
    assert not any(text.startswith("500") for text in outcome.said), outcome.said
    assert "draining" in server.job.output
    assert "stopped after" in server.job.output.splitlines()[-1]
    assert not psutil.wait_procs(members, timeout=60)[1]


def test_a_cluster_serves_too_and_nobody_deletes_what_another_serves(
    run: Path, cluster: dict[str, str], tmp_path: Path
):
    address = {"RAY_ADDRESS": cluster["RAY_ADDRESS"]}
    broken = tmp_path / "digits" / "1"
    broken.mkdir(parents=True)
    (broken / "saved_model.pb").write_bytes(b"no model")
    # Version 1 is pinned, though a newer one is there.
    one = serving(tmp_path / "one.log", run, "--version", 1, "--replicas", "1:2", **address)
    two = None
    try:
        for flags, text in (
            ((str(run), "--port", str(free_port())), f"already runs on this cluster, on port {one.port}"),
            ((str(run), "--name", "other", "--port", str(one.port)), "already serves the application 'raytf-digits'"),
            ((str(broken), "--port", str(one.port)), "The running application stays as it is"),
            ((str(run), "--port", str(one.port), "--cpus-per-replica", "99"), "a replica needs 99 CPU"),
        ):
            refused = subprocess.run(
                [*RAYTF, "serve", *flags], env=environment(**address), capture_output=True, text=True, timeout=PATIENCE
            )
            assert refused.returncode == 2
            assert text in refused.stderr.splitlines()[-1]
            assert one.ask("/healthz", token=None) == (200, {"status": "ok", "model": "digits", "version": "1"})
        two = serving(tmp_path / "two.log", run, "--version", 2, port=one.port, **address)
        assert one.job.ended() == 0
        assert "another command has replaced it" in one.job.output
        assert two.ask("/healthz", token=None) == (200, {"status": "ok", "model": "digits", "version": "2"})
        two.job.process.send_signal(signal.SIGINT)
        assert two.job.ended() == 0
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", one.port), timeout=5).close()
    finally:
        one.job.close()
        if two is not None:
            two.job.close()
        end = [str(Path(sys.executable).with_name("serve")), "shutdown", "-y", "-a", cluster["dashboard"]]
        subprocess.run(end, capture_output=True, timeout=PATIENCE)


@pytest.fixture
def predict(run: Path, cluster: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """predict(INPUT, OUTPUT, *flags): a command, started on the cluster."""
    jobs: list[Job] = []

    def begin(*flags: object) -> Job:
        command = [*RAYTF, "predict", str(run / "export" / "1"), *map(str, flags)]
        jobs.append(
            Job(command, tmp_path / f"predict-{len(jobs)}.log", environment(RAY_ADDRESS=cluster["RAY_ADDRESS"]))
        )
        return jobs[-1]

    yield begin
    for job in jobs:
        job.close()


def test_predictions_for_a_data_set_are_beside_its_columns_in_order(predict, run: Path, tmp_path: Path, test_images):
    predict("digits", tmp_path / "p.parquet").wait()
    table = pq.read_table(tmp_path / "p.parquet")
    assert table.column_names == ["label", "prediction"]
    labels, scores = table["label"].to_numpy(), np.array(table["prediction"].to_pylist())
    np.testing.assert_array_equal(labels, test_images[1])
    assert abs((scores.argmax(-1) == labels).mean() - result_of(run)["metrics"]["test_accuracy"]) < 1e-6


def predictors() -> list[psutil.Process]:
    """Processes of Ray Data that hold a model, of any job on this machine."""
    named = ((p, " ".join(p.info["cmdline"] or [])) for p in psutil.process_iter(["cmdline"]))
    return [process for process, title in named if "MapWorker" in title and "Predictor" in title]


def test_a_killed_process_costs_no_prediction(predict, tmp_path: Path, test_images):
    images = np.tile(np.array(test_images[0], np.uint8), (100, 1, 1, 1))
    np.savez(tmp_path / "many.npz", image=images, id=np.arange(len(images)))
    before = {process.pid for process in predictors()}  # of a job that has ended, and that are about to
    job = predict(tmp_path / "many.npz", tmp_path / "p.csv", "--classes", "--batch-size", 16)

    def kill() -> bool:
        for process in predictors():
            if process.pid not in before:
                time.sleep(1)  # it is at work, not only there
                process.kill()
                return True
        return False

    job.until(kill)
    job.wait()
    rows = np.genfromtxt(tmp_path / "p.csv", delimiter=",", names=True)
    np.testing.assert_array_equal(rows["id"], np.arange(len(images)))
    np.testing.assert_array_equal(rows["class"][: len(images) // 100], rows["class"][-(len(images) // 100) :])


def test_lines_of_json_are_read_in_order_and_nothing_beside_them(predict, run: Path, tmp_path: Path, test_images):
    folder = tmp_path / "lines"
    folder.mkdir()
    labels = test_images[1].tolist()
    rows = [
        json.dumps({"image": np.ravel(x).tolist(), "label": y}) for x, y in zip(test_images[0], labels, strict=True)
    ]
    # A column that is whole in one file and decimal in the next.
    last = json.dumps({"image": [0] * 64, "label": 0.5})
    for name, lines in (("10.jsonl", rows), ("9.jsonl", [last]), ("9.jsonl.bak", rows), ("_mark.json", ["{}"])):
        (folder / name).write_text("\n".join(lines))
    job = predict(folder, tmp_path / "p.parquet", "--classes", "--batch-size", 60)
    many = predict(folder, tmp_path / "q.parquet", "--workers", 4)
    job.wait()
    table = pq.read_table(tmp_path / "p.parquet").to_pandas()
    assert table["label"].tolist() == [*labels, 0.5]
    accuracy = float((table["class"] == table["label"])[:-1].mean())
    assert abs(accuracy - result_of(run)["metrics"]["test_accuracy"]) < 1e-6
    assert many.ended() == 2
    said = "--workers 4 needs 5 CPU, 1 of them to read the data, and this cluster has 4."
    assert said in many.output.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "csv", "images", "tfrecord"])
def test_all_kinds_of_files_are_read(predict, run: Path, tmp_path: Path, test_images, kind):
    import pandas
    from PIL import Image

    images, labels = np.array(test_images[0], np.uint8), test_images[1]
    folder = tmp_path / kind
    folder.mkdir()
    x: tuple[str, ...] = ()
    if kind == "parquet":
        half = len(images) // 2
        for i, part in enumerate((slice(0, half), slice(half, None))):
            frame = pandas.DataFrame({"image": [im.ravel().tolist() for im in images[part]], "label": labels[part]})
            frame.to_parquet(folder / f"{i}.parquet")
    elif kind == "csv":
        frame = pandas.DataFrame({f"p{i:02}": images.reshape(len(images), -1)[:, i] for i in range(64)})
        frame.assign(label=labels).to_csv(folder / "all.csv", index=False)
        x = ("--x", *[f"p{i:02}" for i in range(64)])
    elif kind == "tfrecord":
        np.savez(tmp_path / "test.npz", x=images, y=labels)
        convert = [*RAYTF, "data", "convert", str(tmp_path / "test.npz"), str(folder), "--to", "tfrecord"]
        subprocess.run(convert, env=environment(), check=True, timeout=PATIENCE)
    else:
        for i, image in enumerate(images):
            Image.fromarray(image[:, :, 0]).save(folder / f"{i:04}-{labels[i]}.png")
    predict(folder, tmp_path / "p.parquet", "--classes", *x).wait()
    table = pq.read_table(tmp_path / "p.parquet").to_pandas()
    if kind == "images":
        table["label"] = [int(Path(path).stem.rpartition("-")[2]) for path in table["path"]]
    assert table["label"].tolist() == labels.tolist()
    accuracy = float((table["class"] == table["label"]).mean())
    assert abs(accuracy - result_of(run)["metrics"]["test_accuracy"]) < 1e-6


@pytest.mark.slow
def test_more_requests_get_more_replicas(run: Path, tmp_path: Path):
    one = serving(tmp_path / "serve.log", run, "--replicas", "1:2", "--target-requests", 1)
    stop, outcomes = threading.Event(), []

    def load() -> None:
        while not stop.is_set():
            outcomes.append(serve_load.run(one.url, 500, 16))

    thread = threading.Thread(target=load)
    try:
        thread.start()
        one.job.until(lambda: len(one.job.processes("ServeReplica")) == 2)
    finally:
        stop.set()
        thread.join(PATIENCE)
        one.job.process.send_signal(signal.SIGTERM)
        code = one.job.ended()
        one.job.close()
    assert code == 0
    assert outcomes
    assert not any(outcome.errors for outcome in outcomes)


@pytest.mark.slow
def test_an_object_store_holds_models_and_predictions(run: Path, bucket, cluster: dict[str, str], tmp_path: Path):
    env = environment(RAY_ADDRESS=cluster["RAY_ADDRESS"], **bucket.env)
    for flags in (
        ("export", run, "--to", bucket.uri("models")),
        ("predict", bucket.uri("models"), "digits", bucket.uri("out/p.jsonl")),
    ):
        done = subprocess.run([*RAYTF, *map(str, flags)], env=env, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in bucket.get("out/p.jsonl").splitlines()]
    assert len(rows) == 360
    one = serving(
        tmp_path / "s.log", bucket.uri("models"), "--poll-seconds", 0.3, RAY_ADDRESS=env["RAY_ADDRESS"], **bucket.env
    )
    try:
        assert one.ask("/healthz")[1] == {"status": "ok", "model": "models", "version": "1"}
        for key in bucket.keys("models/1/"):
            bucket.put(key.replace("models/1/", "models/2/"), bucket.get(key))
        one.job.until(lambda: one.ask("/healthz")[1]["version"] == "2")
    finally:
        one.job.process.send_signal(signal.SIGTERM)
        one.job.ended()
        one.job.close()
