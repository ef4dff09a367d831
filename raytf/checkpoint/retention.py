"""Which checkpoints may be deleted. Decided from names and values alone."""

from __future__ import annotations

from collections.abc import Collection

from raytf.checkpoint.naming import attempt_of, restore_order, split_name


def to_delete(
    names: Collection[str],
    complete: Collection[str],
    keep: int,
    attempt: str,
    damaged: Collection[str] = (),
    needed: Collection[str] = (),
    over: Collection[str] = (),
    writing: Collection[str] = (),
) -> list[str]:
    """Checkpoints that may go: all complete ones but the newest `keep`, and unfinished ones that nobody writes.

    Damaged ones go first and count for nothing; needed ones (just written, restored from, the best) stay whatever their
    step. Where no good one is left, all stay.

    An unfinished one is nobody's when its attempt is over, or when it is older than the newest complete one and of
    another attempt.

    Args:
        names: all folders.
        complete: those with a manifest.
        keep: how many complete ones stay.
        attempt: the present one.
        damaged: complete ones that cannot be restored.
        needed: complete ones that stay.
        over: attempts whose unfinished saves are not written any more, whatever their step.
        writing: unfinished ones that are being written all the same.
    """
    newest_first = restore_order(set(complete) - set(damaged))
    if not newest_first:
        return []
    surplus = [n for n in newest_first[max(1, keep) :] if n not in needed]
    surplus += [n for n in damaged if n in complete]
    unfinished = set(names) - set(complete)
    orphans = [
        n
        for n in unfinished - set(writing)
        if split_name(n)[0] >= 0
        and (attempt_of(n) in over or (n < newest_first[0] and not split_name(n)[1].startswith(attempt)))
    ]
    return sorted([*surplus, *orphans])
