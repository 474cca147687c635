"""Compiles the programs of `tiny.py` for several ranks, and prints as JSON which collectives XLA has put into each."""

from __future__ import annotations

import json
import re
import sys

import jax
import tiny

import leto_jax as leto
from leto_jax.config import Protection
from leto_jax.rmu import programs
from leto_jax.shadow import executables

COLLECTIVE = re.compile(r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast)(?:-start)?\(")


def main() -> None:
    sys.argv = ["tiny.py", "--cut", sys.argv[1]]
    args = tiny.options()
    init, loss_fn = tiny.model(args.width, 0)
    step = leto.TrainStep(loss_fn, tiny.optimizer(args))
    sharding = leto.Sharding(jax.make_mesh((jax.device_count(),), ("data",)), tiny.CUTS[args.cut])
    job = programs.trace(init, step.spec, tiny.dataset(args)(1), jax.random.key(0), Protection(chunk_bytes=1 << 17), None, sharding)
    compiled = executables.compile_all(executables.lower(job))
    found = {name: sorted(set(COLLECTIVE.findall(item.as_text()))) for name, item in compiled.items()}
    shards = {spec.path: spec.shape for spec in job.layout.spec.params}
    print(json.dumps({"rank": jax.process_index(), "collectives": found, "shards": shards}), flush=True)


if __name__ == "__main__":
    main()
