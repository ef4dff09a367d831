"""What pages of docs/getting-started tell one to type exists: jobs, commands, flags, names, files."""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
from pathlib import Path

import pytest

import raytf
from raytf.commands.main import COMMANDS
from raytf.config.flags import WorkerSection

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "getting-started"
NAMES = ("coming-from.md", "jobs.md")
#: Command-line programs of others, whose flags are not ours.
OTHERS = ("docker", "kubectl", "ray", "tensorboard")


def typed(page: str) -> list[str]:
    """Code in the right-hand columns of tables, and indented commands."""
    found = []
    for line in (PAGES / page).read_text().splitlines():
        if line.startswith("| ") and not line.startswith(("| ---", "| there |")):
            found += re.findall(
                r"`([^`]+)`", line.rstrip("| ").split(" | ", 1)[1] if page == "coming-from.md" else line
            )
        elif line.startswith("    "):
            found.append(line.strip())
    return found


def fields(file: Path) -> set[str]:
    """Flags that the dataclasses of a file make."""
    names = {
        node.target.id
        for owner in ast.walk(ast.parse(file.read_text()))
        if isinstance(owner, ast.ClassDef)
        for node in owner.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return {f"--{name.replace('_', '-')}" for name in names}


def common() -> set[str]:
    config = raytf.TrainConfig()
    sections = [WorkerSection(), *(getattr(config, section.name) for section in dataclasses.fields(config))]
    every = [field for section in sections for field in dataclasses.fields(section)]
    names = {field.name for field in every} | {f"no-{field.name}" for field in every if "bool" in str(field.type)}
    return {f"--{name.replace('_', '-')}" for name in names}


def unknown(code: str) -> list[str]:
    """What of a piece of code does not exist."""
    code = code.partition("  #")[0]
    if " -- " in code:
        first, _, second = code.partition(" -- ")
        return unknown(first) + unknown(second)
    words = shlex.split(code) if not code.startswith("raytf.") else [code]
    if not words or words[0] in OTHERS:
        return [word for word in words if word.startswith("cluster-configs/") and not (ROOT / word).exists()]
    missing = [word for word in words if word.startswith(("cluster-configs/", "jobs/")) and not (ROOT / word).exists()]
    flags = {word for word in words if re.match(r"--\w", word)}
    known = common()
    if words[0].startswith("raytf."):
        return [f"raytf.{name}" for name in re.findall(r"raytf\.(\w+)", code) if name not in raytf.__all__]
    if words[0] == "raytf":
        if words[1] not in COMMANDS:
            return [f"raytf {words[1]}"]
        module = COMMANDS[words[1]][0].partition(".")[0]
        return missing + sorted(flags - fields(ROOT / "raytf" / "commands" / f"{module}.py"))
    jobs = [ROOT / word for word in words if word.startswith("jobs/") and (ROOT / word).exists()]
    for job in jobs or ((ROOT / "jobs").glob("*.py") if words[0].startswith("--") else []):
        known |= fields(job)
    return missing + sorted(flags - known)


@pytest.mark.parametrize("page", NAMES)
def test_all_that_one_is_told_to_type_exists(page: str):
    codes = typed(page)
    assert len(codes) >= 10
    assert {name for code in codes for name in unknown(code)} == set()


@pytest.mark.parametrize(
    ("code", "missing"),
    [
        ("python jobs/mnist.py --model mlp --workers 4", []),
        ("python jobs/mnist.py --modle mlp", ["--modle"]),
        ("python jobs/pie.py", ["jobs/pie.py"]),
        ("--strategy mirrored", []),
        ("--stategy mirrored", ["--stategy"]),
        ("raytf check cluster-configs/local.yaml --job 'python jobs/mnist.py'", []),
        ("raytf chek x", ["raytf chek"]),
        ("raytf check x --jobs y", ["--jobs"]),
        ("raytf submit http://h:1 -- python jobs/mnist.py --modle x", ["--modle"]),
        ("raytf.fit(..., validation=...)", []),
        ("raytf.fitt(1)", ["raytf.fitt"]),
        ("ray up cluster-configs/nowhere.yaml", ["cluster-configs/nowhere.yaml"]),
    ],
)
def test_the_check_finds_what_does_not_exist(code: str, missing: list[str]):
    assert unknown(code) == missing
