"""What a trainer and a shadow of several ranks say and write, without JAX and without a model: for tests of the agent alone.

A step waits until every rank has come to it, as a collective would; and when a peer dies meanwhile, this one exits at once.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
import time
from pathlib import Path

from leto_jax.arena.control import Control, Word
from leto_jax.arena.memory import HostArena
from leto_jax.arena.metadata import BYTES, HostMetadata
from leto_jax.arena.rank import arena_names
from leto_jax.config import Level, Process
from leto_jax.faults import Phase, Point
from leto_jax.records import Kind, Record
from leto_jax.rmu.recovery import Life
from leto_jax.shadow.inject import Injector
from leto_jax.shadow.member import Member, control_name

STEP_SECS = 0.01
LATE_SECS = 0.15  # by which rank 1 is slower in its first step


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--limit", type=Path, help="file with a number: the body of that step waits until it is raised")
    parser.add_argument("--refuse", type=int, default=-1, metavar="RANK")
    parser.add_argument("--give-up", type=int, default=-1, metavar="RANK", help="in the body of step 3")
    parser.add_argument("--raise", dest="fail", type=int, default=-1, metavar="RANK", help="in the body of step 3, always")
    return parser.parse_args()


class Rank:
    """One rank of a generation, from its hello to its end."""

    def __init__(self, args: argparse.Namespace, process: Process):
        self.args, self.process, self.member = args, process, Member(process)
        self.control = self.member.control()
        self.injector = Injector(self.control, 1)
        with self.member.manager.open(arena_names(process.rank)[2]) as item:
            self.facts = HostMetadata(HostArena(item.fd, BYTES, item.name))
        self.peers: dict[int, Control] = {}
        for rank in set(range(process.ranks)) - {process.rank}:
            with self.member.manager.open(control_name(rank)) as item:
                self.peers[rank] = Control(item.fd)
        self.pidfds: dict[int, int] = {}

    def enter(self, phase: Phase, step: int) -> None:
        self.control.enter(phase)
        self.injector.check(phase, step, -1)

    def meet(self) -> None:
        """Until all ranks of this generation have claimed their words."""
        for rank, control in self.peers.items():
            while control[Word.INCARNATION] != self.process.incarnation or not control[Word.PID]:
                time.sleep(0.001)
            self.pidfds[rank] = os.pidfd_open(control[Word.PID])

    def wait_for_peers(self, step: int) -> None:
        """The collective of a step. Who has come to it says so in a word that is of no other use here."""
        self.control[Word.STALE_NS_TOTAL] = step
        poller = select.poll()
        for fd in self.pidfds.values():
            poller.register(fd, select.POLLIN)
        while any(control[Word.STALE_NS_TOTAL] < step for control in self.peers.values()):
            if poller.poll(1):
                raise ConnectionError("a peer is gone")

    def run(self) -> None:
        process, member, control = self.process, self.member, self.control
        print(f"{process.role} {process.incarnation} of {process.ranks} at {process.coordinator}", flush=True)
        if process.rank == self.args.refuse:
            member.event("refused", reason="params: another model")
            sys.exit(1)
        promoted = process.role == "shadow"
        if promoted:
            member.wait_at(Level.LOADED)
        control.claim(os.getpid(), process.incarnation, self.args.steps)
        self.meet()
        commit = min(control[Word.COMMIT], *(peer[Word.COMMIT] for peer in self.peers.values()))
        back = self.facts.latest(Kind.LIFE) is not None
        if back:
            self.enter(Phase.TAKEOVER, commit)
        else:
            self.facts.write(Point.LIFE_LIVE, Record(Kind.LIFE, self.facts.epoch, 0, body=(Life.LIVE,)))
        plan = "redo" if back else "fill"
        member.event("attached", commit=commit, action=plan, reason=f"epoch {self.facts.epoch}", stages={})
        for step in range(commit + 1, self.args.steps + 1):
            self.body(step - 1, replayed=step == commit + 1)
            begin = time.monotonic_ns()
            control[Word.ARMED_SINCE_NS] = begin
            self.enter(Phase.COMPUTE, step)
            self.wait_for_peers(step)
            time.sleep(STEP_SECS + LATE_SECS * (step == commit + 1 and process.rank == 1))
            self.enter(Phase.DRAIN, step)
            control[Word.COMMIT] = step
            control[Word.ARMED_SINCE_NS] = 0
            end = time.monotonic_ns()
            control[Word.LAST_STEP_NS] = end - begin
            control[Word.STEP_NS_TOTAL] = control[Word.STEP_NS_TOTAL] + end - begin
            control[Word.STEPS_DONE] = control[Word.STEPS_DONE] + 1
            if control[Word.STEPS_DONE] > 1:
                continue
            print(f"finished {end}", flush=True)
            if back:
                stages = {"attach": 0.1 * (1 + process.rank), "first_step": 0.01}
                said = {"action": plan, "reason": "", "repaired_pages": process.rank, "compiles": 1, "restored": None}
                member.event("takeover", commit=step, finished_ns=end, stages=stages, **said)
            else:
                member.event("first_step", commit=step, secs=(end - begin) / 1e9, recovering=False)
        self.enter(Phase.DONE, self.args.steps)
        self.wait_for_peers(self.args.steps + 1)
        member.event("done", commit=self.args.steps, loss=0.0, digest="")
        print("the last line has no end", end="", flush=True)

    def body(self, step: int, replayed: bool) -> None:
        """The loop body after a step: waits for its limit."""
        self.enter(Phase.BODY, step)
        if step == 3 and self.process.rank == self.args.give_up:
            self.member.event("stopped", reason="step 4: loss nan")
            sys.exit(3)
        if step == 3 and self.process.rank == self.args.fail:
            raise ValueError("raised in the body of step 3")
        while not replayed and self.args.limit and not (self.args.limit.exists() and int(self.args.limit.read_text() or 0) > step):
            time.sleep(0.005)


if __name__ == "__main__":
    found = Process.from_environ()
    assert found is not None
    Rank(options(), found).run()
