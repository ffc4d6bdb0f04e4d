"""Programmes hold exactly the network: every input is a solution, and its outputs are the network's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import Tensor, nn

from abcrown_dist.exact.encode import Encoding, NotPiecewiseLinear, encode
from abcrown_dist.exact.expression import Expression, widen
from abcrown_dist.exact.program import Program, linear_minimum
from abcrown_dist.graph.load_torch import load_torch
from abcrown_dist.util.errors import ConfigError
from abcrown_dist.util.numerics import Rounding
from abcrown_dist.weights.local import LocalWeights
from tests.bounds import zoo
from tests.models import randomize

Array = np.ndarray


def box(inputs: int, radius: float = 0.4, seed: int = 0) -> tuple[Array, Array]:
    """A random box whose first input is fixed."""
    random = np.random.default_rng(seed)
    centre, width = random.standard_normal(inputs), radius * random.random(inputs)
    width[0] = 0
    return centre - width, centre + width


def extremes(encoding: Encoding, x: Array, neuron: Expression, relaxed: bool = False) -> tuple[float, float]:
    """Least and greatest value of one neuron in the programme when the input is x."""
    program = encoding.program
    low, high = np.zeros(program.columns), np.ones(program.columns)
    for i, column in enumerate(encoding.input_columns):
        if column >= 0:
            share = (x[i] - encoding.lower[i]) / (encoding.upper[i] - encoding.lower[i])
            low[column] = high[column] = share
    cost = widen(neuron.E, program.columns).toarray().reshape(-1)
    rows = [LinearConstraint(program.A, -np.inf, program.b)]
    if len(program.b_equal):
        rows.append(LinearConstraint(program.A_equal, program.b_equal, program.b_equal))
    values = []
    for sign in (1, -1):
        integral = program.integral.astype(int) * (not relaxed)
        result = milp(sign * cost, integrality=integral, bounds=Bounds(low, high), constraints=rows)
        assert result.status == 0, result.message
        values.append(sign * result.fun + float(neuron.offset[0]))
    return values[0], values[1]


@pytest.mark.parametrize("name", zoo.NAMES)
def test_at_every_input_the_programme_has_the_networks_outputs(name: str) -> None:
    weights = LocalWeights(zoo.graph(name), torch.float64)
    graph = weights.graph
    lower, upper = box(graph.input_size)
    encoding = encode(weights, lower, upper, {})
    random = np.random.default_rng(1)
    points = lower + (upper - lower) * random.random((3, len(lower)))
    C = random.standard_normal((1, graph.output_size))
    D = random.standard_normal((1, graph.input_size))
    output = encoding.clauses(C, D, np.array([0.5]))
    for x, y in zip(points, encoding.network(points), strict=True):
        wanted = float(C[0] @ y + D[0] @ x - 0.5)
        assert extremes(encoding, x, output) == pytest.approx((wanted, wanted), abs=1e-5)


@pytest.mark.parametrize("name", zoo.NAMES)
def test_intervals_and_relaxations_hold_every_value(name: str) -> None:
    weights = LocalWeights(zoo.graph(name), torch.float64)
    lower, upper = box(weights.graph.input_size)
    encoding = encode(weights, lower, upper, {}, relaxed=True)
    assert not encoding.program.integral.any()
    random = np.random.default_rng(2)
    x = np.vstack([lower + (upper - lower) * random.random((200, len(lower))), lower, upper])
    y = encoding.network(x)
    C = random.standard_normal((2, y.shape[1]))
    clauses = encoding.clauses(C, None, np.zeros(2))
    low, high = clauses.interval()
    values = y @ C.T
    assert (values >= low).all() and (values <= high).all()
    program = encoding.program
    for k in range(2):
        cost = widen(clauses[np.array([k])].E, program.columns).toarray().reshape(-1)
        for sign in (1, -1):
            found = linear_minimum(program, sign * cost)
            assert found.solution is not None
            bound = found.value + sign * clauses.offset[k] - clauses.error[k]
            assert bound <= (sign * values[:, k]).min()
            assert found.value == pytest.approx(found.solution.value, abs=1e-6)


def test_given_bounds_are_used_and_tighten_the_relaxation() -> None:
    """With bounds that make every neuron stable the network is affine and needs no variables."""
    weights = LocalWeights(zoo.graph("mlp"), torch.float64)
    graph = weights.graph
    lower, upper = box(graph.input_size)
    loose = encode(weights, lower, upper, {}).program
    assert loose.integral.any()
    names = [node.inputs[0] for node in graph if node.op == "relu"]
    active = {name: (np.zeros(graph[name].size), np.full(graph[name].size, 99.0)) for name in names}
    affine = encode(weights, lower, upper, active, as_given=True)
    assert affine.program.columns == len(lower) - 1
    x = (lower + upper) / 2
    for name in names:
        assert len(affine.expressions[name]) == graph[name].size
    linear = nn.Sequential(*(layer for layer in _layers("mlp") if isinstance(layer, nn.Linear))).double()
    wanted = linear(torch.from_numpy(x)[None])[0].detach().numpy()
    v = np.full(affine.program.columns, 0.5)
    assert affine.expressions[graph.outputs[0]].value(v) == pytest.approx(wanted, abs=1e-9)


def _layers(name: str) -> list[nn.Module]:
    """A network of the zoo as PyTorch layers, rebuilt from its graph."""
    graph = zoo.graph(name)
    layers: list[nn.Module] = []
    for node in graph:
        if node.op == "linear":
            weight = graph.constants[node.attrs["weight"].key]
            layer = nn.Linear(weight.shape[1], weight.shape[0])
            with torch.no_grad():
                layer.weight.copy_(weight)
                layer.bias.copy_(graph.constants[node.attrs["bias"].key])
            layers.append(layer)
        elif node.op == "relu":
            layers.append(nn.ReLU())
    return layers


class Chain(nn.Module):
    """Pre-activation residual blocks: no nonlinearity on the chain, whose rows fill up."""

    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(3, 12)
        self.body = nn.ModuleList(nn.Linear(12, 12) for _ in range(blocks))
        self.last = nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.body:
            x = x + layer(torch.relu(x))
        return self.last(x)


def test_rows_that_would_fill_up_get_variables() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = randomize(Chain(), 3)
    weights = LocalWeights(load_torch(module, torch.zeros(1, 3)).graph, torch.float64)
    lower, upper = np.full(3, -0.2), np.full(3, 0.2)
    encoding = encode(weights, lower, upper, {})
    program = encoding.program
    assert program.A_equal.shape[0] > 0
    random = np.random.default_rng(0)
    points = lower + (upper - lower) * random.random((3, 3))
    output = encoding.expressions[weights.graph.outputs[0]]
    for x, y in zip(points, encoding.network(points), strict=True):
        assert extremes(encoding, x, output) == pytest.approx((y[0], y[0]), abs=1e-5)


@pytest.mark.parametrize("name", ["residual", "cnn", "sliced"])
def test_rows_are_scaled_and_hold_nothing_that_the_solver_drops(name: str) -> None:
    weights = LocalWeights(zoo.graph(name), torch.float64)
    lower, upper = box(weights.graph.input_size)
    program = encode(weights, lower, upper, {}).program
    for matrix in (program.A, program.A_equal):
        if matrix.shape[0]:
            largest = abs(matrix).max(axis=1).toarray()
            assert ((largest >= 1) & (largest < 2)).all()
            assert np.abs(matrix.data).min() >= 1e-9


def test_tiny_neurons_cut_nothing_off() -> None:
    """A neuron that reaches only 1e-10 above zero, amplified by 1e10: HiGHS would drop its coefficients."""
    module = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)).double()
    with torch.no_grad():
        module[0].weight.fill_(1.0)
        module[0].bias.fill_(-1.0 + 1e-10)
        module[2].weight.fill_(1e10)
        module[2].bias.zero_()
    weights = LocalWeights(load_torch(module, torch.zeros(1, 1).double()).graph, torch.float64)
    encoding = encode(weights, np.zeros(1), np.ones(1), {})
    output = encoding.expressions[weights.graph.outputs[0]]
    assert float(encoding.network(np.ones((1, 1)))[0, 0]) == pytest.approx(1.0, rel=1e-5)
    assert extremes(encoding, np.ones(1), output)[1] >= 1.0 - 1e-5
    low, high = output.interval()
    assert low[0] <= 0 and high[0] >= 1.0 - 1e-6


def feasible(program: Program, v: Array) -> bool:
    return bool((program.A @ v <= program.b + 1e-12).all())


@pytest.mark.parametrize("slope", [0.0, 0.2, 1.0])
def test_fixed_signs_keep_exactly_their_half(slope: float) -> None:
    """z = x: with sign +1 the programme holds x >= 0 and a = x, with -1 x <= 0 and a = s x."""
    activation = nn.LeakyReLU(slope) if slope else nn.ReLU()
    module = nn.Sequential(nn.Linear(1, 1), activation, nn.Linear(1, 1)).double()
    with torch.no_grad():
        for layer in (module[0], module[2]):
            layer.weight.fill_(1.0)
            layer.bias.zero_()
    weights = LocalWeights(load_torch(module, torch.zeros(1, 1).double()).graph, torch.float64)
    names = [node.inputs[0] for node in weights.graph if node.op in ("relu", "leaky_relu")]
    if slope == 1.0 and not names:
        pytest.skip("rewriting drops the identity")
    for sign, factor in ((1, 1.0), (-1, slope)):
        encoding = encode(weights, -np.ones(1), np.ones(1), {}, signs={(names[0], 0): sign})
        program = encoding.program
        assert [group.kind for group in program.groups] == ["split"]
        output = encoding.expressions[weights.graph.outputs[0]]
        for x in (-0.5, -1e-6, 1e-6, 0.5):
            v = np.array([(x + 1) / 2])
            assert feasible(program, v) == (sign * x > 0)
            assert output.value(v)[0] == pytest.approx(factor * x, abs=1e-12)


def test_other_nonlinearities_are_named() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Sigmoid(), nn.Linear(2, 2), nn.Tanh(), nn.ReLU())
    weights = LocalWeights(load_torch(module, torch.zeros(1, 2)).graph, torch.float64)
    with pytest.raises(NotPiecewiseLinear, match=r"not sigmoid \(.*\); tanh \(.*\)$") as found:
        encode(weights, np.zeros(2), np.ones(2), {})
    assert isinstance(found.value, ConfigError)
    assert "\n" not in str(found.value)


def test_what_no_programme_can_rest_on_is_refused() -> None:
    graph = zoo.graph("mlp")
    name = next(node.inputs[0] for node in graph if node.op == "relu")
    weights = LocalWeights(graph, torch.float64)
    lower, upper = box(4)
    with pytest.raises(ValueError, match="float64"):
        encode(LocalWeights(graph), lower, upper, {})
    with pytest.raises(ValueError, match="box"):
        encode(weights, upper, lower, {})
    with pytest.raises(ValueError, match="box"):
        encode(weights, lower, np.full(4, np.inf), {})
    with pytest.raises(ValueError, match=f"bounds of {name} cross"):
        encode(weights, lower, upper, {name: (np.full(10, 1e3), np.full(10, 2e3))})
    unknown = {name: (np.full(10, np.nan), np.full(10, np.inf))}
    columns = [encode(weights, lower, upper, given).program.columns for given in (unknown, {})]
    assert columns[0] == columns[1]


@pytest.mark.parametrize(("module", "room"), [(nn.Linear(1, 1), 5.9), (nn.LeakyReLU(0.3), 0.3 * 6e-8)])
def test_expressions_have_room_for_what_the_network_rounds(module: nn.Module, room: float) -> None:
    """x + 1e8 rounds to a multiple of 8, a slope in float32 to the next number."""
    if isinstance(module, nn.Linear):
        with torch.no_grad():
            module.weight.fill_(1.0)
            module.bias.fill_(1e8)
    graph = load_torch(module, torch.zeros(1, 1)).graph
    ends, found = np.array([1.0]), {}
    bounds = dict.fromkeys(graph.inputs, (-ends, ends))
    for model in (None, torch.float32):
        weights = LocalWeights(graph, torch.float64, rounding=Rounding(model=model))
        found[model] = encode(weights, -ends, ends, bounds).expressions[graph.outputs[0]].error
    assert found[None] < 1e-6 < room or found[None] < 1e-12
    assert found[torch.float32] - found[None] >= room * 0.9
