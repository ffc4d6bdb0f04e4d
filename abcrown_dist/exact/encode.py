"""ReLU networks as mixed-integer programmes.

Source: Tjeng, Xiao and Tedrake, "Evaluating Robustness of Neural Networks with Mixed Integer
Programming", ICLR 2019. A neuron a = max(z, s z), 0 <= s <= 1, whose z lies in [l, u] with l < 0 < u,
gets one binary p with the constants that its own bounds allow:

    a >= z,   a >= s z,   a <= s z + (1 - s) u p,   a <= z + (1 - s) |l| (1 - p).

Relaxed, p drops out and the last two become the chord  a <= s l + m (z - l),  m = (u - s l) / (u - l).
Neurons that the bounds show to be stable are affine. Affine nodes have no variables: their rows are
substituted, except where that would fill rows up (see `Encoder.add` and `Encoder._affine`).

This module imports scipy.sparse: import it late.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import sparse

from abcrown_dist.exact.execution import execution_error
from abcrown_dist.exact.expression import Expression, combine, stack, sum_sparse, widen
from abcrown_dist.exact.program import Program, ProgramBuilder
from abcrown_dist.exact.sparse_maps import flat_offset, sparse_matrices
from abcrown_dist.graph.aten import classify
from abcrown_dist.graph.ir import Graph, Node
from abcrown_dist.util.errors import ConfigError
from abcrown_dist.weights.base import Weights
from abcrown_dist.weights.evaluate import flat_network

Array = np.ndarray
Bounds = Mapping[str, tuple[Array, Array]]
Signs = Mapping[tuple[str, int], int]

_UNIT = 2.0**-53
_FILL = 2  # substitution may make this many times the entries that variables would need
_LONG = 4  # entries of a row that is worth a variable if several nodes read it


class NotPiecewiseLinear(ConfigError):
    """The network holds a nonlinearity that no mixed-integer programme expresses."""


@dataclass(frozen=True)
class Encoding:
    """A network over a box as a programme whose solutions are its inputs.

    Attributes:
        builder: variables and rows, to which clauses are added (on a copy).
        expressions: by node, its neurons as functions of the variables.
        graph: the network.
        network: flat inputs (P, inputs) to flat outputs (P, outputs), in float64.
        lower, width: the box; input i is  lower_i + width_i v.
        input_columns: (inputs,) column of the v of each input, -1 where the input is fixed.
    """

    builder: ProgramBuilder
    expressions: Mapping[str, Expression]
    graph: Graph
    network: Callable[[Array], Array]
    lower: Array
    upper: Array
    input_columns: Array

    @property
    def program(self) -> Program:
        """The programme of the network alone."""
        return self.builder.build()

    def point(self, v: Array) -> Array:
        """Inputs (inputs,) in the box that the variables (n,) stand for."""
        free = self.input_columns >= 0
        share = np.where(free, v[self.input_columns], 0.0)
        return np.clip(self.lower + (self.upper - self.lower) * share, self.lower, self.upper)

    def clauses(self, C: Array, D: Array | None, rhs: Array) -> Expression:
        """C y + D x - rhs,  (K, outputs), (K, inputs) and (K,), as functions of the variables."""
        columns = self.builder.columns
        parts = [(C, self.graph.outputs)] + ([] if D is None else [(D, self.graph.inputs)])
        matrices = [sparse.csr_array(matrix) for matrix, _ in parts]
        operands = [stack([self.expressions[name].widened(columns) for name in names]) for _, names in parts]
        return combine(matrices, -rhs, operands)


def encode(
    weights: Weights,
    lower: Array,
    upper: Array,
    bounds: Bounds,
    *,
    relaxed: bool = False,
    signs: Signs | None = None,
    as_given: bool = False,
) -> Encoding:
    """Write a network over a box as a mixed-integer programme, or its triangle relaxation.

    Args:
        weights: in float64, all here (not sharded by neuron).
        lower, upper: the box, (inputs,) float64, flat.
        bounds: valid bounds of pre-activations by node name, in any shape with the node's number of
            entries, widened outward; those of nodes that are missing come from intervals.
        relaxed: no binaries, the triangle instead.
        signs: neurons (pre-activation node, flat index) whose z is to be >= 0 (+1) or <= 0 (-1).
        as_given: relax by the bounds given, even where the programme's own intervals are tighter.

    Raises:
        NotPiecewiseLinear: names every nonlinearity that is neither ReLU nor LeakyReLU with 0 <= s <= 1.
        ValueError: weights not in float64 or sharded by neuron; bounds that cross, or are not finite.
    """
    encoder = Encoder(weights, lower, upper, bounds, relaxed=relaxed, signs=signs, as_given=as_given)
    return encoder.finish()


class Encoder:
    """Encodes node after node; `bounds` may improve until the node that reads them is reached."""

    def __init__(
        self,
        weights: Weights,
        lower: Array,
        upper: Array,
        bounds: Bounds,
        *,
        relaxed: bool = False,
        signs: Signs | None = None,
        as_given: bool = False,
    ) -> None:
        if weights.dtype != torch.float64 or weights.parts != 1:
            raise ValueError("exact programmes need whole weights in float64")
        if not (np.isfinite(lower).all() and np.isfinite(upper).all() and (lower <= upper).all()):
            raise ValueError("exact programmes need a finite box that is not empty")
        refuse_others(weights.graph)
        self.weights, self.graph = weights, weights.graph
        self.lower, self.upper = np.asarray(lower, float), np.asarray(upper, float)
        self.bounds = dict(bounds)
        self.relaxed, self.signs, self.as_given = relaxed, dict(signs or {}), as_given
        self.builder = ProgramBuilder()
        self.expressions: dict[str, Expression] = {}
        self._input_columns = np.full(len(self.lower), -1)
        self._encode_inputs()

    def add(self, node: Node) -> Expression:
        """Encode one node, all of whose operands are encoded."""
        if node.op == "input":
            return self.expressions[node.name]
        encoded = self._affine(node) if classify(node) == "affine" else self._two_piece(node)
        sizes = [np.maximum(*(np.abs(side) for side in self.interval(name))) for name in node.inputs]
        error = encoded.error + execution_error(self.weights, node, sizes)
        encoded = Expression(encoded.E, encoded.offset, error)
        self.expressions[node.name] = encoded
        if len(self.graph.readers(node.name)) > 1:  # else every reader would copy long rows
            self._introduce(node.name, np.flatnonzero(np.diff(encoded.E.indptr) > _LONG))
        return self.expressions[node.name]

    def finish(self) -> Encoding:
        """Encode what is left."""
        for node in self.graph:
            if node.name not in self.expressions:
                self.add(node)
        network = flat_network(self.graph, self.weights)

        def evaluate(x: Array) -> Array:
            with torch.no_grad():
                points = torch.from_numpy(x).to(self.weights.device)
                return network(points).double().cpu().numpy()

        return Encoding(
            self.builder,
            self.expressions,
            self.graph,
            evaluate,
            self.lower,
            self.upper,
            self._input_columns,
        )

    def interval(self, name: str) -> tuple[Array, Array]:
        """Best known bounds (neurons,) of a node: from the variables, and those given.

        Raises:
            ValueError: they cross or are not finite.
        """
        lower, upper = self.expressions[name].interval()
        if name in self.bounds:
            given = [np.asarray(side, float).reshape(-1) for side in self.bounds[name]]
            if self.as_given:
                lower, upper = given
            else:  # fmax and fmin: a bound that is not a number says nothing
                lower, upper = np.fmax(lower, given[0]), np.fmin(upper, given[1])
        if not (np.isfinite(lower).all() and np.isfinite(upper).all() and (lower <= upper).all()):
            raise ValueError(f"bounds of {name} cross or are not finite")
        return lower, upper

    def _encode_inputs(self) -> None:
        width = self.upper - self.lower
        free = np.flatnonzero(width > 0)
        self._input_columns[free] = self.builder.variables(len(free))
        E = sparse.csr_array((width[free], (free, np.arange(len(free)))), shape=(len(width), len(free)))
        rounding = np.where(width > 0, 4 * _UNIT * np.maximum(np.abs(self.lower), np.abs(self.upper)), 0.0)
        start = 0
        for name in self.graph.inputs:
            here = np.arange(start, start + self.graph[name].size)
            self.expressions[name] = Expression(E, self.lower, rounding)[here]
            start += len(here)

    def _affine(self, node: Node) -> Expression:
        """Substitute the operands' expressions, or give operands variables where that is sparser.

        Rows fill up behind neurons that are no variables themselves: stable ones, and residual chains
        without a nonlinearity.
        """
        shapes = [self.graph[name].shape for name in node.inputs]
        with self.weights.visit(node) as affine:
            matrices = sparse_matrices(affine, node.shape, shapes)
            offset = flat_offset(affine, node.size)
        result = self._substitute(matrices, offset, node.inputs)
        composed = {name: self._composed(name) for name in dict.fromkeys(node.inputs)}
        needed = sum(W.nnz for W in matrices)
        needed += sum(self.expressions[name].E[rows].nnz + len(rows) for name, rows in composed.items())
        if result.E.nnz <= _FILL * needed:
            return result
        for name, rows in composed.items():
            self._introduce(name, rows)
        return self._substitute(matrices, offset, node.inputs)

    def _substitute(
        self, matrices: list[sparse.csr_array], offset: Array, names: Sequence[str]
    ) -> Expression:
        columns = self.builder.columns
        return combine(matrices, offset, [self.expressions[name].widened(columns) for name in names])

    def _composed(self, name: str) -> Array:
        """Neurons that are sums of several variables."""
        return np.flatnonzero(np.diff(self.expressions[name].E.indptr) > 1)

    def _introduce(self, name: str, neurons: Array) -> None:
        """Give neurons of a node variables of their own:  E v + offset = lower + width v_new."""
        if not len(neurons):
            return
        old = self.expressions[name]
        part = old[neurons]
        exact = Expression(part.E, part.offset, np.zeros(len(neurons)))
        lower, upper = exact.interval()
        width = np.maximum(upper - lower, np.finfo(float).tiny)
        columns = self.builder.variables(len(neurons))
        total = self.builder.columns
        own = _diagonal(width, columns, total)
        rows = sum_sparse([widen(part.E, total), -own])
        off = self.builder.link(name, neurons, columns, rows, lower - part.offset)
        rounding = 4 * _UNIT * (np.abs(lower) + np.abs(part.offset) + width)
        E, offset, error = widen(old.E, total).tolil(), old.offset.copy(), old.error.copy()
        E[neurons] = own
        offset[neurons], error[neurons] = lower, part.error + off + rounding
        self.expressions[name] = Expression(sparse.csr_array(E), offset, error)

    def _two_piece(self, node: Node) -> Expression:
        """A ReLU or LeakyReLU: affine where stable or split, else a variable and its rows."""
        slope = float(node.attrs.get("negative_slope", 0.0))
        name = node.inputs[0]
        lower, upper = self.interval(name)
        on, off = self._split(name, lower >= 0, (upper <= 0) & (lower < 0))
        loose = np.flatnonzero(~(on | off))
        z = self.expressions[name]
        z_loose = z[loose]
        columns = self.builder.variables(len(loose))
        switches = None if self.relaxed else self.builder.variables(len(loose), integral=True)
        total = self.builder.columns
        low, high = lower[loose], upper[loose]
        neuron = _Neuron(z_loose.widened(total), low, high, slope, columns, switches, total)
        for kind, rows, rhs in neuron.constraints():
            self.builder.at_most(kind, node.name, loose, columns, rows, rhs)
        factor = np.where(on, 1.0, np.where(off, slope, 0.0))
        E = sparse.csr_array(sparse.diags_array(factor) @ widen(z.E, total))
        E = sum_sparse([E, sparse.csr_array(_spread(loose, len(z)) @ neuron.own)])
        offset = factor * z.offset
        offset[loose] = neuron.bottom
        error = factor * z.error + 2 * _UNIT * np.where(off, slope * z.magnitude, 0.0)
        return Expression(E, offset, error)

    def _split(self, name: str, on: Array, off: Array) -> tuple[Array, Array]:
        """Stable neurons, those with a prescribed sign included, whose sign becomes a row."""
        for sign in (1, -1):
            mine = [i for (node, i), wanted in self.signs.items() if node == name and wanted == sign]
            if not mine:
                continue
            neurons = np.array(sorted(mine))
            on[neurons], off[neurons] = sign > 0, sign < 0
            z = self.expressions[name][neurons]
            rhs = sign * z.offset + z.error
            rhs = rhs + 4 * _UNIT * np.abs(rhs)
            nothing = np.full(len(neurons), -1)
            self.builder.at_most("split", name, neurons, nothing, sparse.csr_array(-sign * z.E), rhs)
        return on, off


@dataclass(frozen=True)
class _Neuron:
    """Unstable neurons  a = max(z, s z) = bottom + height v,  l <= z <= u.

    Attributes:
        z: their pre-activations, over all `total` variables.
        lower, upper: l < 0 < u, (neurons,).
        slope: s.
        columns, switches: (neurons,) columns of v and of the binaries (None: relaxed).
    """

    z: Expression
    lower: Array
    upper: Array
    slope: float
    columns: Array
    switches: Array | None
    total: int

    @property
    def bottom(self) -> Array:
        """Least value of a, outward."""
        if self.slope == 0:
            return np.zeros_like(self.lower)
        return np.nextafter(self.slope * self.lower, -np.inf)

    @property
    def height(self) -> Array:
        """How far a reaches above `bottom`, outward."""
        return self.upper if self.slope == 0 else np.nextafter(self.upper - self.bottom, np.inf)

    @property
    def own(self) -> sparse.csr_array:
        return _diagonal(self.height, self.columns, self.total)

    def constraints(self) -> list[tuple[str, sparse.csr_array, Array]]:
        """Kind, rows and right-hand sides; each relaxed by the error of z and its own rounding."""
        s, gap = self.slope, (1 - self.slope) * -self.lower
        zero = np.zeros_like(gap)
        found = [self._below("lower", 1.0 + zero)]
        if s > 0:
            found.append(self._below("flat", s + zero))
        if self.switches is None:
            chord = (self.upper - s * self.lower) / (self.upper - self.lower)
            at_ends = (s * self.lower - chord * self.lower, self.upper - chord * self.upper)
            found.append(self._above("upper", chord, np.maximum(*at_ends), None))
        else:
            found.append(self._above("off", s + zero, zero, -(1 - s) * self.upper))
            found.append(self._above("on", 1.0 + zero, gap, gap))
        return found

    def _below(self, kind: str, factor: Array) -> tuple[str, sparse.csr_array, Array]:
        """factor z <= a."""
        rows = sum_sparse([sparse.csr_array(sparse.diags_array(factor) @ self.z.E), -self.own])
        return kind, rows, self.bottom - factor * self.z.offset + self._allowance(factor)

    def _above(
        self, kind: str, factor: Array, constant: Array, switch: Array | None
    ) -> tuple[str, sparse.csr_array, Array]:
        """a <= factor z + constant - switch p."""
        rows = sum_sparse([self.own, sparse.csr_array(sparse.diags_array(-factor) @ self.z.E)])
        if switch is not None:
            assert self.switches is not None
            rows = sum_sparse([rows, _diagonal(switch, self.switches, self.total)])
        rhs = constant + factor * self.z.offset - self.bottom
        return kind, rows, rhs + self._allowance(factor)

    def _allowance(self, factor: Array) -> Array:
        """The error of z, and the rounding of right-hand sides and coefficients."""
        reach = np.abs(self.lower) + np.abs(self.upper) + self.z.magnitude
        return factor * self.z.error + 16 * _UNIT * reach


def refuse_others(graph: Graph) -> None:
    """Raise `NotPiecewiseLinear` for a network with other nonlinearities than (Leaky)ReLU."""
    wrong: dict[str, list[str]] = {}
    for node in graph:
        if classify(node) != "nonlinear" or node.op == "relu":
            continue
        if node.op == "leaky_relu" and 0 <= float(node.attrs["negative_slope"]) <= 1:
            continue
        wrong.setdefault(node.op, []).append(node.name)
    if wrong:
        listed = "; ".join(f"{op} ({', '.join(names)})" for op, names in wrong.items())
        raise NotPiecewiseLinear(
            f"exact solvers take ReLU and LeakyReLU with a slope in [0, 1] only, not {listed}"
        )


def _diagonal(values: Array, columns: Array, total: int) -> sparse.csr_array:
    """One entry per row."""
    count = np.arange(len(values) + 1)
    return sparse.csr_array((values, columns, count), shape=(len(values), total))


def _spread(rows: Array, total: int) -> sparse.csr_array:
    """(total, len(rows)): puts row i where rows[i] says."""
    return sparse.csr_array((np.ones(len(rows)), (rows, np.arange(len(rows)))), shape=(total, len(rows)))
