"""A step that has run out of memory is tried once more in the same process, with what the shadow had: a takeover without another process."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import jax

from leto_jax import errors
from leto_jax.arena.control import Control, Word
from leto_jax.faults import Phase
from leto_jax.rmu.rollforward import Recovered
from leto_jax.shadow.member import Member


class Retry:
    """Runs the steps of one rank. Remembers which of them ran out of memory last.

    let_go(): ends what is dispatched, and drops the state and its views. attach(epoch): makes views and a transaction anew, and brings what
    the first try has left to a commit.
    """

    def __init__(self, member: Member, control: Control, let_go: Callable[[], None], attach: Callable[[int], Recovered]):
        self._member, self._control, self._let_go, self._attach = member, control, let_go, attach
        self._tried = -1

    def run(self, step: int, attempt: Callable[[], None]) -> int:
        """From commit `step - 1` to commit `step`, by `attempt` as a rule. Returns the nanoseconds in which it got over an out-of-memory error.

        The epoch is raised before the second try, as for another process, so that an intent of the first one can be revoked.
        Raises what `attempt` raises, an out-of-memory error the second time at one step, and whatever stands in the way of a second try.
        Crash: the same picture as that of a process that dies while it takes over.
        Cost: nothing, unless memory runs out; then the shadow's end, one verification of the state, and what of the step was lost.
        """
        begin = time.monotonic_ns()
        try:
            attempt()
            return 0
        except jax.errors.JaxRuntimeError as exception:
            if not errors.out_of_memory(exception) or step == self._tried:
                raise
            reason = str(exception).splitlines()[0]
        # Not in the handler: with the exception the arrays go that its frames hold.
        self._tried, failed = step, time.monotonic_ns()
        self._control.enter(Phase.TAKEOVER)
        self._control[Word.ARMED_SINCE_NS] = failed  # the watchdog's deadline is a takeover's from here on
        self._let_go()
        gc.collect()
        recovered = self._attach(self._member.reclaim(step))
        again = time.monotonic_ns()
        lost = again - failed
        if recovered.commit != step:
            lost = again - begin
            self._control[Word.ARMED_SINCE_NS] = again
            attempt()
        self._member.event("retried", step=step, action=recovered.plan.action.value, reason=reason, secs=lost / 1e9)
        return lost
