"""Reads a version of a directory of checkpoints, the newest by default, as somebody does who has never heard of leto: with Orbax and JAX alone."""

import hashlib
import json
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp

with ocp.CheckpointManager(sys.argv[1], item_names=("state", "iterator", "metadata")) as manager:
    step = int(sys.argv[2]) if len(sys.argv) > 2 else manager.latest_step()
    state = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore())).state
assert "leto_jax" not in sys.modules
leaves = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
shown = {
    path: {"shape": list(x.shape), "first": float(x.reshape(-1)[0]), "sha256": hashlib.sha256(x.tobytes()).hexdigest()}
    for path, x in leaves.items()
}
print(json.dumps({"step": step, "leaves": shown}))
