"""Ways to damage a run's folder, each a function of a random number generator: bytes, sizes, types, names, and JSON
whose checksum is right all the same."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raytf.checkpoint import codec, manifest

#: Texts that no `json.dumps` writes, by what stands for them until then.
_RAW = {
    '"@deep"': "[" * 5000 + "]" * 5000,
    '"@deep objects"': '{"a":' * 3000 + "1" + "}" * 3000,
    '"@levels"': "[" * 90 + "]" * 90,
    '"@digits"': "9" * 5000,
    '"@long float"': "0." + "1" * 5000,
    '"@huge"': "1e400",
    '"@surrogate"': '"\\ud800"',
    '"@twice"': '{"steps": 1, "steps": []}',
}
_VALUES: list[Any] = [
    *(raw.strip('"') for raw in _RAW),
    *(None, True, False, 0, 1, -1, 2**31, 2**53, 2**63, 10**30, 9e11, 1.5, -0.0, 1e308, -1e308, 5e-324),
    *(float("nan"), float("inf"), float("-inf"), "", "²", "1", "NaN", "x" * 20_000, "\0", "\x1b]0;title\x07", "a\nb"),
    *("../../../good-finished/result.json", "/etc/passwd", "..", ".", "\u202e", [], {}, [[]], [None], {"a": {}}),
    *([{}] * 3, list(range(2000)), {"body": {}}, {"": ""}, ["a", 1, None], {str(i): i for i in range(300)}),
]
_NAMES = [
    *("²-x", "٣٠٠-a-0001", "-1-a", "000000000400", "000000000400-", "-", "9" * 200, "999999999999-a-0001"),
    *("000000000400-20270115T080000.000-aaaaaa-0009", "a\nb", "\x1b[2J", "a?b", "a b", "%2e%2e", "...", "~", "s3:"),
    *("\udcff\udcfe", "x" * 250, "result.json", "MANIFEST.json", "lease.json", "export.tmp-1", "-rf", "*", "\u202e"),
]

#: What one has taken away, or made another kind of.
_IN_VAIN = (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, StopIteration, RecursionError)

Mutation = Callable[[random.Random, Path], str]


def mutate(rng: random.Random, run: Path) -> list[str]:
    """Damage a run's folder in one to three ways; what was done."""
    done = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        # What one has taken away, another one may look for.
        with contextlib.suppress(*_IN_VAIN):
            done.append(rng.choice(_ALL)(rng, run))
    return done


def _files(run: Path) -> list[Path]:
    return sorted(Path(base) / name for base, _, names in os.walk(run) for name in names)


def _plain(rng: random.Random, run: Path, *ends: str) -> Path:
    found = [f for f in _files(run) if f.is_file() and not f.is_symlink() and f.stat().st_size < 1 << 20]
    chosen = [f for f in found if f.name.endswith(ends or ("",))]
    if not chosen:
        raise FileNotFoundError
    # As many of each kind, though there are more shares than results.
    kinds = sorted({f.name.lstrip("0123456789-") for f in chosen})
    kind = rng.choice(kinds)
    return rng.choice([f for f in chosen if f.name.lstrip("0123456789-") == kind])


def _manifests(run: Path) -> list[Path]:
    """Those of its own, not what a link that was made before leads to."""
    found = sorted((run / "checkpoints").glob(f"*/{manifest.FILE}"))
    return [path for path in found if path.resolve() == run.resolve() / path.relative_to(run)] or [run / "none"]


def _said(what: str, run: Path, path: Path) -> str:
    return f"{what}: {path.relative_to(run)}"


# -- bytes and sizes ---------------------------------------------------------------------------------------------------


def _bytes(rng: random.Random, run: Path) -> str:
    path = _plain(rng, run)
    data = path.read_bytes()
    at = rng.randrange(len(data) + 1)
    other = _plain(rng, run).read_bytes()
    changed = {
        "empty": b"",
        "cut off": data[:at],
        "its beginning is missing": data[at:],
        "flipped bits": bytes(b ^ (1 << rng.randrange(8)) if rng.random() < 0.02 else b for b in data),
        "one byte": data[:at] + rng.randbytes(1) + data[at + 1 :],
        "noise": rng.randbytes(rng.randrange(1, 4000)),
        "NUL": data[:at] + b"\0" * rng.randrange(1, 100) + data[at:],
        "all NUL": b"\0" * len(data),
        "no UTF-8": data[:at] + b"\xff\xfe\xc0\xaf" + data[at:],
        "BOM": b"\xef\xbb\xbf" + data,
        "UTF-16": data.decode("latin-1").encode("utf-16"),
        "another file's": other,
        "appended": data + other,
        "twice": data + data,
        "CRLF": data.replace(b"\n", b"\r\n"),
        "one line": data.replace(b"\n", b" "),
        "lines": b"\n" * rng.choice((10, 100_000, 1_500_000)),
        "brackets": rng.choice((b"[", b"{", b'{"a":', b"[[1],")) * rng.choice((100, 5000, 200_000)),
        "quotes": b'"' * 100_000,
        "digits": b"9" * 100_000,
    }
    what = rng.choice(sorted(changed))
    path.write_bytes(changed[what])
    return _said(what, run, path)


def _giant(rng: random.Random, run: Path) -> str:
    path = _plain(rng, run)
    size = rng.choice((80 << 20, 3 << 30, 1 << 42))
    with contextlib.suppress(OSError):  # not every file system has room for names of this many bytes
        os.truncate(path, size)
    return _said(f"{size} bytes", run, path)


# -- types -------------------------------------------------------------------------------------------------------------


def _type(rng: random.Random, run: Path) -> str:
    inner = [Path(base) / name for base, names, _ in os.walk(run) for name in names]
    is_folder = bool(inner) and rng.random() < 0.4
    path = rng.choice(sorted(inner)) if is_folder else _plain(rng, run)
    aside = run / f"aside-{rng.randrange(1000)}"
    path.rename(aside)
    what = rng.choice(
        ("folder", "file", "pipe", "socket", "loop", "nothing", "device", "passwd", "root", "good", "good", "gone")
    )
    match what:
        case "folder":
            path.mkdir()
        case "file":
            path.write_bytes(rng.choice((b"", b"{}", b"[]", b"x")))
        case "pipe":
            os.mkfifo(path)
        case "socket":
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as unix:  # longer paths than it takes
                unix.bind(str(path))
        case "loop":
            path.symlink_to(path)
        case "nothing":
            path.symlink_to(run / "nothing")
        case "device":
            path.symlink_to("/dev/zero")
        case "passwd":
            path.symlink_to("/etc/passwd")
        case "root":
            path.symlink_to("/etc/ssl")
        case "good":
            path.symlink_to(run.parent / "good-stopped" / path.relative_to(run))
    if rng.random() < 0.8:
        shutil.rmtree(aside) if aside.is_dir() else aside.unlink()
    return _said(what, run, path)


def _mode(rng: random.Random, run: Path) -> str:
    path = _plain(rng, run)
    path = rng.choice((path, path.parent))
    if path == run:
        path = run / "checkpoints"
    path.chmod(rng.choice((0, 0o200, 0o400)))
    return _said("mode", run, path)


# -- names -------------------------------------------------------------------------------------------------------------


def _name(rng: random.Random, run: Path) -> str:
    path = _plain(rng, run)
    if rng.random() < 0.5 and path.parent != run:
        path = path.parent
    name = rng.choice(_NAMES)
    suffix = path.suffix if rng.random() < 0.7 and path.is_file() and len(name) < 200 else ""
    target = path.with_name(name) if not suffix else path.parent / f"{name}{rng.choice(('', '-a'))}{suffix}"
    how = rng.choice(("rename", "copy"))
    if how == "rename":
        path.rename(target)
    elif path.is_dir():
        shutil.copytree(path, target)
    else:
        shutil.copy(path, target)
    return _said(f"{how} to {name!r}", run, path)


def _extra(rng: random.Random, run: Path) -> str:
    folder = rng.choice(("", "checkpoints", "ledger", "steps", "attempts", "export"))
    path = run / folder / rng.choice(_NAMES)
    if rng.random() < 0.3:
        for _ in range(rng.choice((5, 400))):
            path = path / "d"
    else:
        path = path / rng.choice(("MANIFEST.json", "x", "saved_model.pb"))
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.choice((b"", b"{}", b"x" * 100)))
    return f"extra in {folder!r}: {str(path)[-40:]!r}"


def _missing(rng: random.Random, run: Path) -> str:
    path = _plain(rng, run)
    path = rng.choice((path, path, path.parent))
    if path == run:
        path = run / "attempts"
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return _said("missing", run, path)


# -- what is in them ---------------------------------------------------------------------------------------------------


def _json(rng: random.Random, run: Path) -> str:
    path = _plain(rng, run, ".json", ".jsonl")
    if path.suffix == ".jsonl":
        lines = path.read_text().splitlines()
        at = rng.randrange(len(lines))
        lines[at], what = _change(rng, lines[at])
        path.write_text("\n".join(lines) + "\n", errors="surrogatepass")
        return _said(f"line {at}: {what}", run, path)
    text, what = _change(rng, path.read_text())
    if path.name == manifest.FILE and rng.random() < 0.8:
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            text = signed(json.loads(text)["body"])
            what += ", signed"
    path.write_text(text, errors="surrogatepass")
    return _said(what, run, path)


def signed(body: Any) -> str:
    """A manifest whose checksum is right."""
    return manifest.dump({"body": body, "crc32": zlib.crc32(manifest.dump(body))}).decode()


def _change(rng: random.Random, text: str) -> tuple[str, str]:
    document = json.loads(text)
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, child in list(inner):
            places.append((value, key))
            walk(child)

    walk(document)
    value = rng.choice(_VALUES)
    if not places or rng.random() < 0.1:
        return _written(value), f"all is {str(value)[:30]!r}"
    for _ in range(rng.choice((1, 1, 1, 4))):
        holder, key = rng.choice(places)
        with contextlib.suppress(KeyError, IndexError):
            match rng.choice(("set", "set", "set", "set", "delete", "wrap", "move")):
                case "set":
                    holder[key] = value
                case "delete":
                    del holder[key]
                case "wrap":
                    holder[key] = [holder[key]]
                case "move" if isinstance(holder, dict):
                    holder[str(value)[:50]] = holder.pop(key)
    return _written(document), f"{key} is {str(value)[:30]!r}"


def _written(document: Any) -> str:
    text = json.dumps(document)
    for mark, raw in _RAW.items():
        text = text.replace(mark, raw)
    return text


def _table(rng: random.Random, run: Path) -> str:
    path = _plain(rng, run, ".csv")
    lines = [line.split(",") for line in path.read_text().splitlines()]
    at = rng.randrange(len(lines))
    values = (
        "",
        "text",
        "900000000000",
        "9e11",
        "nan",
        "inf",
        "-5",
        "1.5",
        "²",
        "9" * 5000,
        "\0",
        '"',
        "1e400",
        "0x10",
    )
    what = rng.choice(("field", "field", "field", "shorter", "longer", "shuffled", "column"))
    match what:
        case "field":
            lines[at][rng.randrange(len(lines[at]))] = rng.choice(values)
        case "shorter":
            del lines[at][rng.randrange(len(lines[at])) :]
        case "longer":
            lines[at] += ["1"] * 1000
        case "shuffled":
            rng.shuffle(lines)
        case "column":
            place, value = rng.randrange(len(lines[0])), rng.choice(values)
            lines = [[*line[:place], value, *line[place + 1 :]] for line in lines]
    path.write_text("\n".join(map(",".join, lines)) + "\n")
    return _said(f"{what} of row {at}", run, path)


def _share(rng: random.Random, run: Path) -> str:
    """A share whose manifest says of it what is true, and which is none."""
    path = rng.choice(_manifests(run))
    body = json.loads(path.read_text())["body"]
    share = rng.choice(body["shares"])
    file = path.parent / share["file"]
    if file.is_symlink():
        raise FileNotFoundError
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    name = next(iter(header))
    match rng.choice(("length", "header", "noise", "terabytes", "names", "file", "many")):
        case "length":
            data = rng.choice((2**63 - 1, 2**40, 0, 1)).to_bytes(8, "little") + data[8:]
        case "header":
            header[name][rng.choice(("dtype", "shape", "data_offsets"))] = rng.choice(
                ("F999", [2**62, 2**62], [-1], [0, 2**60], "x", [1e308], [[]], None, [2**64, 2**64 + 4], 7)
            )
            text = json.dumps(header).encode()
            data = len(text).to_bytes(8, "little") + text + data[end:]
        case "noise":
            data = rng.randbytes(500)
        case "terabytes":
            share["bytes"] = rng.choice((2**42, 2**53, 2**70, -1))
        case "names":
            share["names"] = rng.choice(([], ["x"], "model/0", [1], None))
        case "file":
            share["file"] = rng.choice(
                ("../../result.json", "/etc/passwd", "", "..", ".", "a/b", "\0", "x\ny", 7, None)
            )
        case "many":
            body["shares"] = body["shares"] * rng.choice((0, 2, 500))
    if share.get("bytes") == len(file.read_bytes()):
        file.write_bytes(data)
        share["bytes"], share["crc32c"] = len(data), codec.checksum([data])
    path.write_text(signed(body))
    return _said("share", run, file)


def _version(rng: random.Random, run: Path) -> str:
    path = rng.choice(_manifests(run))
    body = json.loads(path.read_text())["body"]
    body["version"] = rng.choice((0, 1, 3, 99, 10**18, -1, True, "2", None, 2.0))
    path.write_text(signed(body))
    return _said(f"version {body['version']}", run, path)


_ALL: list[Mutation] = [
    *([_bytes] * 4),
    *([_json] * 8),
    *([_type] * 4),
    *([_name] * 3),
    *([_share] * 2),
    *([_table] * 2),
    *(_giant, _mode, _extra, _extra, _missing, _version),
]
