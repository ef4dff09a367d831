"""Whether what raytf takes of other libraries' insides is there, and where it is taken."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[2] / "raytf"
#: Modules of Ray, Keras and TensorFlow that are theirs alone.
INSIDE = re.compile(
    r"ray\.(_|autoscaler\.|core\.|dashboard\.|serve\._|serve\.context|train\._|train\.v2\b|data\._|tune\._)|"
    r"keras\.src\b|tensorflow\.(python|core|compiler)\b"
)
#: Attributes of raytf's own sources that other modules of them read.
_OURS = {"_columns", "_files", "_own"}
#: Attributes of the standard library and of IPython that begin with an underscore and are meant to be used.
_PUBLIC = {"_exit", "_replace", "_fields", "_asdict", "_render_traceback_"}


def find(path: str) -> Any:
    """What stands at a dotted path: of a module, a class, or of what a class's own code gives its objects.

    Raises:
        LookupError: nothing does.
    """
    parts = path.split(".")
    found: Any = None
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        break
    else:
        raise LookupError(f"{path}: there is no such module")
    for name in parts[end:]:
        if hasattr(found, name):
            found = getattr(found, name)
        elif _is_field(found, name) or (inspect.isclass(found) and _is_given(found, name)):
            found = None
        else:
            raise LookupError(f"{path}: {name} is gone")
    return found


def _is_field(kind: Any, name: str) -> bool:
    """Whether a protocol buffer has a field."""
    return name in getattr(getattr(kind, "DESCRIPTOR", None), "fields_by_name", ())


def _is_given(kind: type, name: str) -> bool:
    """Whether the code of a class, of those that it derives from, or beside them, assigns an attribute of objects."""
    assigned = re.compile(rf"\.{name}\b[^=\n(]*(=(?!=)|:)|\b{name}: ")
    for one in kind.__mro__:
        try:
            source = inspect.getsource(sys.modules[one.__module__])
        except (OSError, TypeError):  # compiled
            continue
        if assigned.search(source):
            return True
    return False


def modules() -> Iterator[tuple[str, ast.Module]]:
    """The modules of raytf: path inside the package, and its syntax."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text())


def taken(tree: ast.Module) -> set[str]:
    """Return what a module takes of the insides of Ray, Keras and TensorFlow, as dotted paths.

    What follows a name that was imported counts, too: `services.start_api_server` after `from ray._private import
    services`.
    """
    imported: dict[str, str] = {}
    paths: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            paths |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    paths |= set(imported.values())
    for node in ast.walk(tree):
        is_read = isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Store)
        if is_read and re.fullmatch(r"[\w.]+", ast.unparse(node)):
            root, _, rest = ast.unparse(node).partition(".")
            paths.add(f"{imported.get(root, root)}.{rest}")
    return {path for path in paths if INSIDE.match(path)}


def listed(seen: Mapping[str, str]) -> set[str]:
    """Return the dotted paths that a package's `SEEN` lists by owner."""
    return {f"{owner}.{name}" for owner, names in seen.items() for name in names.split()}


def missing(tree: ast.Module, seen: set[str]) -> list[str]:
    """Return what a module takes that is neither there nor listed as an attribute of objects."""
    names = {path.rpartition(".")[2] for path in seen}
    return [path for path in sorted(taken(tree)) if path.rpartition(".")[2] not in names and not _is_there(path)]


def _is_there(path: str) -> bool:
    try:
        find(path)
    except LookupError:
        return False
    return True


def foreign(tree: ast.Module) -> set[str]:
    """Private attributes that a module takes of objects whose class it does not define."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    of_self, of_others = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr):
            is_self = ast.unparse(node.value) in ("self", "cls", "super()")
            (of_self if is_self else of_others).add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and re.match(r"_[a-z]", str(name.value)):
                of_others.add(str(name.value))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
    return of_others - of_self - own - _OURS - _PUBLIC
