"""A finding of a check: one mistake, where it is, why it matters and how to fix it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

#: Keys and indices from a document's root to a value.
Path = tuple[str | int, ...]


class Severity(StrEnum):
    """The severity of a finding.

    Attributes:
        ERROR: the cluster does not come up, the job never runs, or something is open to the world.
        WARNING: the cluster works, but costs money, time or safety that the user did not intend.
        FILL_IN: a value that only the user knows is still a placeholder.
    """

    ERROR = "error"
    WARNING = "warning"
    FILL_IN = "fill in"


@dataclass(frozen=True)
class ConfigFinding:
    """One mistake.

    Attributes:
        code: its kind, stable for scripts, such as `unknown-key`.
        path: its place in the document; empty for the whole document.
        what: what is wrong, with the value.
        why: what happens because of it.
        fix: what to write instead.
        line: the line of the file, from 1, if known.
    """

    code: str
    severity: Severity
    path: Path
    what: str
    why: str
    fix: str
    line: int | None = None


def error(code: str, path: Path, what: str, why: str, fix: str) -> ConfigFinding:
    """Return a finding that stops the cluster or the job."""
    return ConfigFinding(code, Severity.ERROR, path, what, why, fix)


def warning(code: str, path: Path, what: str, why: str, fix: str) -> ConfigFinding:
    """Return a finding that costs something."""
    return ConfigFinding(code, Severity.WARNING, path, what, why, fix)


def stops_ray_up(code: str, path: Path, what: str, fix: str, how: str = "") -> ConfigFinding:
    """Return a finding that makes `ray up` exit; `how` is the error that it shows."""
    return error(code, path, what, f"`ray up` exits{how and f' with {how}'}.", fix)


def refuses_nodes(cloud: str, code: str, path: Path, what: str, fix: str, reason: str = "") -> ConfigFinding:
    """Return a finding that makes a cloud refuse each node of a type; `reason` is the cloud's error."""
    why = f"{cloud} refuses each node of this type{reason and f' ({reason})'}, and Ray repeats the request forever."
    return error(code, path, what, why, fix)


def zone_not_in_region(zone: str, region: str, why: str, fix: str) -> ConfigFinding:
    """Return the finding that a zone of the provider is not in its region."""
    path = ("provider", "availability_zone")
    return error("zone-not-in-region", path, f"zone {zone!r} is not in region {region!r}", why, fix)


def place(path: Path) -> str:
    """Return a path as text: `available_node_types.gpu.node_config.disks[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f"{'.' if text else ''}{part}"
    return text or "(file)"


def near(word: object, known: Iterable[str]) -> str:
    """Return `. Did you mean 'x'?` for a word that is close to a known one, else an empty text."""
    by_fold = {name.casefold().replace("_", "").replace("-", ""): name for name in known}
    folded = str(word).casefold().replace("_", "").replace("-", "")
    matches = difflib.get_close_matches(folded, by_fold, n=1, cutoff=0.75)
    return f". Did you mean {by_fold[matches[0]]!r}?" if matches else ""


def instead(word: object, known: Iterable[str], what: str = "Keys here are") -> str:
    """Return advice for an unknown word: the closest known word, or a list of all."""
    names = sorted(known)
    return near(word, names).removeprefix(". ") or f"{what} {listed(names, 40)}."


def listed(names: Iterable[object], most: int = 12) -> str:
    """Return names for a message; a long list is cut."""
    texts = [str(name) for name in names]
    return ", ".join(texts[:most]) + (", ..." if len(texts) > most else "")
