"""Many requests at once to a server with TensorFlow Serving's REST API: errors, requests a second, latencies.

    raytf serve ~/raytf-runs/mnist                                                    # in one terminal
    python -m benchmarks.serving.load http://127.0.0.1:8501/v1/models/mnist             # in another

It asks the server what the model takes and sends random numbers of that shape over connections that stay open, each as
soon as the answer before it is there. A TensorFlow Serving of the same folder takes the same requests.
"""

from __future__ import annotations

import http.client
import json
import random
import sys
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import tyro

from raytf.config.command_line import cli
from raytf.errors import ConfigError


@dataclass(frozen=True)
class Load:
    """Send requests to a served model and print how it went; the exit code is 1 when there were errors."""

    url: tyro.conf.Positional[str]
    """The model: http://HOST:PORT/v1/models/NAME."""
    requests: int = 2000
    """Requests in all."""
    concurrency: int = 16
    """Requests under way at the same time."""
    rows: int = 1
    """Records in each request."""
    token: str | None = None
    """For a server that wants one."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a load.

    Attributes:
        errors: requests that got no answer of status 200.
        said: status or error -> how often.
        seconds: from the first request to the last answer.
        p50, p90, p99, worst: milliseconds of an answer.
    """

    requests: int
    errors: int
    said: dict[str, int]
    seconds: float
    per_second: float
    p50: float
    p90: float
    p99: float
    worst: float


def example(document: dict[str, Any], rows: int, chance: random.Random) -> bytes:
    """Return a request of random numbers for the model of a metadata answer."""
    inputs = document["metadata"]["signature_def"]["signature_def"]["serving_default"]["inputs"]
    columns = {}
    for name, info in inputs.items():
        shape = [int(dim["size"]) for dim in info["tensor_shape"]["dim"]]
        columns[name] = _numbers([rows, *(1 if size < 0 else size for size in shape[1:])], info["dtype"], chance)
    return json.dumps(
        {"instances": next(iter(columns.values()))} if len(columns) == 1 else {"inputs": columns}
    ).encode()


def _numbers(shape: list[int], dtype: str, chance: random.Random) -> Any:
    if shape:
        return [_numbers(shape[1:], dtype, chance) for _ in range(shape[0])]
    if dtype == "DT_STRING":
        return "text"
    return chance.random() < 0.5 if dtype == "DT_BOOL" else chance.randrange(2) if "INT" in dtype else chance.random()


def run(
    url: str,
    requests: int,
    concurrency: int,
    rows: int = 1,
    token: str | None = None,
    on: Callable[[int], None] = lambda done: None,
) -> Outcome:
    """Send the load.

    Args:
        on: told, by any thread, how many requests are done.
    """
    place = urllib.parse.urlsplit(url.removesuffix(":predict").rstrip("/"))
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
    answer = _ask(place, f"{place.path}/metadata", headers)
    body = example(answer, rows, random.Random(0))
    left, lock = iter(range(requests)), threading.Lock()
    times: list[float] = []
    said: Counter[str] = Counter()

    def client() -> None:
        connection = http.client.HTTPConnection(place.hostname or "", place.port or 80, timeout=60)
        while True:
            with lock:
                if next(left, None) is None:
                    break
            began = time.perf_counter()
            try:
                connection.request("POST", f"{place.path}:predict", body, headers)
                response = connection.getresponse()
                data = response.read()
                is_answer = response.status == 200 and (b'"predictions"' in data or b'"outputs"' in data)
                outcome = "200" if is_answer else str(response.status)
                if outcome != "200":
                    outcome += f" {data[:120]!r}"
            except (OSError, http.client.HTTPException) as error:
                outcome = f"{type(error).__name__}: {error}"
                connection.close()
            with lock:
                times.append(time.perf_counter() - began)
                said[outcome] += 1
                done = len(times)
            on(done)
        connection.close()

    threads = [threading.Thread(target=client, daemon=True) for _ in range(concurrency)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    times.sort()

    def at(share: float) -> float:
        return round(1000 * times[min(len(times) - 1, int(share * len(times)))], 2)

    return Outcome(
        len(times), len(times) - said["200"], dict(said), round(seconds, 3), round(len(times) / seconds, 1),
        at(0.5), at(0.9), at(0.99), at(1),
    )  # fmt: skip


def _ask(place: urllib.parse.SplitResult, path: str, headers: dict[str, str]) -> dict[str, Any]:
    try:
        connection = http.client.HTTPConnection(place.hostname or "", place.port or 80, timeout=60)
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        data = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise ConfigError(
            f"{place.geturl()} does not answer: {error}. Expected http://HOST:PORT/v1/models/NAME."
        ) from error
    if response.status != 200:
        raise ConfigError(f"{place.geturl()} answers {response.status}: {data[:200].decode(errors='replace')}")
    return json.loads(data)


def main(load: Load) -> None:
    if load.requests < 1 or load.concurrency < 1 or load.rows < 1:
        raise ConfigError("--requests, --concurrency and --rows: expected 1 or more.")
    outcome = run(load.url, load.requests, load.concurrency, load.rows, load.token)
    if load.json:
        print(json.dumps(asdict(outcome), indent=1))
    else:
        print(f"{outcome.requests} requests, {load.concurrency} at a time, {load.rows} records each")
        print(f"errors      {outcome.errors}")
        print(f"requests/s  {outcome.per_second:.1f}")
        for name in ("p50", "p90", "p99", "worst"):
            print(f"{name:<10}  {getattr(outcome, name):.2f} ms")
        for text, count in outcome.said.items():
            if text != "200":
                print(f"{count} times {text}")
    sys.exit(1 if outcome.errors else 0)


if __name__ == "__main__":
    cli(main)
