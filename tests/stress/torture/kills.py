"""Checkpoints under torture: ranks are killed wherever a checkpoint can be, and then everything must be there.

    python -m tests.stress.torture.kills --kills 200 --store local
    python -m tests.stress.torture.kills --kills 200 --store s3 --damage --fail-share 0.1

Real processes of one to three ranks, without TensorFlow, copy and save a state that is a function of the step, with
raytf's own DurableTier, Commit, Storage and memory slots. SIGKILL ends them at random moments: while they restore, copy
into memory, serialize, upload, write the manifest, delete old checkpoints. After each kill a fresh process restores,
and compares each bit of whatever looks whole. Exit code 1 when anything is corrupt or older than what had been
reported as complete. docs/evidence/torture.md has results.
"""

from __future__ import annotations

import json
import os
import random
import selectors
import signal
import socket
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from raytf.storage.storage import Storage
from tests.stress.torture.processes import Rank, Run, ask, child, fork, place
from tests.stress.torture.rank import FaultyStorage, WatchedStorage, run_rank
from tests.stress.torture.restore import damage, examine
from tests.stress.torture.state import MOMENTS, Plan

#: Attempts that share a run; then a new one begins from nothing.
_ATTEMPTS = 25
_PLANTS = ("", "no-copy", "lying-store")
#: A moment that does not come within this many seconds is a defect.
_MOMENT_SECONDS = 120.0


@dataclass(frozen=True)
class Arguments:
    """Kill ranks that save checkpoints, again and again, and check what is left."""

    kills: int = 200
    """How many."""
    seed: int = 0
    """Of all that is random but the machine."""
    store: str = "local"
    """local or s3 (a moto server that is started for it)."""
    damage: bool = False
    """After every second kill, flip bits in checkpoints, truncate and delete files."""
    fail_share: float = 0.0
    """Share of the calls of raytf's Storage (local) or of HTTP requests (s3) that fail."""
    fail_tries: int = 1
    """How often a request fails in a row (s3): the client tries three times before raytf sees a failure."""
    mib: float = 2.0
    """Size of the state."""
    plant: str = ""
    """A defect to find: no-copy (what is saved still changes) or lying-store (manifests are not written)."""
    json: Path | None = None
    """Write the numbers here too."""

    def check(self) -> None:
        for name, value, right in (
            ("store", self.store, self.store in ("local", "s3")),
            ("plant", self.plant, self.plant in _PLANTS),
            ("kills", self.kills, self.kills > 0),
            ("fail-share", self.fail_share, 0 <= self.fail_share < 1),
        ):
            if not right:
                sys.exit(f"error: --{name} {value}: not known or out of range; see --help.")


class Torture:
    """All kills of one command, and what they did."""

    def __init__(self, arguments: Arguments, root: str, plain: str):
        self.arguments, self._root, self._plain = arguments, root, plain
        self._draw = random.Random(arguments.seed)
        self._size = int(arguments.mib * 2**20)
        self._runs = 0
        self.kills: Counter[str] = Counter()
        self.rows: dict[str, Counter[str]] = {}
        self.totals: Counter[str] = Counter()
        self.violations: list[str] = []

    def all(self) -> None:
        order: list[str] = []
        current: Run | None = None
        for number in range(self.arguments.kills):
            if not order:
                order = self._draw.sample(MOMENTS, len(MOMENTS))
            if number % _ATTEMPTS == 0:
                if current is not None:
                    self._end(current)
                    print(f"{number} of {self.arguments.kills} kills", file=sys.stderr, flush=True)
                self._runs += 1
                name = f"run-{self._runs}"
                current = Run(child(self._root, name), child(self._plain, name), self._draw.randint(1, 3))
            assert current is not None
            self._kill(current, number, order.pop())

    def _end(self, run: Run) -> None:
        for node in list(run.slots):
            run.drop(node)
        if not self.violations:
            ask(lambda: Storage(run.plain).delete("") or {})

    def _plan(self, number: int, moment: str, keep: int) -> Plan:
        draw = self._draw
        ranks = draw.randint(1, 3)
        dawdle = draw.choice([0.002, 0.01, 0.03])
        return Plan(
            seed=f"{self.arguments.seed} {number}",
            attempt=f"20260101T{number:06d}-torture",
            ranks=ranks,
            nodes=min(ranks, draw.randint(1, 2)),
            keep=keep,
            moment=moment,
            rank=0 if moment in ("manifest", "retention") else draw.randrange(ranks),
            skip=0 if moment == "restore" else draw.randint(0, 3),
            delay=draw.uniform(0, dawdle),
            alone=draw.choice([0.0, 0.0, draw.uniform(0, 0.03)]),
            dawdle=dawdle,
            plant=self.arguments.plant,
        )

    def _kill(self, run: Run, number: int, moment: str) -> None:
        plan = self._plan(number, moment, run.keep)
        before = {node: list(attempts) for node, attempts in run.slots.items()}
        run.reserve(plan)
        ranks = self._start(run, plan)
        came = self._wait(ranks, plan)
        self._end_ranks(ranks, plan)
        where = ranks[plan.rank].moment()
        self.kills[moment] += 1
        self.totals["hit as aimed"] += where == moment
        self.totals["saves reported complete"] += ranks[0].saves
        self.totals["saves reported failed"] += ranks[0].failed
        if not came:
            self._violate(number, plan, "stuck", f"rank {plan.rank} did not come to {moment}; it was at {where}")
        for rank in ranks:
            for text in rank.wrong:
                self._violate(number, plan, "corrupt", text)
        run.bound = max(run.bound, ranks[0].done)
        least = self._memory_bound(run, plan, ranks, before)
        row = self.rows.setdefault(where, Counter())
        row["kills"] += 1
        self._restore(run, number, plan, row, least)
        if self.arguments.damage and number % 2:
            self._damage(run, number, plan)

    def _start(self, run: Run, plan: Plan) -> list[Rank]:
        memory, ranks = run.memory(), []
        pairs = [socket.socketpair() for _ in range(plan.ranks - 1)]
        pipes = [os.pipe() for _ in range(plan.ranks)]
        for rank in range(plan.ranks):

            def work(rank: int = rank) -> None:
                own = [near for near, _ in pairs] if rank == 0 else [pairs[rank - 1][1]]
                for link in [end for pair in pairs for end in pair if end not in own]:
                    link.close()
                for other, (out, into) in enumerate(pipes):
                    os.close(out)
                    if other != rank:
                        os.close(into)
                run_rank(
                    plan,
                    rank,
                    own,
                    pipes[rank][1],
                    self._storage(WatchedStorage, run.uri, f"{plan.seed} {rank}"),
                    self._size,
                    memory,
                )

            ranks.append(Rank(fork(work), pipes[rank][0]))
        for end in (end for pair in pairs for end in pair):
            end.close()
        for _, into in pipes:
            os.close(into)
        return ranks

    def _storage(self, kind: type[FaultyStorage], uri: str, seed: str) -> Any:
        local = self.arguments.store == "local"
        return kind(uri, self.arguments.fail_share if local else 0.0, seed)

    def _wait(self, ranks: list[Rank], plan: Plan) -> bool:
        """Whether the moment came within the time."""
        deadline = time.monotonic() + _MOMENT_SECONDS
        aimed = ranks[plan.rank]
        with selectors.DefaultSelector() as selector:
            for rank in ranks:
                selector.register(rank.reports, selectors.EVENT_READ, rank)
            while aimed.entered[plan.moment] <= plan.skip:
                for key, _ in selector.select(1.0):
                    if not key.data.read():
                        return False
                if time.monotonic() > deadline:
                    return False
        return True

    def _end_ranks(self, ranks: list[Rank], plan: Plan) -> None:
        time.sleep(plan.delay)
        os.kill(ranks[plan.rank].pid, signal.SIGKILL)
        if plan.alone:
            time.sleep(plan.alone)
        for rank in ranks:
            if rank is not ranks[plan.rank]:
                os.kill(rank.pid, signal.SIGKILL)
        for rank in ranks:
            os.waitpid(rank.pid, 0)
            while rank.read():
                pass
            os.close(rank.reports)

    def _memory_bound(self, run: Run, plan: Plan, ranks: list[Rank], before: dict[int, list[str]]) -> int:
        """Lose the memory of some nodes; the newest step that must be in that of the others."""
        whole = {node: min(ranks[r].copied for r in plan.mates(node)) for node in range(plan.nodes)}
        for node, step in whole.items():  # as a keeper tidies up
            if step >= 0:
                run.drop(node, before.get(node, []))
        lost = self._draw.choice(["none", "none", "node", "all"])
        gone = list(run.slots) if lost == "all" else [self._draw.choice(list(run.slots))] if lost == "node" else []
        for node in gone:
            run.drop(node)
        self.totals["memory of nodes lost"] += len(gone)
        return max([step for node, step in whole.items() if node not in gone], default=-1)

    def _examine(self, run: Run) -> dict[str, Any]:
        memory = run.memory()
        seed = f"{self._draw.random()}"
        return ask(lambda: examine(self._storage(FaultyStorage, run.uri, seed), Storage(run.plain), memory, self._size))

    def _restore(self, run: Run, number: int, plan: Plan, row: Counter[str], least: int) -> None:
        found = self._examine(run)
        if "error" in found:
            row["lost"] += 1
            self._violate(number, plan, "lost", f"nothing was restored: {found['error']}")
            return
        row[found["tier"]] += 1
        row["corrupt"] += self._blame(run, number, plan, found)
        for what, step, bound in (
            ("restored", found["step"] if found["tier"] != "new" else -1, max(run.bound, least)),
            ("on storage", found["durable"], run.bound),
            ("in memory", found["memory"], least),
        ):
            if step < bound:
                row["lost"] += 1
                self._violate(number, plan, "lost", f"{what} step {step}, where step {bound} had been complete")
        for what, key in (
            ("slots torn, most at a time", "torn"),
            ("folders unfinished, most at a time", "unfinished"),
            ("temporary files left, most at a time", "temporary"),
        ):
            self.totals[what] = max(self.totals[what], found[key])
        self.totals["restores tried again"] += found["tries"]
        self.totals["checkpoints compared"] += len(found["valid"])

    def _damage(self, run: Run, number: int, plan: Plan) -> None:
        seed = f"{self._draw.random()}"
        before = self._examine(run)
        if "error" in before:
            self._violate(number, plan, "lost", f"nothing was restored: {before['error']}")
            return
        valid = before["valid"]
        if self._draw.random() < 0.5:
            for node in list(run.slots):
                run.drop(node)
        else:
            held = [fd for attempts in run.slots.values() for slots in attempts.values() for fd, _, _ in slots]
            fd = self._draw.choice(held) if held else -1
            if held and os.fstat(fd).st_size:
                at = self._draw.randrange(os.fstat(fd).st_size)
                os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 1 << self._draw.randrange(8)]), at)
                self.totals["flipped bit: memory"] += 1
                run.is_memory_harmed = True
        if len(valid) > 1:
            done = ask(lambda: damage(Storage(run.plain), valid, seed))
            if "error" in done:
                self._violate(number, plan, "damage", done["error"])
                return
            run.harmed |= done["harmed"]
            self.totals.update(done["harmed"].values())
            self.totals["restores past damage"] += 1
            run.bound = int(done["newest"].partition("-")[0])
        found = self._examine(run)
        if "error" in found:
            self._violate(number, plan, "lost", f"damaged: nothing was restored: {found['error']}")
            return
        right = [name for name in valid if name not in run.harmed]
        if found["valid"] != right:
            self._violate(number, plan, "damage", f"{found['valid']} are right, expected {right}; {run.harmed}")
        named = [n for n in valid if run.harmed.get(n, "deleted file: manifest") != "deleted file: manifest"]
        missed = [n for n in named if n not in found["bad"].get(n, "")]
        if missed:
            self._violate(number, plan, "damage", f"not named: {missed} of {run.harmed}")
        self.totals["damaged checkpoints named"] += len(named) - len(missed)
        self._blame(run, number, plan, found)

    def _blame(self, run: Run, number: int, plan: Plan, found: dict[str, Any]) -> int:
        """Tell what is wrong that nobody has damaged; how much it is."""
        wrong = {
            name: why
            for name, why in found["bad"].items()
            if name not in run.harmed and not (run.is_memory_harmed and name.startswith("memory") and "checksum" in why)
        }
        for name, why in wrong.items():
            self._violate(number, plan, "corrupt", f"{name}: {why}")
        return len(wrong)

    def _violate(self, number: int, plan: Plan, kind: str, text: str) -> None:
        self.violations.append(f"{kind}: kill {number} ({plan.moment}, {plan.ranks} ranks): {text}")
        print(f"VIOLATION {self.violations[-1]}", flush=True)


def main(arguments: Arguments) -> int:
    """Torture, print a table, and return the exit code."""
    arguments.check()
    began = time.monotonic()
    totals: Counter[str] = Counter()
    with place(arguments.store, arguments.fail_share, arguments.fail_tries, arguments.seed, totals) as roots:
        torture = Torture(arguments, *roots)
        torture.all()
    torture.totals += totals
    table = Table("killed in", "kills", "restored from memory", "from storage", "nothing yet", "corrupt", "lost")
    rows = [(moment, torture.rows.get(moment, Counter())) for moment in (*MOMENTS, "between")]
    rows.append(("all", sum((row for _, row in rows), Counter())))
    columns = ("kills", "memory", "durable", "new", "corrupt", "lost")
    for moment, row in rows:
        table.add_row(moment, *(str(row[column]) for column in columns), end_section=moment == "between")
    Console(width=110).print(table)
    seconds = time.monotonic() - began
    for what, count in sorted(torture.totals.items()):
        print(f"{what}: {count}")
    print(f"{seconds:.0f} s, {1000 * seconds / arguments.kills:.0f} ms a kill; seed {arguments.seed}")
    if arguments.json is not None:
        document = {"rows": {m: dict(row) for m, row in rows}, "totals": torture.totals, "seconds": seconds}
        arguments.json.write_text(json.dumps(document | {"violations": torture.violations}, indent=1))
    verdict = f"{len(torture.violations)} VIOLATIONS" if torture.violations else "nothing corrupt, nothing lost"
    print(f"verdict: {verdict}")
    return 1 if torture.violations else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started goes with this process
    sys.exit(main(tyro.cli(Arguments)))
