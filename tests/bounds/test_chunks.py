"""Row chunks: any grid gives the same bounds, equal grids the same bits, padding is never seen."""

from __future__ import annotations

import pytest
import torch

from abcrown_dist.bounds.alpha import AlphaSettings
from abcrown_dist.bounds.chunks import affine_weight_bytes, chunk_size, chunks
from abcrown_dist.bounds.propagate import bound_intermediate, bound_outputs, bound_rows
from abcrown_dist.bounds.settings import BoundSettings
from abcrown_dist.bounds.types import Interval, RowBounds
from abcrown_dist.util.deadline import Deadline
from abcrown_dist.util.errors import DeadlineExceeded
from abcrown_dist.weights.local import LocalWeights
from tests.bounds import zoo


def test_pieces_are_equally_long_and_cover_everything_once() -> None:
    for total in (1, 2, 7, 8, 9, 100):
        for limit in (1, 2, 3, 7, 8, 1000):
            size = chunk_size(total, per_row=10, budget=10**9, limit=limit)
            assert 1 <= size <= min(limit, total)
            seen = []
            for piece, count in chunks(torch.arange(total), size):
                assert len(piece) == size
                seen += piece[:count].tolist()
            assert seen == list(range(total))
    assert chunk_size(0, 10, 100, 5) == 0
    assert list(chunks(torch.arange(0), 0)) == []


def test_size_follows_budget_and_limit() -> None:
    assert chunk_size(100, per_row=10, budget=500, limit=1000) == 50
    assert chunk_size(101, per_row=10, budget=500, limit=1000) == 34  # three equal chunks, not 50 + 50 + 1
    assert chunk_size(100, per_row=10, budget=10**6, limit=30) == 25
    assert chunk_size(5, per_row=10, budget=-7, limit=30) == 1, "a pass needs one row at least"


def test_weights_are_counted_once() -> None:
    graph = zoo.graph("mlp")
    assert affine_weight_bytes(graph, torch.float64) == 8 * (4 * 10 + 10 + 10 * 8 + 8 + 8 * 3 + 3)


def bounds(name: str, method: str, dtype: torch.dtype, rows: int) -> dict[str, Interval]:
    graph = zoo.graph(name)
    settings = BoundSettings(
        method=method, batch_rows=rows, alpha=AlphaSettings(iteration=4, early_stop_patience=10**9)
    )
    with torch.no_grad():
        return bound_outputs(LocalWeights(graph, dtype), zoo.boxes(graph, 2, dtype), settings)


@pytest.mark.parametrize("method", ["crown-ibp", "crown", "alpha-crown"])
@pytest.mark.parametrize("name", ["mlp", "cnn", "residual", "sliced", "two_inputs_two_outputs"])
def test_any_chunk_size_gives_the_same_bounds(name: str, method: str) -> None:
    whole = bounds(name, method, torch.float64, 10**9)
    for rows in (1, 2, 3, 5, 8, 13):
        for key, interval in bounds(name, method, torch.float64, rows).items():
            scale = 1e-6 * (1 + whole[key].magnitude.max())
            assert (interval.lower - whole[key].lower).abs().max() <= scale
            assert (interval.upper - whole[key].upper).abs().max() <= scale


@pytest.mark.parametrize("method", ["crown", "alpha-crown"])
@pytest.mark.parametrize("name", ["cnn", "residual"])
def test_equal_grids_give_equal_bits(name: str, method: str) -> None:
    for rows in (3, 10**9):
        first, second = (bounds(name, method, torch.float32, rows) for _ in range(2))
        for key, interval in first.items():
            assert torch.equal(interval.lower, second[key].lower)
            assert torch.equal(interval.upper, second[key].upper)


def test_rows_of_a_full_chunk_do_not_depend_on_their_neighbours() -> None:
    """At a fixed chunk shape a row has the same bits whatever else the chunk holds, padding included."""
    graph, dtype = zoo.graph("cnn"), torch.float32
    weights, box = LocalWeights(graph, dtype), zoo.boxes(graph, 2, dtype)
    settings = BoundSettings(
        method="alpha-crown", batch_rows=8, alpha=AlphaSettings(iteration=5, early_stop_patience=10**9)
    )
    (name,) = graph.outputs
    rows = torch.randn(2, 16, *graph[name].shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        relaxed = bound_intermediate(weights, box, settings)

        def solve(part: torch.Tensor) -> torch.Tensor:
            return bound_rows(weights, box, relaxed, {name: part}, settings).lower

        all_rows = solve(rows)
        assert torch.equal(solve(rows[:, 8:]), all_rows[:, 8:])
        assert torch.equal(solve(rows.flip(1)), all_rows.flip(1))
        padded = solve(rows[:, :15])  # the second chunk repeats its last row
        assert torch.equal(padded, all_rows[:, :15])


def test_the_callback_sees_each_row_once_and_never_padding() -> None:
    graph, dtype = zoo.graph("mlp"), torch.float64
    weights, box = LocalWeights(graph, dtype), zoo.boxes(graph, 2, dtype)
    settings = BoundSettings(method="alpha-crown", batch_rows=4)
    (name,) = graph.outputs
    asked: list[list[int]] = []

    def stop(best: RowBounds, rows: torch.Tensor) -> bool:
        assert best.lower.shape == best.error.shape == (2, len(rows))
        asked.append(rows.tolist())
        return True

    start = {name: torch.randn(2, 10, *graph[name].shape, dtype=dtype)}
    with torch.no_grad():
        relaxed = bound_intermediate(weights, box, settings)
        found = bound_rows(weights, box, relaxed, start, settings, stop=stop)
    assert found.lower.shape == (2, 10)
    assert [row for rows in asked for row in rows] == list(range(10))


def test_a_deadline_is_kept_between_chunks() -> None:
    graph, dtype = zoo.graph("mlp"), torch.float64
    weights, box = LocalWeights(graph, dtype), zoo.boxes(graph, 1, dtype)
    with torch.no_grad(), pytest.raises(DeadlineExceeded, match="time limit of 0 s"):
        bound_intermediate(weights, box, BoundSettings(), Deadline(0.0))
