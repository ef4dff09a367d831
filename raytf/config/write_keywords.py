"""Writes `raytf/config/keywords.py`, in which type checkers find the settings, from the fields of the sections.

`python -m raytf.config.write_keywords` (`make docs`) writes it again.
"""

from __future__ import annotations

import inspect
import os
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path

from raytf.config import flags
from raytf.config.setting import Setting
from raytf.config.train_config import every_setting, section_types

#: Settings that `fit` takes as arguments of Keras instead. `verbose` has another meaning there.
OF_KERAS = ("global_batch_size", "epochs", "verbose")

_TOP = """\
\"\"\"The settings of a run as keyword arguments, with their types.

`python -m raytf.config.write_keywords` writes this module from the settings' fields. Do not edit it.
\"\"\"

from __future__ import annotations

from os import PathLike
from typing import Literal, TypedDict


class FitSettings(TypedDict, total=False):
    \"\"\"The settings that `raytf.fit` takes beside the arguments of `keras.Model.fit`.\"\"\"
"""
_REST = """

class Settings(FitSettings, total=False):
    \"\"\"All settings of a run, for `raytf.TrainConfig`.\"\"\"
"""


def source() -> str:
    """Return the source of the module."""
    own = [its for its in every_setting() if its.name in OF_KERAS]
    return "".join([_TOP, *_fields(its for its in every_setting() if its not in own), _REST, *_fields(own)])


def _fields(settings: Iterable[Setting]) -> list[str]:
    texts = {name: text for section in section_types().values() for name, text in flags.texts(section).items()}
    return [f"\n    {its.name}: {_hint(its)}\n{_docstring(texts[its.name])}\n" for its in settings]


def _hint(its: Setting) -> str:
    """Return the type of a setting as source."""
    choices = ", ".join(f'"{choice}"' for choice in its.choices)
    own = f"Literal[{choices}]" if choices else its.kinds[0].__name__
    others = ["PathLike[str]" if kind is os.PathLike else kind.__name__ for kind in its.python_kinds[1:]]
    return " | ".join([own, *others, *(["None"] if its.default is None else [])])


def _docstring(text: str) -> str:
    """Return the text of a flag as a docstring that names settings as Python does."""
    names = {its.flag: f"`{its.name}`" for its in every_setting()}
    named = re.sub(r"--[a-z][a-z-]*", lambda flag: names.get(flag[0], flag[0]), text)
    filled = textwrap.fill(f'"""{named}"""', 116, break_long_words=False, break_on_hyphens=False)
    return textwrap.indent(filled, "    ")


if __name__ == "__main__":
    from raytf.config import keywords

    Path(inspect.getfile(keywords)).write_text(source())
