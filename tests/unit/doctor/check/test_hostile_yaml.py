"""YAML that was made to break what reads it: one clear line with the place, never a traceback, a crash or a hang."""

import copy
import os
import random
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest
import yaml

from raytf.doctor import inputs
from raytf.doctor.check import offline
from raytf.doctor.local_environment import Surroundings
from raytf.errors import ConfigError
from raytf.storage import untrusted_yaml

ROOT = Path(__file__).parents[4]
FILES = [*ROOT.glob("cluster-configs/**/*.yaml"), *ROOT.glob("tests/data/**/*.yaml")]
HERE = Surroundings("3.11.7", "2.60.0", ROOT, {"HOME": "/nonexistent"})
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)

#: What -> (text, line of the finding, a word of it).
HOSTILE = {
    "flow lists": ("a: 1\nb: " + "[" * 50_000, 2, "deeper"),
    "a million": ("[" * 1_000_000, 1, "deeper"),
    "flow maps": ("{a: " * 100_000, 1, "deeper"),
    "block maps": ("\n".join(" " * i + "a:" for i in range(3000)), 101, "deeper"),
    "block lists": ("- " * 100_000, 1, "deeper"),
    "keys": ("? " * 100_000, 1, "deeper"),
    "laughs": (LAUGHS, 6, "aliases"),
    "itself": ("&a [*a]", 1, "alias"),
    "merge of itself": ("a: &a\n  <<: *a\n", 1, "alias"),
    "many": ("- a\n" * 300_000, 200_000, "more than"),
    "digits": ("a: 1\nmax_workers: " + "9" * 20_000, 2, "whole number"),
    "hex": ("max_workers: 0x" + "f" * 20_000, 1, "whole number"),
    "base 60": ("max_workers: " + "1:" * 20_000 + "1", 1, "whole number"),
    "date": ("a: 1\ncluster_name: 9999-99-99", 2, "date"),
    "bool": ("a: !!bool maybe", 1, "truth"),
    "int": ("a: !!int x", 1, "whole number"),
    "float": ("a: !!float x", 1, "number"),
    "timestamp": ("a: !!timestamp x", 1, "date"),
    "binary": ("a: !!binary \xff", 1, "base64"),
    "nul": ("a: 1\nb: x\x00y", 2, "x0000"),
    "unhashable": ("? [a, b]\n: c", 1, "unhashable"),
    "python": ("a: !!python/object/apply:os.system ['id']", 1, "constructor"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_one_line_says_what_is_wrong_and_where(name):
    text, line, word = HOSTILE[name]
    (found,) = [f for f in offline.check(text, HERE).findings if f.code == "yaml-syntax"]
    assert (found.line, word in found.what, "\n" in found.what) == (line, True, False), found
    with pytest.raises(yaml.YAMLError):
        untrusted_yaml.load(text)


def test_the_yaml_within_a_manifest_is_bounded_too():
    text = f'apiVersion: ray.io/v1\nkind: RayJob\nmetadata: {{name: a}}\nspec:\n  runtimeEnvYAML: "{"[" * 50_000}"\n'
    (found,) = [f for f in offline.check(text, HERE).findings if f.path == ("spec", "runtimeEnvYAML")]
    assert "deeper" in found.what


def test_files_that_are_none(tmp_path):
    (tmp_path / "bytes.yaml").write_bytes(b"a: 1\nb: \xff\xfe")
    (tmp_path / "huge.yaml").write_bytes(b"#" * (17 << 20))
    os.mkfifo(tmp_path / "pipe.yaml")
    for name, word in {"bytes": "line 2", "huge": "16 MiB", "pipe": "nobody"}.items():
        with pytest.raises(ConfigError, match=word):
            inputs.read([str(tmp_path / f"{name}.yaml")])
    with pytest.raises(ConfigError, match="16 MiB"):
        inputs.read(["/dev/zero"])
    (tmp_path / "loop").symlink_to(tmp_path)
    unread: dict[str, str] = {}
    assert inputs.read([str(tmp_path)], unread) == {}
    assert len(unread) == 3


@pytest.mark.parametrize(
    "text",
    [
        "resources: ['https://example.invalid/x.yaml']",
        "resources: ['github.com/nobody/nothing?ref=v1']",
        "resources: ['ssh://-oProxyCommand=x/y']",
        "patches: [{path: 'https://example.invalid/p.yaml'}]",
        "configMapGenerator: [{name: a, files: ['k=https://example.invalid/p']}]",
        "helmCharts: [{name: a, repo: 'https://example.invalid'}]",
        "resources: [inner]",
    ],
)
def test_a_kustomization_that_would_be_fetched_is_not_built(tmp_path, text):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "kustomization.yaml").write_text("resources: ['git@example.invalid:x/y.git']")
    (tmp_path / "kustomization.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"--trust|no kubectl"):
        inputs.read([str(tmp_path)])


def test_the_command_survives_what_ends_a_process(tmp_path):
    for name in ("a million", "digits", "date"):
        file = tmp_path / "c.yaml"
        file.write_text(HOSTILE[name][0])
        done = subprocess.run(
            [sys.executable, "-c", "from raytf.commands.main import main; main()", "check", str(file)],
            capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (2, ""), done
        assert f"{file}:{HOSTILE[name][1]}: error: this is not YAML" in done.stdout


# -- mutations ---------------------------------------------------------------------------------------------------------

ODD = [None, True, -1, 0, 10**30, 1.5, float("inf"), float("nan"), "", "\x7f", "a" * 5000, "-oProxyCommand=x", "[]",
       [], {}, [None], {"a": None}, [[[]]], {1: 2}, ["-1"], "²", "9" * 30, "10Gi", "-5", "1e400", "é日本", "$(x)", "{{",
       "%s %d", date(2020, 1, 1), b"\xff", "/" * 300, "\u202e"]  # fmt: skip
KEYS = [1, True, None, "", "x" * 3000, "\x9b", 1.5]


def spots(value, path=()):
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from spots(part, (*path, key))


def changed(value, path, draw):
    if not path:
        return draw.choice(ODD)
    value = copy.copy(value)
    if len(path) == 1 and isinstance(value, dict) and draw.random() < 0.15:
        value[draw.choice(KEYS)] = value.pop(path[0])
    else:
        value[path[0]] = changed(value[path[0]], path[1:], draw)
    return value


def mutants(count, seed):
    draw, documents = random.Random(seed), []
    for file in sorted(FILES):
        try:
            documents.append([d for d in yaml.safe_load_all(file.read_text()) if d is not None])
        except yaml.YAMLError:
            continue
    for _ in range(count):
        those = list(draw.choice([d for d in documents if d]))
        for _ in range(draw.randint(1, 4)):
            i = draw.randrange(len(those))
            those[i] = changed(those[i], draw.choice(list(spots(those[i]))), draw)
        letters = list(yaml.dump_all(those, allow_unicode=True))
        for _ in range(draw.choice([0, 0, 0, 1, 5])):
            letters[draw.randrange(len(letters))] = draw.choice("[]{}:-&*!|>'\"\n\t\x00%@`#, ")
        yield "".join(letters)


def judged(count, seed):
    for text in mutants(count, seed):
        found = offline.check(text, HERE).findings
        odd = [f.what for f in found if f.code == "cannot-judge"]
        assert not odd, f"{odd}\n{text[:3000]}"


def test_no_mutation_of_a_file_breaks_a_check():
    judged(300, 1)


@pytest.mark.slow
def test_no_mutation_of_a_file_breaks_a_check_in_full():
    judged(4_000, 2)
