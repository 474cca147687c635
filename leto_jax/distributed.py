"""The ranks of one generation of a job and the coordinator process where they meet. The one file that uses private API of JAX.

    coordinator = distributed.serve(address, ranks)                  in a process of its own, so that no rank is special
    ranks = distributed.connect(address, rank, count, secs)          in each rank, before JAX opens a device
    pictures = ranks.gather("pictures", mine, secs)                  bytes of every rank, in rank order

JAX's own `initialize` would host the coordinator in rank 0. A coordinator that dies takes its ranks along, sooner or later (the callback with
which jaxlib would let a process go on cannot be called from Python); that is one more failure that a shadow takes over from.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

from leto_jax import errors

TESTED = ("0.11.2", "0.12.0.1")
HEARTBEAT_SECS = 86_400  # the agent looks after the ranks: nobody ends because a heartbeat is late
SHUTDOWN_SECS = 5


def serve(address: str, ranks: int) -> Any:
    """Starts JAX's coordination service for `ranks` processes at 'host:port', in threads of this process. Keep the result.

    Imports jaxlib only. The port must be free: of a taken one jaxlib may make a segmentation fault (`agent.coordinator` takes it first).
    Raises UsageError for a jaxlib whose private API differs, DeviceError for what else goes wrong.
    """
    start = _private("get_distributed_runtime_service", "address", "num_nodes", "heartbeat_timeout", "shutdown_timeout", "recoverable")
    try:
        return start(address, ranks, heartbeat_timeout=HEARTBEAT_SECS, shutdown_timeout=SHUTDOWN_SECS, recoverable=True)
    except Exception as exception:
        raise errors.DeviceError(f"coordinator: cannot listen at {address}: {exception}") from exception


def connect(address: str, rank: int, count: int, secs: float) -> Ranks:
    """Makes this process rank `rank` of `count` of JAX's process group, once all of them have come. Before JAX opens a device.

    From here on `jax.distributed.initialize()` does nothing but say so. Raises DeadlineError if not all have come within `secs`.
    """
    start = _private("get_distributed_runtime_client", "address", "node_id", "init_timeout", "heartbeat_timeout", "shutdown_on_destruction")
    import jax
    from jax._src import distributed

    state = distributed.global_state
    missing = [name for name in ("client", "process_id", "num_processes", "coordinator_address") if not hasattr(state, name)]
    if missing:
        raise _untested(f"jax._src.distributed.global_state has no {', '.join(missing)}")
    client = start(
        address,
        rank,
        init_timeout=max(1, int(secs)),
        heartbeat_timeout=HEARTBEAT_SECS,
        shutdown_on_destruction=False,
        missed_heartbeat_callback=lambda *status: None,  # without one, ranks that do not come are the end of the process and no exception
        use_compression=True,
    )
    try:
        client.connect()
    except Exception as exception:
        raise errors.DeadlineError(
            f"rank {rank}: expected all {count} ranks at the coordinator {address} within {secs:.0f} s: {exception}"
        ) from exception
    state.client, state.process_id, state.num_processes, state.coordinator_address = client, rank, count, address

    def initialize(*_: Any, **__: Any) -> None:
        print(
            f"leto: jax.distributed.initialize() does nothing here: `leto run` has made this process rank {rank} of {count}",
            file=sys.stderr,
            flush=True,
        )

    jax.distributed.initialize = distributed.initialize = initialize
    return Ranks(rank, count, client)


def drive(gpu: int) -> None:
    """Of several GPUs JAX shall open this one. Before it opens a device."""
    import jax

    jax.config.update("jax_cuda_visible_devices", str(gpu))


class Ranks:
    """This process among the ranks of its generation. All of them make the same calls in the same order."""

    def __init__(self, rank: int = 0, count: int = 1, client: Any = None):
        self.rank, self.count, self._client = rank, count, client
        self._numbers = itertools.count()

    def gather(self, what: str, data: bytes, secs: float) -> list[bytes]:
        """`data` of every rank, in rank order. Raises DeadlineError naming the ranks that have not brought theirs within `secs`.

        Cost: a millisecond, and the bytes of all ranks through the coordinator.
        """
        if self.count == 1:
            return [data]
        key = f"leto/{next(self._numbers)}/{what}"
        found: list[bytes] = []
        late: list[int] = []
        reason, end = "", time.monotonic() + secs
        try:
            self._client.key_value_set_bytes(f"{key}/{self.rank}", data)
        except Exception as exception:
            raise errors.DeadlineError(f"{what}: the coordinator does not answer: {exception}") from exception
        for rank in range(self.count):
            try:
                found.append(self._client.blocking_key_value_get_bytes(f"{key}/{rank}", max(1, int(1000 * (end - time.monotonic())))))
            except Exception as exception:
                late.append(rank)
                reason = reason or str(exception).splitlines()[0]
        if late:
            raise errors.DeadlineError(
                f"{what}: expected something of all {self.count} ranks within {secs:.0f} s, nothing came from rank {', '.join(map(str, late))}: {reason}"
            )
        return found

    def agree(self, what: str, mine: str, secs: float) -> str:
        """'' if every rank brings '', else what the first one brings that does not, with its rank. Also a barrier."""
        said = [data.decode() for data in self.gather(what, mine.encode(), secs)]
        return next((f"rank {rank}: {words}" if self.count > 1 else words for rank, words in enumerate(said) if words), "")


_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
ALONE = Ranks()
_current = ALONE


def join(address: str, rank: int, count: int, secs: float) -> None:
    """`connect`, for the whole process: `current` gives the result."""
    global _current
    _current = connect(address, rank, count, secs)


def current() -> Ranks:
    """The ranks that this process has joined; itself alone if it has not."""
    return _current


def peer_is_gone(exception: BaseException) -> bool:
    """Whether this is how XLA says that a collective cannot end since another rank has."""
    return type(exception).__name__ == "JaxRuntimeError" and any(words in str(exception) for words in _GONE)


def _private(name: str, *parameters: str) -> Callable:
    """A function of jaxlib's private API, if it takes what is passed to it here."""
    from jaxlib import _jax

    found = getattr(_jax, name, None)
    if found is None:
        raise _untested(f"jaxlib._jax has no {name}")
    said = found.__doc__ or ""
    try:
        said = said or str(inspect.signature(found))
    except (TypeError, ValueError):
        pass
    if lacking := [parameter for parameter in parameters if parameter not in said]:
        raise _untested(f"jaxlib._jax.{name} takes no {', '.join(lacking)}")
    return found


def _untested(problem: str) -> errors.UsageError:
    import jaxlib

    return errors.UsageError(
        f"jaxlib {jaxlib.__version__}: {problem}; several ranks need an API of JAX that is private, tested with {' and '.join(TESTED)}: "
        "install one of these, or run one rank"
    )
