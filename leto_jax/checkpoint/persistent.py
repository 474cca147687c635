"""The persistent tier: ordinary Orbax checkpoints, one directory a version, which plain Orbax reads without us.

    DIR/<step>/state      params, opt_state, companions, extras, as trees; typed PRNG keys as their key data; empty leaves are left out
    DIR/<step>/iterator   position of the data of each rank
    DIR/<step>/metadata   format, step, the leaves with a SHA-256 each

Leaves are whole, of however many ranks the job was. A version is complete or absent (Orbax renames it into place). What does not have its
checksums is passed over for the next older version, and written again when training comes to its step once more.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from leto_jax import errors
from leto_jax.checkpoint import frozen as states
from leto_jax.checkpoint.frozen import Form, Frozen
from leto_jax.rmu.programs import struct, structs

FORMAT = 1
ITEMS = ("state", "iterator", "metadata")


def save(form: Form, state: Frozen, directory: str | Path, keep: int | None = None) -> Path:
    """Writes a version of a whole state and waits until it is complete. keep: how many versions stay, all by default. Returns its directory.

    One of the same step stays if it is good, and is written anew if not.
    Raises CheckpointError where it cannot be written, with the reason; what was there before stays.
    Crash: the version is not there.
    Cost: Orbax', and a SHA-256 of the state; where the step is there already, reading it.
    """
    ocp = _orbax()
    path = Path(directory).absolute()
    metadata = {"format": FORMAT, "step": state.step, "leaves": form.describe(), "sha256": states.digests(state)}
    items = ocp.args.Composite(
        state=ocp.args.StandardSave(_tree(form, state.leaves)),
        iterator=ocp.args.JsonSave({"positions": [base64.b64encode(position).decode() for position in state.positions]}),
        metadata=ocp.args.JsonSave(metadata),
    )
    try:
        with _manager(path, keep) as manager:
            if state.step in manager.all_steps():
                if first_good([(state.step, str(path), functools.partial(restore_version, form, path, state.step))]) is not None:
                    return path / str(state.step)
                manager.delete(state.step)
            manager.save(state.step, args=items, force=True)
            manager.wait_until_finished()
    except (OSError, ValueError, RuntimeError) as exception:
        raise errors.CheckpointError(
            f"the checkpoint of step {state.step} cannot be written to {path}: {exception}; free space there, or name a directory that this "
            "user may write to"
        ) from exception
    return path / str(state.step)


def versions(directory: str | Path) -> list[int]:
    """Steps of the complete versions, newest first. Raises CheckpointError if there is no such directory."""
    path = Path(directory).absolute()
    if not path.is_dir():
        raise errors.CheckpointError(f"expected a directory of checkpoints at {path}, found {'a file' if path.exists() else 'nothing'}")
    with _manager(path, None, read_only=True) as manager:
        return sorted(manager.all_steps(), reverse=True)


def restore(form: Form, directory: str | Path, warn: Callable[[str], None] | None = None) -> Frozen:
    """The newest version that can be read and has its checksums. form: of a whole state.

    Raises LayoutError if it is of another model or optimizer (the first leaf that differs is named), CheckpointError if no version is good.
    Cost: Orbax', and a SHA-256 of the state.
    """
    found, where = versions(directory), str(directory)
    good = first_good([(step, where, functools.partial(restore_version, form, directory, step)) for step in found], warn)
    if good is not None:
        return good[0]
    raise none_good(directory, found)


def none_good(directory: str | Path, found: Sequence[int]) -> errors.CheckpointError:
    """The error for a directory of which no version can be restored. found: those that there are."""
    what = f"found {', '.join(map(str, found))}" if found else "there is none"
    return errors.CheckpointError(f"no version in {directory} can be restored ({what}); name another directory")


def first_good(
    candidates: Iterable[tuple[int, str, Callable[[], Frozen]]], warn: Callable[[str], None] | None = None
) -> tuple[Frozen, str] | None:
    """The first of (step, where it lies, what reads and checks it) that is good, and where; None if none is. What is not is said.

    Raises LayoutError if one is of another model, UsageError if it is of another number of ranks and cannot be divided: then the others are, too.
    """
    warn = warn or (lambda text: print(f"leto: {text}", file=sys.stderr, flush=True))
    for step, where, load in candidates:
        try:
            return load(), where
        except (errors.LayoutError, errors.UsageError):
            raise
        except Exception as exception:  # whatever storage or damaged bytes come up with: the next older one may be good
            lines = str(exception).strip().splitlines()
            warn(f"checkpoint {step} in {where} is passed over: {type(exception).__name__}: {lines[0] if lines else 'no message'}")
    return None


def restore_version(form: Form, directory: str | Path, step: int) -> Frozen:
    """One version, checked. Raises whatever is wrong with it."""
    ocp, path = _orbax(), Path(directory).absolute()
    if not (path / str(step) / "metadata").is_dir():
        return _restore_foreign(form, path / str(step), step)
    what = f"checkpoint {step} in {path}"
    with _manager(path, None, read_only=True) as manager:
        metadata = manager.restore(step, args=ocp.args.Composite(metadata=ocp.args.JsonRestore())).metadata
        if metadata.get("format") != FORMAT:
            raise errors.CheckpointError(
                f"{what}: expected format {FORMAT}, found {metadata.get('format')!r}; use the version of leto_jax that wrote it"
            )
        form.require(metadata["leaves"], what)
        wanted = _tree(form, {name: structs(group) for name, group in form.specs.items()})
        items = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(wanted), iterator=ocp.args.JsonRestore()))
    leaves = _leaves(form, items.state)
    positions = items.iterator["positions"] if "positions" in items.iterator else [items.iterator["position"]]  # of one rank, until 0.1
    state = Frozen(step, leaves, tuple(base64.b64decode(position, validate=True) for position in positions))
    for path_of, wrong, right in zip(metadata["leaves"], states.digests(state), metadata["sha256"], strict=True):
        if wrong != right:
            raise errors.CheckpointError(f"{path_of} does not have its checksum")
    return state


def _restore_foreign(form: Form, path: Path, step: int) -> Frozen:
    """A version that others have written: one item of it has the groups of the state at the top, `params` and `opt_state` at least.

    Its leaves are found by their paths, whatever containers the tree had. It says nothing about checksums, nor where the data stands.
    Raises LayoutError naming the first leaf that is missing or of another form.
    """
    ocp = _orbax()
    items = [item for item in sorted(path.iterdir()) if (item / "_METADATA").is_file()]
    for item in items:
        with ocp.StandardCheckpointer(multiprocessing_options=_by_itself()) as checkpointer:
            found = checkpointer.restore(item)
        if isinstance(found, dict) and "params" in found:
            break
    else:
        raise errors.CheckpointError(
            f"{path}: expected an item with 'params' and 'opt_state' at its top, found {', '.join(item.name for item in items) or 'no item'}"
        )
    there = {_words(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(found)}
    leaves: dict[str, list[np.ndarray]] = {}
    for name, specs in form.specs.items():
        numbered = jax.tree_util.tree_unflatten(form.trees[name], range(len(specs)))
        leaves[name] = []
        for keys, number in jax.tree_util.tree_leaves_with_path(numbered):
            spec, leaf = specs[number], there.get((name, *_words(keys)))
            if leaf is not None and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                leaf = jax.random.key_data(leaf)
            array = np.zeros(spec.shape, struct(spec).dtype) if leaf is None and spec.size == 0 else np.asarray(leaf)
            if leaf is None and spec.size:
                raise errors.LayoutError(f"{path} has no {name}{spec.path}, which this script has: {spec.describe()}")
            if (array.shape, array.dtype) != (spec.shape, struct(spec).dtype):
                raise errors.LayoutError(
                    f"{path} holds {name}{spec.path}: {array.dtype}{list(array.shape)}, this script has {name}{spec.describe()}; resume with the model and optimizer that it was saved with"
                )
            leaves[name].append(array)
    return Frozen(step, leaves, (b"",))


def _words(keys: Any) -> tuple[str, ...]:
    """A path in a tree, whether it goes through dicts, lists or named tuples: Orbax knows only the first two."""
    return tuple(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in keys)


def _tree(form: Form, leaves: dict[str, Any]) -> dict[str, Any]:
    """Groups as trees; what Orbax cannot hold, empty leaves, is None. Groups without a leaf are left out."""
    found = {}
    for name, treedef in form.trees.items():
        full = [leaf if np.prod(leaf.shape, dtype=np.int64) else None for leaf in leaves[name]]
        if any(leaf is not None for leaf in full):
            found[name] = jax.tree_util.tree_unflatten(treedef, full)
    return found


def _leaves(form: Form, tree: dict[str, Any]) -> dict[str, list[np.ndarray]]:
    """The inverse of `_tree`."""
    found = {}
    for name, group in form.specs.items():
        present = iter(jax.tree_util.tree_leaves(tree.get(name)))
        forms = structs(group)
        found[name] = [
            np.asarray(next(present)) if np.prod(form.shape, dtype=np.int64) else np.zeros(form.shape, form.dtype) for form in forms
        ]
    return found


@contextlib.contextmanager
def _manager(path: Path, keep: int | None, read_only: bool = False) -> Iterator[Any]:
    """An Orbax manager of the directory; what it has to say on being opened is not for our users."""
    ocp, log = _orbax(), logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        if not read_only:
            path.mkdir(parents=True, exist_ok=True)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            create=False,
            read_only=read_only,
            enable_async_checkpointing=False,
            multiprocessing_options=_by_itself(),
        )
        with ocp.CheckpointManager(path, item_names=ITEMS, options=options) as manager:
            yield manager
    finally:
        log.setLevel(level)


def _by_itself() -> Any:
    """For Orbax: this process alone reads and writes, also where it is one of several ranks, and waits for no other one in a collective."""
    own = jax.process_index()
    return _orbax().options.MultiprocessingOptions(primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"leto{own}")


def _orbax() -> Any:
    import orbax.checkpoint as ocp  # a second of imports that a trainer without checkpoints need not spend

    return ocp
