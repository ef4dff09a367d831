"""A finding of a check: one mistake, where it is, why it matters and how to fix it."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

#: Keys and indices from a document's root to a value.
Path = tuple[str | int, ...]


class Severity(StrEnum):
    """The severity of a finding.

    Attributes:
        ERROR: the cluster does not start, the job never runs, or something is open to the world.
        WARNING: the cluster works, but costs more money or time, or is less safe, than the user intended.
        FILL_IN: a value that only the user knows is still a placeholder.
    """

    ERROR = "error"
    WARNING = "warning"
    FILL_IN = "fill in"


@dataclass(frozen=True)
class ConfigFinding:
    """One mistake.

    Attributes:
        code: the kind of mistake, stable for scripts, such as `unknown-key`.
        path: its path in the document; empty for the whole document.
        what: the mistake, with the value.
        why: the consequence.
        fix: the advice to the user.
        line: its line in the file, counted from 1, if known.
    """

    code: str
    severity: Severity
    path: Path
    what: str
    why: str
    fix: str
    line: int | None = None


def error(code: str, path: Path, what: str, why: str, fix: str) -> ConfigFinding:
    """Return a finding of severity ERROR."""
    return ConfigFinding(code, Severity.ERROR, path, what, why, fix)


def warning(code: str, path: Path, what: str, why: str, fix: str) -> ConfigFinding:
    """Return a finding of severity WARNING."""
    return ConfigFinding(code, Severity.WARNING, path, what, why, fix)


def stops_ray_up(code: str, path: Path, what: str, fix: str, how: str = "") -> ConfigFinding:
    """Return the finding of a mistake that makes `ray up` exit; `how` is the error that it prints."""
    return error(code, path, what, f"`ray up` exits{how and f' with {how}'}.", fix)


def refuses_nodes(cloud: str, code: str, path: Path, what: str, fix: str, reason: str = "") -> ConfigFinding:
    """Return the finding of a mistake that makes a cloud refuse each node of a type; `reason` is the cloud's error."""
    why = f"{cloud} refuses each node of this type{reason and f' ({reason})'}, and Ray repeats the request forever."
    return error(code, path, what, why, fix)


def zone_not_in_region(zone: str, region: str, why: str, fix: str) -> ConfigFinding:
    """Return the finding that a zone of the provider is not in its region."""
    path = ("provider", "availability_zone")
    return error("zone-not-in-region", path, f"zone {zone!r} is not in region {region!r}", why, fix)


def once(findings: Iterable[ConfigFinding], codes: Collection[str]) -> Iterator[ConfigFinding]:
    """Yield findings. Of those with the same code (of `codes`) and severity, the first lists the places of all."""
    groups: dict[object, list[ConfigFinding]] = {}
    for i, finding in enumerate(findings):
        groups.setdefault((finding.code, finding.severity) if finding.code in codes else i, []).append(finding)
    for first, *others in groups.values():
        places = dict.fromkeys(place(other.path) for other in others if other.path != first.path)
        yield replace(first, fix=f"{first.fix} Also in {listed(places)}.") if places else first


def place(path: Path) -> str:
    """Return a path as text: `available_node_types.gpu.node_config.disks[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f"{'.' if text else ''}{part}"
    return text or "(file)"


def near(word: object, known: Iterable[str]) -> str:
    """Return `. Did you mean 'x'?` if a word is close to a known one, or an empty string."""
    by_fold = {name.casefold().replace("_", "").replace("-", ""): name for name in known}
    folded = str(word).casefold().replace("_", "").replace("-", "")
    matches = difflib.get_close_matches(folded, by_fold, n=1, cutoff=0.75)
    return f". Did you mean {by_fold[matches[0]]!r}?" if matches else ""


def instead(word: object, known: Iterable[str], what: str = "Keys here are") -> str:
    """Return advice for an unknown word: the closest known word, or a list of all known words."""
    names = sorted(known)
    return near(word, names).removeprefix(". ") or f"{what} {listed(names, 40)}."


def listed(names: Iterable[object], most: int = 12) -> str:
    """Return names joined for a message, with `...` after the first `most`."""
    texts = [str(name) for name in names]
    return ", ".join(texts[:most]) + (", ..." if len(texts) > most else "")
