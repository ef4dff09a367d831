"""A wheel of the raytf that is installed here, for nodes that cannot install it from a registry."""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

import raytf
from raytf.commands import _shipped
from raytf.errors import DISTRIBUTION, ConfigError

#: The metadata of a wheel; the other files in its folder describe one installation.
_METADATA = ("METADATA", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE")


@dataclass(frozen=True)
class Wheel:
    """A wheel.

    Attributes:
        name: of its file; pip reads the version from it.
        content: of its file. Equal code gives equal bytes, so that `ray up` sets no node up again for nothing.
    """

    name: str
    content: bytes


def for_nodes(shipped: Path) -> Wheel | None:
    """Return a wheel of the installed raytf, or None if a registry has this version.

    Args:
        shipped: see `_shipped.folder`.

    Raises:
        ConfigError: raytf is not installed.
    """
    package = _installed()
    # PEP 610: pip writes this file when it installs from a folder, a file or a repository, and not from a registry.
    return build(package, shipped) if package.read_text("direct_url.json") else None


def build(package: Distribution, shipped: Path) -> Wheel:
    """Return a wheel of an installation, editable or not.

    Args:
        package: the metadata of the installation.
        shipped: see `_shipped.folder`.
    """
    stem = f"{DISTRIBUTION.replace('-', '_')}-{package.version}"
    out, record = io.BytesIO(), f"{stem}.dist-info/RECORD"
    lines = []
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in _files(package, shipped, stem):
            _add(archive, name, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            lines.append(f"{name},sha256={digest},{len(content)}\n")
        _add(archive, record, f"{''.join(lines)}{record},,\n".encode())
    return Wheel(f"{stem}-py3-none-any.whl", out.getvalue())


def _installed() -> Distribution:
    # A checkout may hold notes of setuptools (*.egg-info), which are found first there and are no metadata of a wheel.
    for package in distributions(name=DISTRIBUTION):
        if package.read_text("METADATA"):
            return package
    raise ConfigError(
        f"raytf is not installed, so that a project cannot install it either. Type: pip install -e "
        f"{Path(raytf.__file__).parents[1]}"
    )


def _files(package: Distribution, shipped: Path, stem: str) -> Iterator[tuple[str, bytes]]:
    code = Path(raytf.__file__).parent
    for file in sorted(code.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            yield f"raytf/{file.relative_to(code)}", file.read_bytes()
    for file in _shipped.files(shipped):
        yield f"{stem}.data/data/share/raytf/{file.relative_to(shipped)}", file.read_bytes()
    for name in _METADATA:
        text = package.read_text(name)
        if text is not None:
            yield f"{stem}.dist-info/{name}", text.encode()


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    entry = zipfile.ZipInfo(name)  # of 1980, by default
    entry.external_attr = 0o100644 << 16
    archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
