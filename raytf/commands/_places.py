"""Which run a person means."""

from __future__ import annotations

import os
import re

from raytf.config.sections import RunSection

_NAME = re.compile(r"[\w\-+=@][\w.\-+=@]*(/[\w\-+=@][\w.\-+=@]*)?")
#: Where runs are kept where nobody says otherwise.
USUAL = RunSection().storage


def run_uri(text: str) -> str:
    """The folder of a run: as given, or, for a name as `raytf runs` lists it, that run in ~/raytf-runs.

    Args:
        text: what was typed; a folder of that name in the present one comes first.
    """
    return f"{USUAL}/{text}" if _NAME.fullmatch(text) and not os.path.exists(text) else text
