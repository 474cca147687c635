"""Kernel or XLA? Decided by device and shapes, with the reason as text.

A caller that has an XLA form asks when it builds a program, not each step:

    choice = dispatch.parity(device, row_words, page_words)
    encode = functools.partial(pallas.parity.encode, ...) if choice.kernel else ...

`python -m leto_jax.pallas.dispatch` prints `report` as JSON, for `leto doctor`. Kernels are imported only once the device allows them:
Mosaic GPU takes a second to import, which a trainer on the CPU need not spend.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from leto_jax.pallas.words import Coefficients

if TYPE_CHECKING:
    from leto_jax.pallas.fused import Update

OLDEST_CAPABILITY = (9, 0)


class Choice(NamedTuple):
    """kernel: True for the Pallas kernel, False for XLA. reason: one line for people."""

    kernel: bool
    reason: str


def device_choice(device: Any) -> Choice:
    """What the device allows. *Cost*: none; it looks, it does not try."""
    version = str(getattr(device.client, "platform_version", "")).lower()
    if device.platform not in ("gpu", "cuda") or "rocm" in version:
        return Choice(False, f"XLA: the device is {device.device_kind} ({device.platform}), kernels are for NVIDIA GPUs")
    capability = tuple(int(part) for part in str(getattr(device, "compute_capability", "0.0")).split(".")[:2])
    if capability < OLDEST_CAPABILITY:
        needed = ".".join(map(str, OLDEST_CAPABILITY))
        return Choice(False, f"XLA: {device.device_kind} has compute capability {'.'.join(map(str, capability))}, kernels need {needed}")
    return Choice(True, f"kernel: {device.device_kind}, Mosaic GPU")


def parity(device: Any, row_words: int, page_words: int | None = None) -> Choice:
    """For `parity.encode`, `decode` and `page_checksums`: rows of `row_words` words in pages of `page_words`."""
    choice = device_choice(device)
    if choice.kernel:
        from leto_jax.pallas import parity as parity_kernels

        try:
            parity_kernels.choose_tile(row_words, page_words, 1)
        except ValueError as error:
            return Choice(False, f"XLA: {error}")
    return choice


def update(
    device: Any,
    function: Update,
    scalars: Sequence[Any],
    grad: Any,
    lanes: Sequence[Any],
    *,
    data_rows: int,
    coefficients: Coefficients,
    page_bytes: int | None,
) -> Choice:
    """For `fused.fused_update` with these arguments; arrays may be `jax.ShapeDtypeStruct`.

    *Cost*: where the device allows kernels, the update is lowered once (half a second): Mosaic GPU does not know every primitive.
    """
    choice = device_choice(device)
    if not choice.kernel:
        return choice
    from leto_jax.pallas import fused

    settings: dict[str, Any] = {"data_rows": data_rows, "coefficients": coefficients, "page_bytes": page_bytes}
    struct = lambda x: None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype)
    arguments = tuple(map(struct, scalars)), struct(grad), tuple(map(struct, lanes))
    try:
        fused.check(function, *arguments, **settings)
    except ValueError as error:
        return Choice(False, f"XLA: {error}")
    reason = lowering_error(function, arguments, settings)
    return Choice(False, f"XLA: {reason}") if reason else choice


def lowering_error(function: Update, arguments: tuple[Any, Any, Any], settings: dict[str, Any]) -> str | None:
    """Why Mosaic GPU cannot lower an update, None if it can. Works without a GPU."""
    from leto_jax.pallas import fused

    program = jax.jit(lambda scalars, grad, lanes: fused.fused_update(function, scalars, grad, lanes, **settings))
    try:
        program.trace(*arguments).lower(lowering_platforms=("cuda",))
    except Exception as error:  # Mosaic GPU raises whatever its parts raise; any of it means that there is no kernel.
        lines = str(error).strip().splitlines()
        return f"Mosaic GPU does not lower this update ({type(error).__name__}: {lines[0] if lines else 'no message'})"
    return None


def report(device: Any | None = None) -> list[dict[str, Any]]:
    """What is in use on a device, tried where kernels are: rows of `operation`, `implementation` ('kernel' or 'xla'), `ok`, `reason`.

    `ok` is False only for a kernel that should run and does not, or that gives other bits than its reference. *Cost*: a few seconds on a
    GPU (four small programs are compiled), nothing elsewhere.
    """
    device = device or jax.devices()[0]
    choice = device_choice(device)
    rows = []
    for operation, trial in _TRIALS.items():
        ok, reason = True, choice.reason
        if choice.kernel:
            try:
                with jax.default_device(device):
                    ok = trial()
                reason = choice.reason if ok else "kernel: it gives other bits than its reference; please report this"
            except Exception as error:
                ok, reason = False, f"kernel: it does not run here ({type(error).__name__}: {error})"
        rows.append({"operation": operation, "implementation": "kernel" if choice.kernel else "xla", "ok": ok, "reason": reason})
    return rows


# Two rows of 1, 2, 4, ...: the code of `rmp.matrix` for D = 4, H = 2, which this package does not import.
_COEFFICIENTS: Coefficients = ((1, 1, 1, 1), (8, 4, 2, 1))
_PAGE_WORDS = 1024


def _data() -> jax.Array:
    return jax.random.bits(jax.random.key(0), (4, 2 * _PAGE_WORDS), jnp.uint32)


def _equal(a: Any, b: Any) -> bool:
    return bool(all(jnp.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)))


def _try_encode() -> bool:
    from leto_jax.pallas import parity, reference

    data = _data()
    return _equal(parity.encode(data, _COEFFICIENTS)[0], reference.encode(data, _COEFFICIENTS)[0])


def _try_decode() -> bool:
    from leto_jax.pallas import parity, reference

    data = _data()
    rows = reference.encode(data, _COEFFICIENTS)[0]
    return _equal(parity.decode(data, rows, (1, 2, 3, 4), ((1, 1, 1, 1),)), data[:1])


def _try_checksums() -> bool:
    from leto_jax.pallas import parity, reference

    data = _data()
    return _equal(parity.page_checksums(data, _PAGE_WORDS), reference.page_checksums(data, _PAGE_WORDS))


def _try_update() -> bool:
    from leto_jax.pallas import fused, reference

    lane = jax.random.normal(jax.random.key(1), (4 * 2 * _PAGE_WORDS,))
    settings: dict[str, Any] = {"data_rows": 4, "coefficients": _COEFFICIENTS, "page_bytes": 4 * _PAGE_WORDS}
    negate = lambda scalars, grad, lanes: (-lanes[0],)  # Exact, so that all of it can be compared.
    return _equal(fused.fused_update(negate, (), lane, (lane,), **settings), reference.fused_update(negate, (), lane, (lane,), **settings))


_TRIALS = {"encode": _try_encode, "decode": _try_decode, "page checksums": _try_checksums, "fused update": _try_update}


if __name__ == "__main__":
    json.dump(report(), sys.stdout, indent=1)
    print()
