"""A traced calculation as a graph of values that can be compared, cut and run in parts.

`trace` turns a function over arrays into a `Graph`: calls are inlined, `cond` becomes both branches and a select, and equal calculations
get equal numbers, so that two leaves whose arithmetic is the same can be told to be the same. `cut` takes the part of a graph between a
frontier and some results and makes a `Program` of it: a canonical text and a function over arrays. Nothing here knows about optimizers.

Texts are equal in every process that traces the same function with the same versions: no addresses, no hashes of objects, no set order.
"""

import dataclasses
import enum
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex
from jax.extend import source_info_util
from jax.extend.core import primitives

from leto_jax.errors import UnsupportedOptimizerError

_ELEMENTWISE = (
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj "
    "convert_element_type cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac imag integer_pow "
    "is_finite le lgamma log log1p log2 logistic lt max min mul ne neg nextafter not one_minus_square or population_count pow real "
    "reduce_precision rem regularized_incomplete_beta round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign "
    "sin sinh sqrt square sub tan tanh xor"
)
# Primitives whose result at one place depends on the operands at that place only, whatever the shape.
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
# Primitives that keep the row-major order of the elements, as long as they keep their number.
RESHAPING = frozenset({"broadcast_in_dim", "expand_dims", "reshape", "squeeze"})
_IDENTITIES = frozenset({"copy", "copy_p", "name", "stop_gradient"})
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "call": "call_jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
_DEBUG = frozenset({"debug_callback", "debug_print"})
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def is_key(dtype: Any) -> bool:
    """True for the dtypes of typed random keys, which have no bytes of their own."""
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


class Texts:
    """Writes parameters of primitives as text, equal in every process.

    Objects that have no text of their own (functions, unknown classes) are numbered in the order in which they are first seen, so that two
    of them never look equal and the text still does not depend on addresses.
    """

    def __init__(self) -> None:
        self._unknown: list[Any] = []
        self._jaxprs: dict[int, tuple[Any, str]] = {}

    def params(self, params: Mapping[str, Any]) -> str:
        """Text of the parameters of one primitive, by name; those that are unset do not count."""
        return " ".join(f"{name}={self.any(value)}" for name, value in sorted(params.items()) if value is not None)

    def any(self, value: Any) -> str:
        """Text of one parameter."""
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
            return repr(value)
        if isinstance(value, enum.Enum):
            return f"{type(value).__name__}.{value.name}"
        if isinstance(value, np.dtype):
            return value.name
        if isinstance(value, type):
            return value.__name__
        if isinstance(value, jex.Jaxpr | jex.ClosedJaxpr):
            return self.jaxpr(value)
        if isinstance(value, (np.ndarray, np.generic, jax.Array)):
            return constant_text(value)
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{self.any(k)}: {self.any(v)}" for k, v in sorted(value.items(), key=lambda item: repr(item[0]))) + "}"
        if isinstance(value, (set, frozenset)):
            return "{" + ", ".join(sorted(self.any(v) for v in value)) + "}"
        if isinstance(value, (tuple, list)):
            return f"{'' if type(value) in (tuple, list) else type(value).__name__}(" + ", ".join(self.any(v) for v in value) + ")"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return f"{type(value).__name__}(" + self.params({f.name: getattr(value, f.name) for f in dataclasses.fields(value)}) + ")"
        text = repr(value)
        if callable(value) or _ADDRESS.search(text):
            index = next((i for i, seen in enumerate(self._unknown) if seen is value), len(self._unknown))
            if index == len(self._unknown):
                self._unknown.append(value)
            return f"<{type(value).__name__} {getattr(value, '__qualname__', '')} #{index}>"
        return text

    def jaxpr(self, jaxpr: Any) -> str:
        """Text of a nested program: variables numbered in order, constants by their bytes."""
        held = self._jaxprs.get(id(jaxpr))
        if held is not None:
            return held[1]
        consts = getattr(jaxpr, "consts", ())
        inner = getattr(jaxpr, "jaxpr", jaxpr)
        numbers: dict[Any, int] = {}

        def atom(a: Any) -> str:
            if isinstance(a, jex.Literal):
                return constant_text(literal(a))
            if isinstance(a, jex.DropVar):
                return "_"
            return f"%{numbers.setdefault(a, len(numbers))}:{aval_text(a.aval.shape, a.aval.dtype)}"

        lines = ["consts " + " ".join(f"{atom(v)}={constant_text(c)}" for v, c in zip(inner.constvars, consts))]
        lines.append("in " + " ".join(map(atom, inner.invars)))
        for eqn in inner.eqns:
            key = _CALLS.get(eqn.primitive.name)
            params = eqn.params if key is None else {key: eqn.params[key]}
            operands = " ".join(map(atom, eqn.invars))
            lines.append(f"{' '.join(map(atom, eqn.outvars))} = {eqn.primitive.name}[{self.params(params)}] {operands}")
        lines.append("out " + " ".join(map(atom, inner.outvars)))
        text = "{" + "; ".join(lines) + "}"
        self._jaxprs[id(jaxpr)] = (jaxpr, text)  # The object is kept, so that its id stays its own.
        return text


def literal(atom: Any) -> np.ndarray:
    """The value of a literal in a jaxpr, with the dtype that the jaxpr gives it."""
    return np.asarray(atom.val, dtype=atom.aval.dtype)


def constant_text(value: Any) -> str:
    """Text of a constant: dtype, shape, and its bytes (or their digest, if there are many)."""
    data = np.asarray(jax.random.key_data(value) if is_key(value.dtype) else value)
    raw = data.tobytes()
    return f"{aval_text(value.shape, value.dtype)}:{raw.hex() if len(raw) <= 16 else hashlib.sha256(raw).hexdigest()}"


def aval_text(shape: Sequence[int], dtype: Any) -> str:
    """Such as `float32[3,4]`."""
    return f"{np.dtype(dtype).name if not is_key(dtype) else dtype}[{','.join(map(str, shape))}]"


@dataclasses.dataclass(frozen=True, slots=True)
class Op:
    """One primitive, with the numbers of the values that it reads and makes."""

    primitive: Any
    params: Mapping[str, Any]
    text: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    origin: tuple[Any, ...]  # Source infos, innermost last.

    def source(self) -> str:
        """The line of user code that asked for it, as `file:line:column (function)`."""
        found = [text for text in (source_info_util.summarize(info) for info in self.origin) if text]
        return found[-1] if found else "an unknown place"

    def bind(self, operands: Sequence[Any]) -> Sequence[Any]:
        """Runs (or traces) the primitive."""
        out = self.primitive.bind(*operands, **self.params)
        return out if self.primitive.multiple_results else (out,)


class Graph:
    """Values numbered so that equal calculations have equal numbers; operations stand in an order in which they can run."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.dtypes: list[Any] = []
        self.makers: list[int] = []  # Index of the operation that makes a value, or -1.
        self.consts: dict[int, Any] = {}
        self.ops: list[Op] = []
        self.texts = Texts()
        self._known: dict[Any, tuple[int, ...]] = {}

    def size(self, value: int) -> int:
        """Number of elements."""
        return math.prod(self.shapes[value])

    def aval(self, value: int) -> str:
        """Such as `float32[3,4]`."""
        return aval_text(self.shapes[value], self.dtypes[value])

    def new(self, shape: Sequence[int], dtype: Any, maker: int = -1) -> int:
        """A value of its own, equal to no other."""
        self.shapes.append(tuple(shape))
        self.dtypes.append(dtype)
        self.makers.append(maker)
        return len(self.shapes) - 1

    def const(self, array: Any) -> int:
        """The value of a constant."""
        key = constant_text(array)
        if key not in self._known:
            index = self.new(array.shape, array.dtype)
            self.consts[index] = array if is_key(array.dtype) else np.asarray(array)
            self._known[key] = (index,)
        return self._known[key][0]

    def op(
        self, primitive: Any, params: Mapping[str, Any], operands: Sequence[int], avals: Sequence[Any], origin: tuple[Any, ...]
    ) -> tuple[int, ...]:
        """The values of a primitive over known values; an equal one is found again instead of made."""
        text = self.texts.params(params)
        key = (primitive.name, text, tuple(operands), tuple(aval_text(a.shape, a.dtype) for a in avals))
        if key not in self._known:
            results = tuple(self.new(a.shape, a.dtype, len(self.ops)) for a in avals)
            self.ops.append(Op(primitive, params, text, tuple(operands), results, origin))
            self._known[key] = results
        return self._known[key]

    def needed(self, targets: Iterable[int]) -> list[int]:
        """Operations, in order, that some values depend on."""
        stack, seen, ops = list(targets), set[int](), set[int]()
        while stack:
            value = stack.pop()
            if value not in seen:
                seen.add(value)
                if self.makers[value] >= 0:
                    ops.add(self.makers[value])
                    stack.extend(self.ops[self.makers[value]].operands)
        return sorted(ops)


def trace(function: Callable[..., Any], *specs: Any) -> tuple[Graph, list[int], list[int]]:
    """Traces a function of flat arrays once.

    Returns:
      The graph, the values of the inputs, and the values of the outputs.
    """
    closed = jax.make_jaxpr(function)(*specs)
    graph = Graph()
    avals: list[Any] = [v.aval for v in closed.jaxpr.invars]
    inputs = [graph.new(a.shape, a.dtype) for a in avals]
    outputs = _inline(graph, closed, inputs, ())
    return graph, inputs, outputs


def _inline(graph: Graph, jaxpr: Any, arguments: Sequence[int], origin: tuple[Any, ...]) -> list[int]:
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    env: dict[Any, int] = {v: graph.const(c) for v, c in zip(inner.constvars, getattr(jaxpr, "consts", ()), strict=True)}
    env.update(zip(inner.invars, arguments, strict=True))

    def read(atom: Any) -> int:
        return graph.const(literal(atom)) if isinstance(atom, jex.Literal) else env[atom]

    for eqn in inner.eqns:
        name, here = eqn.primitive.name, (*origin, eqn.source_info)
        if name in _DEBUG:
            continue  # Prints nothing that the state depends on, and could not print once per step from many programs.
        operands = [read(v) for v in eqn.invars]
        results: Sequence[int]
        if name in _CALLS:
            results = _inline(graph, eqn.params[_CALLS[name]], operands, here)
        elif name == "cond":
            results = _select(graph, eqn, operands, here)
        elif eqn.effects:
            source = Op(eqn.primitive, {}, "", (), (), here).source()
            raise UnsupportedOptimizerError(
                f"expected an optimizer without side effects, found `{name}` at {source} with {', '.join(sorted(map(str, eqn.effects)))}; "
                "a chunk may run twice after a failure, so move it out of the update"
            )
        elif name in _IDENTITIES:
            results = operands[:1]
        else:
            results = graph.op(eqn.primitive, eqn.params, operands, [v.aval for v in eqn.outvars], here)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in inner.outvars]


def _select(graph: Graph, eqn: Any, operands: Sequence[int], origin: tuple[Any, ...]) -> list[int]:
    """Both branches of a cond and a choice between their results: a chunk cannot wait for a branch, and small scalars decide it anyway."""
    which, *arguments = operands
    branches = [_inline(graph, branch, arguments, origin) for branch in eqn.params["branches"]]
    maker = graph.makers[which]
    if len(branches) == 2 and maker >= 0 and graph.ops[maker].primitive.name == "convert_element_type":
        source = graph.ops[maker].operands[0]
        which = source if graph.dtypes[source] == np.bool_ else which
    return [
        cases[0] if len(set(cases)) == 1 else graph.op(primitives.select_n_p, {}, (which, *cases), [var.aval], origin)[0]
        for var, *cases in zip(eqn.outvars, *branches, strict=True)
    ]


def zeros(graph: Graph, is_free: Callable[[int], bool]) -> list[bool]:
    """Which values are zero everywhere, whatever the inputs are.

    A zero times a value that is `is_free` (a learning rate, say) counts as zero: that it may be infinite is no reason to train a frozen
    leaf.
    """
    found = [False] * len(graph.shapes)
    for index, array in graph.consts.items():
        found[index] = not is_key(array.dtype) and not np.any(array)
    for op in graph.ops:
        of = [found[o] for o in op.operands]
        match op.primitive.name:
            case "mul":
                zero = any(of) and all(f or is_free(o) for f, o in zip(of, op.operands))
            case "div":
                zero = of[0] and not of[1] and is_free(op.operands[1])
            case "add" | "sub" | "add_any" | "max" | "min" | "concatenate":
                zero = all(of)
            case "select_n":
                zero = all(of[1:])
            case "integer_pow":
                zero = of[0] and op.params["y"] > 0
            case "neg" | "abs" | "sign" | "sqrt" | "square" | "convert_element_type" | "transpose" | "slice" | "reduce_sum":
                zero = of[0]
            case name:
                zero = name in RESHAPING and of[0]
        for result in op.results:
            found[result] = zero
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One operation of a program; operands are places in the list of everything calculated before."""

    op: Op
    operands: tuple[int, ...]
    spread: bool  # In a flat program: calculated at every element, not once.


@dataclasses.dataclass(frozen=True)
class Program:
    """A part of a graph as a function, with a canonical text: equal texts mean equal functions.

    Args:
      text: one line per operation, with `I0..` for inputs, `V0..` for frontier values.
      flat: True if the function is elementwise: inputs may have any common shape.
      consts: constants that it holds.
      inputs: number of inputs.
      frontier: numbers (in the graph) of the values that it takes besides its inputs, in order.
      steps: what it does.
      results: places of the results.
      uniform: per result, True if it is one number for all elements.
      reads: which inputs it really reads.
    """

    text: str
    flat: bool
    consts: tuple[Any, ...]
    inputs: int
    frontier: tuple[int, ...]
    steps: tuple[Step, ...]
    results: tuple[int, ...]
    uniform: tuple[bool, ...]
    reads: frozenset[int]

    def run(self, inputs: Sequence[Any], values: Sequence[Any], shape: Sequence[int]) -> tuple[Any, ...]:
        """Runs it. Traceable.

        Args:
          inputs: arrays; for a flat program all of `shape`.
          values: arrays of the frontier, in its order.
          shape: of the results of a flat program; ignored otherwise.
        """
        shape = tuple(shape)
        env: list[Any] = [*inputs, *values, *self.consts]
        wide: dict[int, Any] = {}

        def spread(place: int) -> Any:
            if np.shape(env[place]) == shape:
                return env[place]
            if place not in wide:
                wide[place] = jax.lax.broadcast_in_dim(env[place], shape, ())
            return wide[place]

        for step in self.steps:
            env.extend(step.op.bind([spread(o) if step.spread else env[o] for o in step.operands]))
        return tuple(spread(place) if self.flat else env[place] for place in self.results)


class NotElementwise(Exception):
    """Why a part of a graph is no elementwise function; its text names the primitive and the line."""


def cut(graph: Graph, results: Sequence[int], inputs: Sequence[int], is_frontier: Callable[[int], bool], flat_size: int | None) -> Program:
    """The program of some results of a graph.

    Numbering follows the structure (results in order, operands before what uses them), never the order of the trace, so that equal
    calculations over different leaves get equal texts.

    Args:
      results: wanted values.
      inputs: values that become inputs, in order; one that is not needed is an input all the same.
      is_frontier: values that become further inputs.
      flat_size: with a number, the program must be elementwise over inputs of that many elements, and its text is free of shapes:
        broadcasts of scalars and reshapes vanish.

    Raises:
      NotElementwise: if `flat_size` is given and the calculation is not elementwise.
    """
    flat = flat_size is not None
    order, frontier = _post_order(graph, results, set(inputs), is_frontier)
    # Where a value is found: inputs, then frontier, then constants, then the results of steps.
    consts: dict[str, int] = {}
    arrays: list[Any] = []
    for value in order:
        if value in graph.consts:
            array = graph.consts[value]
            if flat:
                if is_key(array.dtype) or not array.size or array.tobytes() != array.size * array.reshape(-1)[:1].tobytes():
                    raise NotElementwise(f"a constant {graph.aval(value)} whose elements differ")
                array = array.reshape(-1)[0]
            if consts.setdefault(constant_text(array), len(arrays)) == len(arrays):
                arrays.append(array)
    places: dict[int, int] = {value: i for i, value in enumerate(inputs)}
    scalars: set[int] = set()
    lines: list[str] = []
    names: list[str] = [f"I{i}" for i in range(len(inputs))] + [f"V{i}" for i in range(len(frontier))] + list(consts)
    base = len(inputs)
    for i, value in enumerate(frontier):
        places[value] = base + i
        if flat:
            if graph.shapes[value]:
                raise NotElementwise(f"a shared value {graph.aval(value)} that is not one number")
            scalars.add(value)
    base += len(frontier)
    next_place = base + len(arrays)
    steps: list[Step] = []
    done: dict[tuple[str, tuple[int, ...]], int] = {}
    for value in order:
        if value in places:
            continue
        if value in graph.consts:
            array = graph.consts[value]
            places[value] = base + consts[constant_text(array.reshape(-1)[0] if flat else array)]
            scalars.add(value)
            continue
        op = graph.ops[graph.makers[value]]
        uniform = all(o in scalars for o in op.operands)
        if flat:
            _check_flat(graph, op, scalars, uniform, flat_size or 0)
            if op.primitive.name in RESHAPING:
                places[value] = places[op.operands[0]]
                if uniform:
                    scalars.add(value)
                continue
        operands = tuple(places[o] for o in op.operands)
        kinds = " ".join(graph.dtypes[r].name if flat else graph.aval(r) for r in op.results)
        head = f"{op.primitive.name}[{op.text}] {' '.join(names[p] for p in operands)} : {kinds}"
        if (head, operands) not in done:
            done[head, operands] = next_place
            names.extend(f"%{len(steps)}.{i}" for i in range(len(op.results)))
            lines.append(f"%{len(steps)} = {head}")
            steps.append(Step(op, operands, flat and not uniform))
            next_place += len(op.results)
        for i, result in enumerate(op.results):
            places[result] = done[head, operands] + i
            if uniform:
                scalars.add(result)
    out = tuple(places[r] for r in results)
    lines.append("out " + " ".join(names[p] for p in out))
    reads = frozenset(p for p in (*out, *(o for step in steps for o in step.operands)) if p < len(inputs))
    return Program(
        "\n".join(lines), flat, tuple(arrays), len(inputs), tuple(frontier), tuple(steps), out, tuple(r in scalars for r in results), reads
    )


def _post_order(graph: Graph, results: Sequence[int], inputs: set[int], is_frontier: Callable[[int], bool]) -> tuple[list[int], list[int]]:
    """Values needed for `results`, operands first, and the frontier in the order in which it is met."""
    order: list[int] = []
    frontier: list[int] = []
    seen: set[int] = set()
    stack = [(value, False) for value in reversed(results)]
    while stack:
        value, ready = stack.pop()
        if ready:
            order.append(value)
            continue
        if value in seen:
            continue
        seen.add(value)
        if value in inputs:
            continue
        if value not in graph.consts and is_frontier(value):
            frontier.append(value)
            continue
        stack.append((value, True))
        if graph.makers[value] >= 0:
            op = graph.ops[graph.makers[value]]
            stack.extend((o, False) for o in reversed(op.operands))
    return order, frontier


def _check_flat(graph: Graph, op: Op, scalars: set[int], uniform: bool, size: int) -> None:
    name = op.primitive.name
    if name not in ELEMENTWISE | RESHAPING or (name == "reshape" and op.params.get("dimensions") is not None):
        raise NotElementwise(f"`{name}` at {op.source()}")
    if not uniform and any(graph.size(v) != size for v in (op.results[0], *(o for o in op.operands if o not in scalars))):
        raise NotElementwise(
            f"`{name}` at {op.source()}, which spreads {', '.join(graph.aval(o) for o in op.operands)} to {graph.aval(op.results[0])}"
        )
