"""The page with all settings, written from their fields.

`python -m raytf.config.reference > docs/reference/settings.md` (`make docs`) writes it.
"""

from __future__ import annotations

import inspect
import textwrap
import typing
from typing import Any

import annotated_types

from raytf.config import flags, setting
from raytf.config.setting import Expected, InSearch, Refused, Setting, When
from raytf.config.train_config import TrainConfig

_TOP = """\
# Settings

All settings of a run: the flags of a job whose dataclass has `train: raytf.Flags`, and, with underscores for dashes,
keyword arguments of `raytf.fit(...)` and `raytf.TrainConfig(...)`. [Strategies](../guides/strategies.md) says which
strategy is for what, [Tuning](../guides/tuning.md) how to search.

A setting that belongs to the run's identity must be given as it was when a run is resumed. `python -m
raytf.config.reference` writes this page from the settings' fields.
"""
_FINITE = annotated_types.Lt(float("inf"))
_KINDS = {int: "a whole number", float: "a number", bool: "on or off", str: "a text"}


def page() -> str:
    """The page, in Markdown."""
    parts = [_TOP]
    for section in typing.get_type_hints(TrainConfig).values():
        texts = flags.texts(section)
        parts.append(f"\n## {_title(section)}\n\n{filled(inspect.getdoc(section) or '')}\n")
        parts += [_entry(its, texts[its.name]) for its in setting.of(section) if its.name in texts]
    return "".join(parts)


def _title(section: type) -> str:
    return section.__name__.removesuffix("Section")


def _entry(its: Setting, text: str) -> str:
    facts = [
        f"Takes {_takes(its)}; {_default(its)}.",
        *_identity(its),
        *(_refusal(its, refused) for refused in its.refusals),
        *_search(its),
    ]
    return "".join([f"\n### `{its.flag}`\n\n{filled(text)}\n\n", *(filled(f"- {fact}", "  ") + "\n" for fact in facts)])


def filled(text: str, indent: str = "") -> str:
    """A paragraph of a page, in lines; those after the first are indented."""
    return textwrap.fill(
        " ".join(text.split()), 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _takes(its: Setting) -> str:
    if its.choices:
        return " or ".join(f"`{choice}`" for choice in its.choices)
    own = next((note.text.partition(".")[0] for note in its.notes if isinstance(note, Expected)), None)
    kind = _KINDS[its.kinds[0]]
    limits = [setting.words(bound).removeprefix("a number") for bound in its.bounds if bound != _FINITE]
    return own or kind + "".join(f"{'' if limit.startswith((',', ' ')) else ', '}{limit}" for limit in limits)


def _default(its: Setting) -> str:
    if its.default is None:
        return "left open by default"
    said = {True: "on", False: "off"}[its.default] if isinstance(its.default, bool) else f"`{its.default}`"
    return f"default {said}"


def _identity(its: Setting) -> list[str]:
    identity = its.identity
    if identity is None:
        return []
    if identity.within is not None:
        return [f"Belongs to the run's identity together with `{setting.flag(identity.within)}`."]
    when = "" if identity.when is When.ALWAYS else f" {identity.when.value}"
    return [f"Belongs to the run's identity{when}."]


def _refusal(its: Setting, refused: Refused) -> str:
    servers = {None: "", True: " and `--sync-replicas`", False: " without `--sync-replicas`"}[refused.sync_replicas]
    fine = " or ".join(f"`{its.given(value)}`" for value in refused.unless)
    return (
        f"Not with `--strategy` {' or '.join(f'`{name}`' for name in refused.by)}{servers}"
        f"{f', but for {fine}' if fine else ''}."
    )


def _search(its: Setting) -> list[str]:
    """What it is in a search; that most may change while one goes on is not said of each."""
    said: list[Any] = sorted(its.in_search, key=list(InSearch).index)
    return [f"In a search, {note.value}." for note in said]


if __name__ == "__main__":
    print(page(), end="")
