"""Error types. Each refines the builtin that a caller would expect, so both `except LetoError` and `except ValueError` work.

A message says three things: what was expected, what was found (path, value, unit), and what to do.
"""

GAVE_UP = 3
"""Exit code of a process that stopped on purpose and left the state where it is."""


class LetoError(Exception):
    """Root of everything that leto_jax raises on purpose."""


class UsageError(LetoError, ValueError):
    """An argument, flag or option has a value that cannot work."""


class LayoutError(LetoError, ValueError):
    """A pytree cannot be laid out in retained memory, or differs from the layout of the job."""


class UnsupportedOptimizerError(LetoError, TypeError):
    """An optax transformation cannot be cut into chunks; the message names leaf, primitive and line."""


class MemoryBudgetError(LetoError, MemoryError):
    """A reservation is larger than what the machine or its cgroup still has."""


class ProtocolError(LetoError, ConnectionError):
    """A peer on a socket sent something that is not a message of ours, or went away."""


class DeadlineError(LetoError, TimeoutError):
    """Something that must happen did not happen in time."""


class RecordError(LetoError, ValueError):
    """A record that outlives processes is damaged: wrong magic, version, size or checksum."""


class TooManyErasuresError(LetoError, ValueError):
    """More rows of a protection group are lost than its parity can rebuild."""


class UnrecoverableError(LetoError, RuntimeError):
    """Retained state exists but must not be guessed at; it is kept, and the message says what is needed."""


class NonFiniteLossError(LetoError, FloatingPointError):
    """Loss or gradients are not finite and the policy is to stop. The state before the step is kept."""


class DeadStateError(LetoError, RuntimeError):
    """A `State` was used after `s.step` consumed it."""


class JobError(LetoError, RuntimeError):
    """A job cannot be found, is already running, or belongs to another user."""


class IdentityError(LetoError, RuntimeError):
    """A process does not run the same programs over the same plan as the job it wants to join."""


class DeviceError(LetoError, RuntimeError):
    """A GPU, its driver, or what is installed for it cannot do what is needed."""


class CheckpointError(LetoError, OSError):
    """A checkpoint cannot be written, or none can be read."""


def out_of_memory(exception: BaseException) -> bool:
    """Whether this is how XLA says that its device has no memory left. By name: nothing here imports JAX."""
    return type(exception).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in str(exception)
