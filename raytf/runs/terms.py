"""The term of a run's driver: a number that rises with each driver of the run.

It orders what drivers and their workers write, since the clocks of two machines differ, and any clock may be set back.
A driver takes the term after those of its predecessor's lease and of all names in the run's folder. A predecessor that
was suspended or cut off thus writes nothing later that counts as newer.
"""

from __future__ import annotations

from raytf.checkpoint import manifest, naming
from raytf.runs import ledger, run_log
from raytf.storage.storage import Storage

_WITH_ATTEMPTS = (run_log.STEPS, run_log.ATTEMPTS, manifest.FOLDER)


def latest(run: Storage) -> int:
    """Return the highest term in the names of a run's files; 0 if there is none.

    Raises:
        StorageError: storage refuses.
    """
    terms = [naming.term_of(name) for folder in _WITH_ATTEMPTS for name in run.list(folder)]
    drivers = [ledger.driver_of(name) for name in run.list(ledger.FOLDER)]
    return max([*terms, *drivers], default=0)
