"""Mistakes put into the code on purpose, each of which the simulator must find."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import NamedTuple

_MEMBERSHIP, _MEMBER = "raytf.distributed.membership.generations", "raytf.distributed.membership.member"
_ARBITRATION, _SILENCE = "raytf.driver.arbitration", "raytf.driver.supervision.liveness"
_REACHABILITY, _COMMIT = "raytf.distributed.membership.generations", "raytf.checkpoint.commit"
_MEETING_POINT, _WAITING = "raytf.distributed.membership.rendezvous", "raytf.distributed.membership.peer_liveness"
_LEASE = "raytf.runs.lease_decisions"
_FAILURE, _SUPERVISOR = "raytf.driver.supervision.failures", "raytf.driver.supervision.retry"
_HANGS, _RETRY = "raytf.driver.supervision.hang_detector", "raytf.driver.supervision.retry"
_RESIZING = "raytf.driver.ray_train.resizing"
_LEDGER = _TURNS = "raytf.checkpoint.slot_ledger"
_PLAN, _HEALTH = "raytf.checkpoint.restore", "raytf.checkpoint.keeper_client"


class Mutant(NamedTuple):
    """A mistake.

    Attributes:
        module: in which it is made.
        right: text that occurs in it once.
        wrong: what stands there instead.
        seed: of a schedule that finds it.
    """

    module: str
    right: str
    wrong: str
    seed: int

    def apply(self) -> None:
        """Load the module with its mistake; nothing that imports it may have been loaded."""
        assert self.module not in sys.modules, f"{self.module} is loaded already"
        spec = importlib.util.find_spec(self.module)
        assert spec is not None
        assert spec.origin is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.module] = module
        source = Path(spec.origin).read_text()
        exec(compile(source.replace(self.right, self.wrong), spec.origin, "exec"), module.__dict__)
        package, _, name = self.module.rpartition(".")
        setattr(importlib.import_module(package), name, module)


#: By what is wrong.
MUTANTS = {
    "a generation starts before all members have left the last one": Mutant(
        _MEMBERSHIP,
        "if not self._ready or len(self._ready) < len(self.generation.members) - len(self._lost):",
        "if not self._ready:",
        1,
    ),
    "members wait for a lost member": Mutant(_MEMBERSHIP, "            self._lost.add(name)\n", "", 1),
    "a group that has lost all members continues without them": Mutant(
        _MEMBERSHIP, "if self._lost.issuperset(self.generation.members):", "if False:", 3
    ),
    "members that meet do not learn that a member is lost": Mutant(
        _MEMBERSHIP, '"lost": lambda: self._lost', '"lost": lambda: False', 1
    ),
    "members that meet do not learn that a member has left": Mutant(
        _MEMBERSHIP, '"left": lambda: self._ready', '"left": lambda: False', 20
    ),
    "members do not learn that a worker waits to join": Mutant(
        _MEMBERSHIP, '"pause": lambda: self.is_pause_wanted', '"pause": lambda: False', 19
    ),
    "all workers that have the state may be dismissed": Mutant(
        _MEMBERSHIP, "return leaving if (having or set(living)) - leaving else set()", "return leaving", 4
    ),
    "members without a state count when others are dismissed": Mutant(
        _MEMBERSHIP,
        "return leaving if (having or set(living)) - leaving else set()",
        "return leaving if len(leaving) < len(living) else set()",
        1201,
    ),
    "a worker leaves before its replacement has joined": Mutant(
        _MEMBERSHIP, " and self._dismissed[name] <= here}", "}", 244
    ),
    "two generations have one number": Mutant(_MEMBERSHIP, "self._number += 1", "self._number = 1", 1),
    "workers that cannot reach each other stay": Mutant(
        _MEMBERSHIP,
        "stay = reaching_each_other(list(places), self._apart(places), with_state)",
        "stay = list(places)",
        20,
    ),
    "a newcomer is blamed for a failed rendezvous that others explain": Mutant(
        _MEMBERSHIP,
        "if self._fled and not (self._lost or self._unreached):",
        "if self._fled and not self._lost:",
        2612,
    ),
    "a group has more members than there is room for": Mutant(_MEMBERSHIP, "[: max(0, self.most - staying)]", "[:]", 4),
    "a worker does not learn that a member of its generation is lost": Mutant(
        _MEMBER, "return self.is_lost or self._broken == number", "return self.is_lost", 1
    ),
    "a worker does not report which workers it did not reach": Mutant(
        _MEMBER, "[generation.members[rank] for rank in unreached]", "[]", 20
    ),
    "the state comes from a worker that is behind": Mutant(
        _MEMBER, "furthest = max(steps)", "furthest = min(steps)", 1
    ),
    "a worker gives up after one failed rendezvous": Mutant(_MEMBER, "_MEETINGS = 10", "_MEETINGS = 1", 1),
    "a worker that hangs up is not lost": Mutant(
        _ARBITRATION,
        "        self._forget(name)\n        return self._messages_for(self._membership.lose(name))\n",
        "        self._forget(name)\n        return []\n",
        2,
    ),
    "a silent worker is not lost": Mutant(_SILENCE, "if quiet.missed > self._most or", "if quiet.missed > 1e9 or", 1),
    "a missing link counts as an existing one": Mutant(
        _REACHABILITY, "all(link & out for link in missing)", "any(link & out for link in missing)", 20
    ),
    "a checkpoint is committed before all shares are written": Mutant(
        _COMMIT, "votes.written >= world_size", "votes.written >= 1", 0
    ),
    "ranks wait as long for a host that is cut off as for a busy one": Mutant(
        _MEETING_POINT, "REACH_SECONDS = 10.0", "REACH_SECONDS = 60.0", 20
    ),
    "ranks that meet do not check whether the generation is over": Mutant(
        _MEETING_POINT, "        if is_over:\n", "        if False:\n", 1
    ),
    "a rank that does not listen yet counts as unreached": Mutant(
        _MEETING_POINT, "or not isinstance(error, ConnectionRefusedError)", "or True", 744
    ),
    "a caller of another generation is answered": Mutant(
        _MEETING_POINT, "is_of_group and called == self._rank", "called == self._rank", 622
    ),
    "ranks wait for a dead process while its socket is open": Mutant(
        _WAITING, "            if sign is Sign.GONE:", "            if False:", 12
    ),
    "ranks that wait do not check whether a member is lost": Mutant(_WAITING, "if is_broken:", "if False:", 57),
    "ranks wait for a silent rank of another host": Mutant(
        _WAITING, "if self._quiet[number] >= self._looks:", "if False:", 1
    ),
    "a driver that has lost the run still writes": Mutant(
        _LEASE, "    if not is_owner(lease, owner):\n", "    if False:\n", 314
    ),
    "a lease is taken over too early": Mutant(_LEASE, "STALE_SECONDS = 20.0", "STALE_SECONDS = 2.0", 19),
    "a lease is deleted without a renewal before": Mutant(
        _LEASE, "is_mine = yield Renew(_text(json.loads(lease[0]), _LAST_BEAT), lease[1])", "is_mine = True", 48816
    ),
    "an owner does not notice that it has lost the run": Mutant(
        _LEASE, '            if not is_owner(lease, owner["id"]):\n                return\n', "", 280
    ),
    "a failed renewal counts as a successful one": Mutant(_LEASE, "problem = one_line(error, 300)", 'problem = ""', 3),
    "a driver takes its predecessor's term": Mutant(_LEASE, "= 1 + max(owner", "= max(owner", 3),
    "a worker that has left as planned counts as a survivor": Mutant(
        _FAILURE, "return {*errors, *left}", "return set(errors)", 4614
    ),
    "a worker that waits to join hides a hang in a step": Mutant(
        _HANGS, "if now - self._meeting_since.get((b.rank, b.pid), now) < _MEETING_SECONDS", "if True", 60
    ),
    "a worker that waits for data forever is not blamed": Mutant(
        _HANGS, "working = [b for b in late if b.activity not in _WAITING]", "working = []", 37
    ),
    "a node that was cut off once is refused forever": Mutant(
        _MEMBERSHIP, "looks - 1 for node", "looks for node", 7998
    ),
    "a node that others cannot reach is not excluded": Mutant(
        _SUPERVISOR, "self.exclusion.is_unreachable(nodes, now)", "pass", 68
    ),
    "a run gives up after one failure without a new step": Mutant(
        _RETRY, "FRUITLESS_FAILURES = 5", "FRUITLESS_FAILURES = 1", 13
    ),
    "a run does not follow a cluster that has grown": Mutant(
        _RESIZING,
        "if self._is_partial and wanted and (lasting or view.leaving):",
        "if self._is_partial and wanted and view.leaving:",
        197,
    ),
    "a late request of replaced workers gets memory": Mutant(
        _LEDGER, "        if not self.may_reserve(request):\n", "        if False:\n", 66
    ),
    "a copy of replaced workers is dropped too early": Mutant(
        _LEDGER, " - self._granted() - kept)", " - self._granted())", 1
    ),
    "a repeated request gets other memory": Mutant(
        _LEDGER, "request.attempt != self.attempt or request.serial > serial:", "True:", 874
    ),
    "memory of earlier workers is not freed": Mutant(
        _LEDGER, "sorted(self._slots.keys() - self._granted() - kept)", "[]", 1
    ),
    "a copy uses the slot of the newest copy": Mutant(
        _TURNS, "slot, self._next = self._next, 1 - self._next", "slot = self._next", 0
    ),
    "a copy does not wait until the copy before is complete on all ranks": Mutant(
        _TURNS, "return not self.is_settled and self.asked != step", "return False", 0
    ),
    "a failed copy replaces the copy before": Mutant(
        _TURNS, "self._next, self._is_aborted = 1 - self._next, True", "self._is_aborted = True", 105
    ),
    "memory is restored although storage may have a later step": Mutant(
        _PLAN, "asks_storage=not newer or is_saving", "asks_storage=not newer", 998
    ),
    "memory is restored although storage is known to have a later step": Mutant(
        _PLAN, "if copy.step >= known_step", "if True", 111
    ),
    "storage is restored although memory has a later step": Mutant(
        _PLAN, "key=lambda entry: entry[:2]", "key=lambda entry: entry[1] * -1", 3
    ),
    "a copy is written into memory of a lost keeper": Mutant(
        _HEALTH, "        self.is_lost = True\n\n    def replace", "        pass\n\n    def replace", 0
    ),
}
