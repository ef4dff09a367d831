"""What the torturer holds: ranks and what they tell, a run with the memory of its nodes, forked processes, and a place
to save to."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.stress.torture.restore import Memory
from tests.stress.torture.state import Plan

_STORE = Path(__file__).with_name("store.py")


@dataclass
class Rank:
    """What a rank has told."""

    pid: int
    reports: int
    text: bytes = b""
    at: dict[str, str] = field(default_factory=dict)
    entered: Counter[str] = field(default_factory=Counter)
    copied: int = -1
    done: int = -1
    saves: int = 0
    failed: int = 0
    wrong: list[str] = field(default_factory=list)

    def read(self) -> bool:
        """Take in what there is to read; False at the end."""
        data = os.read(self.reports, 1 << 16)
        *lines, self.text = (self.text + data).split(b"\n")
        for line in lines:
            what, *words = json.loads(line)
            if what == "at":
                lane, moment = words
                self.at[lane] = moment
                self.entered[moment] += 1
            elif what == "copied":
                self.copied = words[0]
            elif what == "done":
                self.done = words[0]
                self.saves += 1
            elif what == "failed":
                self.failed += 1
            elif what == "broken":
                self.wrong.append(words[0])
        return bool(data)

    def moment(self) -> str:
        """Where it was when it was killed; several lanes may have been somewhere."""
        return self.at.get("retention") or self.at.get("save") or self.at.get("main") or "between"


@dataclass
class Run:
    """One run on storage, over several attempts.

    Attributes:
        uri, plain: of its folder, with faults and without.
        bound: the newest step that was reported as saved, and is undamaged; -1: none.
        harmed: checkpoints that were damaged -> how; and whether a slot of memory was.
        memory: node -> attempt -> (file descriptor, path, rank) of each slot.
    """

    uri: str
    plain: str
    keep: int
    bound: int = -1
    harmed: dict[str, str] = field(default_factory=dict)
    is_memory_harmed: bool = False
    slots: dict[int, dict[str, list[tuple[int, str, int]]]] = field(default_factory=dict)

    def memory(self) -> Memory:
        return Memory(
            {
                node: [(attempt, rank, path) for attempt, held in attempts.items() for _, path, rank in held]
                for node, attempts in self.slots.items()
            }
        )

    def reserve(self, plan: Plan) -> None:
        """Two slots for each rank."""
        for rank in range(plan.ranks):
            held = self.slots.setdefault(rank % plan.nodes, {}).setdefault(plan.attempt, [])
            for _ in range(2):
                fd = os.memfd_create(plan.attempt)
                held.append((fd, f"/proc/{os.getpid()}/fd/{fd}", rank))

    def drop(self, node: int, attempts: list[str] | None = None) -> None:
        """A node is gone, or needs no longer what earlier attempts left."""
        for attempt in attempts if attempts is not None else list(self.slots.get(node, {})):
            for fd, _, _ in self.slots[node].pop(attempt, []):
                os.close(fd)


def fork(work: Callable[[], Any], keep: tuple[int, ...] = ()) -> int:
    """A process that does some work and ends; everything is imported already. Returns its pid."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: nothing outlives the torturer
        work()
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def ask(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What some work returns, done in a fresh process; `{"error": text}` where it raises."""
    out, into = os.pipe()

    def answer() -> None:
        os.close(out)
        try:
            found = work()
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        with os.fdopen(into, "wb") as stream:
            stream.write(json.dumps(found).encode())

    pid = fork(answer)
    os.close(into)
    with os.fdopen(out, "rb") as stream:
        data = stream.read()
    os.waitpid(pid, 0)
    return json.loads(data) if data else {"error": "the process died"}


def child(uri: str, name: str) -> str:
    """The URI of a folder within another one."""
    location, mark, query = uri.partition("?")
    return f"{location}/{name}{mark}{query}"


@contextlib.contextmanager
def place(store: str, fail_share: float, fail_tries: int, seed: int, totals: Counter[str]) -> Iterator[tuple[str, str]]:
    """URI of an empty place to save to, and the same without faults.

    Args:
        store: local or s3.
        fail_share, fail_tries, seed: of requests that fail, on s3.
        totals: gets what the server has counted.
    """
    if store == "local":
        with tempfile.TemporaryDirectory(prefix="raytf-torture-") as folder:
            yield folder, folder
        return
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    os.environ.pop("AWS_ENDPOINT_URL", None)
    server = subprocess.Popen(
        [sys.executable, str(_STORE), str(fail_share), str(seed), str(fail_tries)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        ends = json.loads(server.stdout.readline())
        uri = "s3://torture/runs?scheme=http&region=us-east-1&endpoint_override="
        yield uri + ends["endpoint"], uri + ends["direct"]
        server.stdin.close()
        totals.update(json.loads(server.stdout.readline()))
    finally:
        server.kill()
        server.wait()
