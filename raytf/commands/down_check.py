"""`raytf down-check CLUSTER.yaml`: find resources that a deleted cluster left behind, and their cost."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

import tyro

from raytf.commands._table import show
from raytf.commands.check import trusted
from raytf.config.terminal_text import say
from raytf.doctor import inputs, local_environment
from raytf.doctor.disks import HOURS
from raytf.doctor.leftovers import report
from raytf.doctor.leftovers.resource import Leftovers
from raytf.doctor.machines import PRICES_OF
from raytf.errors import ConfigError

#: The place of a file that could not be inspected, because it is invalid or credentials are missing.
_NOWHERE = "nowhere"


@dataclass(frozen=True)
class DownCheck:
    """Find the resources that `ray down` or `kubectl delete` left behind, what they cost, and how to remove them.

    The exit code is 0 if no resource that costs money is left, 1 if one is, and 2 if something could not be inspected.
    Nothing is changed.
    """

    files: tyro.conf.Positional[tuple[str, ...]] = ()
    """The YAML of `ray up` or `kubectl apply`, or a folder with a kustomization.yaml, which raytf builds."""
    everything: bool = False
    """Also count resources that cost nothing, such as a security group that the next `ray up` uses again."""
    trust: bool = False
    """Run the file's auth.ssh_proxy_command on this machine, and fetch the remote resources of a kustomization."""
    json: bool = False
    """Print JSON instead of text."""


def main(flags: DownCheck) -> None:
    """Run the command."""
    if not flags.files:
        raise ConfigError("No file given. Usage: raytf down-check CLUSTER.yaml")
    here = local_environment.here()
    unread: dict[str, str] = {}
    texts = inputs.read(flags.files, unread, flags.trust)
    leftovers = {name: Leftovers(place=_NOWHERE, unseen=[problem]) for name, problem in unread.items()}
    for name, text in texts.items():
        try:
            leftovers[name] = report.find(name, text, here, flags.trust or trusted(text, name))
        except ConfigError as error:
            if len(texts) + len(unread) == 1:
                raise
            leftovers[name] = Leftovers(place=_NOWHERE, unseen=[f"it: {error}"])
    if flags.json:
        rows = [_document(name, left) for name, left in leftovers.items()]
        print(json.dumps(rows, indent=1))
    else:
        for name, left in leftovers.items():
            _print(name, left)
    sys.exit(max(exit_code(left, flags.everything) for left in leftovers.values()))


def exit_code(left: Leftovers, everything: bool = False) -> int:
    """Return 2 if something could not be inspected, 1 if something is left, otherwise 0."""
    if left.unseen:
        return 2
    return 1 if (left.resources if everything else left.costly) else 0


def _usd(left: Leftovers) -> float:
    return round(sum(item.usd or 0.0 for item in left.resources), 5)


def _document(name: str, left: Leftovers) -> dict[str, object]:
    return {
        "file": name,
        "place": left.place,
        "left": [asdict(item) for item in left.resources],
        "unseen": left.unseen,
        "usd_per_hour": _usd(left),
        "usd_per_month": round(_usd(left) * HOURS, 2),
        "prices_of": PRICES_OF,
    }


def _print(name: str, left: Leftovers) -> None:
    rows = [
        (f"    {t.kind}", t.name, t.state, "?" if t.usd is None else f"{t.usd:.4f}", t.note)
        for t in sorted(left.resources, key=lambda t: t.is_free)
    ]
    if rows:
        show(("    what", "name", "state", "USD/h", ""), rows)
        say("    To remove:")
        for item in left.resources:
            say(f"        {item.remove}")
    for text in left.unseen:
        say(f"    could not inspect {text}")
    costly, free = len(left.costly), len(left.resources) - len(left.costly)
    if costly:
        unknown = " and resources without a known price (?)" if any(t.usd is None for t in left.resources) else ""
        summary = f"{costly} left, {_usd(left):.4f} USD an hour, {_usd(left) * HOURS:.2f} a month{unknown}"
        summary += f" (list prices of {PRICES_OF})"
    else:
        summary = "nothing is left that costs money" if not left.unseen else "nothing was seen, which proves nothing"
    say(f"{name}: {left.place}: {summary}" + (f"; {free} that cost nothing" if free else ""))
