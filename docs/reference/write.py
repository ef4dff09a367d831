"""The pages of docs/reference that are generated from the code, and the keyword arguments that type checkers see.

    python docs/reference/write.py            writes three pages, and raytf/config/keywords.py
    python docs/reference/write.py --check    exits with 1 if one of them is not what would be written

Nobody edits these files by hand: the texts are beside the settings, the commands and the events.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import annotated_types

from raytf.commands.main import COMMANDS, load
from raytf.config import flag_parsing, setting
from raytf.config.setting import Expected, InSearch, Refused, Setting, When
from raytf.config.train_config import every_setting, section_types
from raytf.runs import events, run_folder
from raytf.runs.events import RunEvent

ROOT = Path(__file__).parents[2]

# -- settings.md -------------------------------------------------------------------------------------------------------

SETTINGS = """\
# Settings

This page lists all settings of a run. Each one is a flag of `raytf run`, and of a job whose dataclass has
`train: raytf.Flags`. With underscores for dashes, it is also a keyword argument of `raytf.fit(...)` and
`raytf.TrainConfig(...)`. See [Strategies](../guides/strategies.md) for choosing a strategy, and
[Tuning](../guides/tuning.md) for searching values.

If a setting belongs to the run's identity, pass the same value when you resume the run. `python
docs/reference/write.py` writes this page from the settings' fields.
"""
FINITE = annotated_types.Lt(float("inf"))
KINDS = {int: "a whole number", float: "a number", bool: "on or off", str: "a text"}


def settings_page() -> str:
    parts = [SETTINGS]
    for section in section_types().values():
        texts = flag_parsing.texts(section)
        title = section.__name__.removesuffix("Section")
        parts.append(f"\n## {title}\n\n{paragraph(inspect.getdoc(section) or '')}\n")
        parts += [setting_entry(its, texts[its.name]) for its in setting.of(section) if its.name in texts]
    return "".join(parts)


def setting_entry(its: Setting, text: str) -> str:
    searches = sorted(its.in_search, key=list(InSearch).index)
    facts = [
        f"Takes {setting_values(its)}; {setting_default(its)}.",
        *setting_identity(its),
        *(setting_refusal(its, refused) for refused in its.refusals),
        *(f"In a search, {note.value}." for note in searches),
    ]
    lines = [paragraph(f"- {fact}", "  ") + "\n" for fact in facts]
    return "".join([f"\n### `{its.flag}`\n\n{paragraph(text)}\n\n", *lines])


def setting_values(its: Setting) -> str:
    if its.choices:
        return " or ".join(f"`{choice}`" for choice in its.choices)
    own = next((note.text.partition(".")[0] for note in its.notes if isinstance(note, Expected)), None)
    limits = [setting.words(bound).removeprefix("a number") for bound in its.bounds if bound != FINITE]
    return own or KINDS[its.kinds[0]] + "".join(f"{'' if limit[0] in ', ' else ', '}{limit}" for limit in limits)


def setting_default(its: Setting) -> str:
    if its.default is None:
        return "left open by default"
    text = {True: "on", False: "off"}[its.default] if isinstance(its.default, bool) else f"`{its.default}`"
    return f"default {text}"


def setting_identity(its: Setting) -> list[str]:
    identity = its.identity
    if identity is None:
        return []
    if identity.within is not None:
        return [f"Belongs to the run's identity together with `{setting.flag(identity.within)}`."]
    when = "" if identity.when is When.ALWAYS else f" {identity.when.value}"
    return [f"Belongs to the run's identity{when}."]


def setting_refusal(its: Setting, refused: Refused) -> str:
    servers = {None: "", True: " and `--sync-replicas`", False: " without `--sync-replicas`"}[refused.sync_replicas]
    fine = " or ".join(f"`{its.typed(value)}`" for value in refused.unless)
    return (
        f"Not with `--strategy` {' or '.join(f'`{name}`' for name in refused.by)}{servers}"
        f"{f', but for {fine}' if fine else ''}."
    )


# -- commands.md -------------------------------------------------------------------------------------------------------

COMMANDS_TOP = """\
# Commands

This page lists each command of `raytf` with its flags. `raytf COMMAND --help` shows the same. The flags of a run are in
[Settings](settings.md), and exit codes in [Endings](../guides/endings.md).
"""


def commands_page() -> str:
    parts = [COMMANDS_TOP]
    for name in COMMANDS:
        module, function = load(name)
        for sub, run in ({"": function} if function is not None else module.SUBCOMMANDS).items():
            parts.append(command_entry(f"raytf {name} {sub}".strip(), run))
    return "".join(parts)


def command_entry(name: str, run: Callable[[Any], object]) -> str:
    groups = flag_parsing.of_command(run)
    own = [group for group in groups if group.kind not in section_types().values()]
    every = [(flag, flag_parsing.texts(group.kind).get(flag.name, "")) for group in own for flag in group.flags]
    about = inspect.cleandoc(groups[0].kind.__doc__ or "")
    lines = [f"\n## `{name}`"]
    for part in about.split("\n\n"):
        lines += ["", paragraph(part)]
    lines += [f"\n    {flag_parsing.usage(name, groups)}"]
    if every:
        lines += ["", "| flag | takes | |", "| --- | --- | --- |"]
        lines += [row([flag_names(flag), flag_value(flag), text + flag_default(flag)]) for flag, text in every]
    if len(own) < len(groups):
        lines += ["", "It takes the flags of [Settings](settings.md) too."]
    return "\n".join(lines) + "\n"


def flag_names(flag: Setting) -> str:
    if flag.is_positional:
        return f"`{flag.placeholder}`"
    is_plain = not flag.is_switch or flag.default is False
    return f"`{flag.flag}`" if is_plain else ", ".join(f"`{name}`" for name in flag.flag_names)


def flag_value(flag: Setting) -> str:
    return "" if flag.is_switch or flag.is_positional else f"`{flag.placeholder}`"


def flag_default(flag: Setting) -> str:
    value = flag.default
    if flag.is_needed and not flag.is_positional:
        return " Needed."
    if value is None or value is dataclasses.MISSING or value in (False, "", ()):
        return ""
    return f" Default {'on' if value is True else f'`{value}`'}."


# -- run-folder.md -----------------------------------------------------------------------------------------------------

FOLDER = """\
# A run's folder

A run is a folder, `STORAGE/NAME`, or a prefix of an object store. This page lists the files in it, and the events of
its ledger. [Checkpoints](../guides/checkpoints.md) says when a checkpoint is valid, and
[The ledger](../guides/ledger.md) how events become times.
"""
EVENTS = """\
## Events

`ledger/*.jsonl` has one JSON object per line, with null for a number that is NaN or infinite. Each object has `time`
(seconds since 1970) and `kind`. While a driver runs, it also has `step` and `stall` (seconds for which this group stood
still).
"""


def run_folder_page() -> str:
    lines = [FOLDER, "| folder | content |", "| --- | --- |"]
    lines += [
        row([f"`{name}/`", text]) for name, text in sorted({**run_folder.FOLDERS, **run_folder.SOMETIMES}.items())
    ]
    lines += ["", "| file | content |", "| --- | --- |"]
    lines += [row([f"`{name}`", text]) for name, text in run_folder.FILES.items()]
    lines += ["", EVENTS, "| kind | when | fields |", "| --- | --- | --- |"]
    lines += [row([f"`{kind}`", *event_cells(event)]) for kind, event in events.KINDS.items()]
    lines += [row([f"`{kind}`", *about]) for kind, about in events.OTHERS.items()]
    return "\n".join(lines) + "\n"


def event_cells(event: type[RunEvent]) -> tuple[str, str]:
    about = inspect.cleandoc(event.__doc__ or "").partition("\n\n")[0]
    named = [field.metadata.get("row", field.name) for field in dataclasses.fields(event)]
    return " ".join(about.split()), ", ".join(f"`{name}`" for name in named)


# -- raytf/config/keywords.py ------------------------------------------------------------------------------------------

#: Settings that `fit` takes as arguments of Keras instead. `verbose` has another meaning there.
OF_KERAS = ("global_batch_size", "epochs", "verbose")
KEYWORDS = """\
\"\"\"The settings of a run as keyword arguments, with their types.

`python docs/reference/write.py` writes this module from the settings' fields. Do not edit it.
\"\"\"

from __future__ import annotations

from os import PathLike
from typing import Literal, TypedDict


class FitSettings(TypedDict, total=False):
    \"\"\"The settings that `raytf.fit` takes beside the arguments of `keras.Model.fit`.\"\"\"
"""
ALL_KEYWORDS = """

class Settings(FitSettings, total=False):
    \"\"\"All settings of a run, for `raytf.TrainConfig`.\"\"\"
"""


def keywords_module() -> str:
    own = [its for its in every_setting() if its.name in OF_KERAS]
    others = [its for its in every_setting() if its not in own]
    return "".join([KEYWORDS, *keyword_fields(others), ALL_KEYWORDS, *keyword_fields(own)])


def keyword_fields(settings: Iterable[Setting]) -> Iterator[str]:
    texts = {name: text for section in section_types().values() for name, text in flag_parsing.texts(section).items()}
    for its in settings:
        yield f"\n    {its.name}: {keyword_type(its)}\n{keyword_docstring(texts[its.name])}\n"


def keyword_type(its: Setting) -> str:
    choices = ", ".join(f'"{choice}"' for choice in its.choices)
    own = f"Literal[{choices}]" if choices else its.kinds[0].__name__
    others = ["PathLike[str]" if kind is os.PathLike else kind.__name__ for kind in its.python_kinds[1:]]
    return " | ".join([own, *others, *(["None"] if its.default is None else [])])


def keyword_docstring(text: str) -> str:
    """Return the text of a flag as a docstring that names settings as Python does."""
    names = {its.flag: f"`{its.name}`" for its in every_setting()}
    named = re.sub(r"--[a-z][a-z-]*", lambda flag: names.get(flag[0], flag[0]), text)
    filled = textwrap.fill(f'"""{named}"""', 116, break_long_words=False, break_on_hyphens=False)
    return textwrap.indent(filled, "    ")


# -- all of them -------------------------------------------------------------------------------------------------------


def row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def paragraph(text: str, indent: str = "") -> str:
    """Return a paragraph in lines; those after the first are indented."""
    return textwrap.fill(
        " ".join(text.split()), 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


FILES: dict[str, Callable[[], str]] = {
    "docs/reference/settings.md": settings_page,
    "docs/reference/commands.md": commands_page,
    "docs/reference/run-folder.md": run_folder_page,
    "raytf/config/keywords.py": keywords_module,
}


def main() -> int:
    """Write the files, or compare them with what is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file differs")
    is_check, differing = parser.parse_args().check, []
    for name, make in FILES.items():
        path, text = ROOT / name, make()
        if not is_check:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            differing.append(name)
    if differing:
        print(f"{', '.join(differing)}: not what is written by python docs/reference/write.py", file=sys.stderr)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
