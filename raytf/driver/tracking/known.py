"""What a run's folder knows of the trackers that hear of the run."""

from __future__ import annotations

import dataclasses
import json
import uuid
from dataclasses import dataclass

from raytf.errors import ConfigError
from raytf.storage.storage import Storage

#: In the run's folder.
FILE = "tracking.json"


@dataclass(frozen=True)
class Known:
    """The contents of the file.

    Attributes:
        key: by which trackers know the run.
        complete: flags of those that were told of all of it.
        heard: last global step that the program's own callbacks of trackers were told of.
    """

    key: str
    complete: tuple[str, ...] = ()
    heard: int = 0

    def write(self, run: Storage) -> None:
        run.put(FILE, json.dumps(dataclasses.asdict(self)).encode())


def read(run: Storage) -> Known:
    """What is known of a run; a new key is written down before a tracker hears of it.

    Raises:
        ConfigError: the file is damaged.
    """
    text = run.get_or_none(FILE)
    if text is None:
        known = Known(uuid.uuid4().hex)
        known.write(run)
        return known
    try:
        found = json.loads(text)
        return Known(str(found["key"]), tuple(map(str, found["complete"])), int(found.get("heard", 0)))
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{run.locate(FILE)} is damaged. Remove it: trackers then see another run.") from None
