"""Pages of docs/reference that are written from the code.

`python -m raytf.commands._reference docs/reference` (`make docs`) writes them.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from raytf.commands.main import COMMANDS
from raytf.config import flags, help_page
from raytf.config.flags import Flag
from raytf.config.reference import filled
from raytf.config.train_config import TrainConfig
from raytf.runs import events, run_folder
from raytf.runs.events import RunEvent

_COMMANDS = """\
# Commands

Each command of `raytf` with its flags; `raytf COMMAND --help` shows the same. A job's own flags are in
[Settings](settings.md), exit codes in [Endings](../guides/endings.md).
"""
_FOLDER = """\
# A run's folder

What lies in `STORAGE/NAME`, be it a folder or a prefix of an object store. [Checkpoints](../guides/checkpoints.md) says
when a checkpoint is valid, [The ledger](../guides/ledger.md) how events become times.
"""
_EVENTS = """\
## Events

`ledger/*.jsonl` has one JSON object a line, with null for a number that is NaN or infinite. Each has `time` (seconds
since 1970), `kind` and, while a driver runs, `step` and `stall` (seconds that this group stood still).
"""


def pages() -> dict[str, str]:
    """File name -> the page, in Markdown."""
    return {"commands.md": _commands(), "run-folder.md": _run_folder()}


def _commands() -> str:
    parts = [_COMMANDS]
    for name, (module, _) in COMMANDS.items():
        loaded = importlib.import_module(f"raytf.commands.{module}")
        for sub, run in getattr(loaded, "SUBCOMMANDS", {"": getattr(loaded, "main", None)}).items():
            parts.append(_command(f"raytf {name} {sub}".strip(), run))
    return "".join(parts)


def _command(name: str, run: Callable[[Any], object]) -> str:
    groups = flags.of_command(run)
    sections = typing.get_type_hints(TrainConfig).values()
    own = [group for group in groups if group.kind not in sections]
    every = [(flag, flags.texts(group.kind).get(flag.setting.name, "")) for group in own for flag in group.flags]
    about = inspect.cleandoc(groups[0].kind.__doc__ or "")
    lines = [f"\n## `{name}`", *_paragraphs(about), f"\n    {help_page.usage(name, groups)}"]
    if every:
        lines += ["", "| flag | takes | |", "| --- | --- | --- |"]
        lines += [_row([_names(flag), _takes(flag), text + _default(flag)]) for flag, text in every]
    if len(own) < len(groups):
        lines += ["", "It takes the flags of [Settings](settings.md) too."]
    return "\n".join(lines) + "\n"


def _paragraphs(text: str) -> Iterator[str]:
    for part in text.split("\n\n"):
        yield ""
        yield filled(part)


def _names(flag: Flag) -> str:
    its = flag.setting
    if flag.is_positional:
        return f"`{flag.value}`"
    return f"`{its.flag}`" if not flag.is_switch or its.default is False else ", ".join(f"`{n}`" for n in flag.names)


def _takes(flag: Flag) -> str:
    return "" if flag.is_switch or flag.is_positional else f"`{flag.value}`"


def _default(flag: Flag) -> str:
    value = flag.setting.default
    if flag.is_needed and not flag.is_positional:
        return " Needed."
    if value is None or value is dataclasses.MISSING or value in (False, "", ()):
        return ""
    return f" Default {'on' if value is True else f'`{value}`'}."


def _run_folder() -> str:
    lines = [_FOLDER, "| folder | |", "| --- | --- |"]
    lines += [
        _row([f"`{name}/`", text]) for name, text in sorted({**run_folder.FOLDERS, **run_folder.SOMETIMES}.items())
    ]
    lines += ["", "| file | |", "| --- | --- |"]
    lines += [_row([f"`{name}`", text]) for name, text in run_folder.FILES.items()]
    lines += ["", _EVENTS, "| kind | when | fields |", "| --- | --- | --- |"]
    lines += [_row([f"`{kind}`", *_event(event)]) for kind, event in events.KINDS.items()]
    lines += [_row([f"`{kind}`", *about]) for kind, about in events.OTHERS.items()]
    return "\n".join(lines) + "\n"


def _event(event: type[RunEvent]) -> tuple[str, str]:
    about = inspect.cleandoc(event.__doc__ or "").partition("\n\n")[0]
    named = [field.metadata.get("row", field.name) for field in dataclasses.fields(event)]
    return " ".join(about.split()), ", ".join(f"`{name}`" for name in named)


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    for file, text in pages().items():
        Path(sys.argv[1], file).write_text(text, encoding="utf-8")
