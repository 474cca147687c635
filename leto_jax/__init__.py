"""leto_jax: fault tolerance for JAX training. The state outlives the trainer; a prewarmed shadow goes on in the same iteration.

Importing this opens no device, sets no flag and imports no JAX: names are looked up when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leto_jax.config import Protection
    from leto_jax.rmu.spread import Sharding
    from leto_jax.train import flax
    from leto_jax.train.session import Session, session
    from leto_jax.train.state import State
    from leto_jax.train.step import TrainStep

__version__ = "0.1.0"

_WHERE = {
    "TrainStep": "leto_jax.train.step",
    "session": "leto_jax.train.session",
    "Session": "leto_jax.train.session",
    "State": "leto_jax.train.state",
    "Protection": "leto_jax.config",
    "Sharding": "leto_jax.rmu.spread",
}

__all__ = ["Protection", "Session", "Sharding", "State", "TrainStep", "flax", "session"]


def __getattr__(name: str) -> Any:
    if name == "flax":
        return importlib.import_module("leto_jax.train.flax")
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'leto_jax' has no attribute {name!r}")
