"""ONNX files as graphs: conversion by onnx2pytorch, capture, rewriting, comparison with onnxruntime."""

from __future__ import annotations

import contextlib
import io
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from abcrown_dist.graph.agreement import TOLERANCE, Difference, compare, relative_excess, sample_points
from abcrown_dist.graph.converter import import_onnx2pytorch
from abcrown_dist.graph.execute import execute_all
from abcrown_dist.graph.ir import Graph
from abcrown_dist.graph.onnx_file import Port, first_line, input_ports, open_session, read_onnx, run_session
from abcrown_dist.graph.onnx_fixes import convertible_copy
from abcrown_dist.graph.rewrite import rewrite
from abcrown_dist.graph.trace import trace
from abcrown_dist.util.errors import LoadError

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True)
class LoadedModel:
    """A network ready for verification.

    Attributes:
        graph: canonical graph (see `abcrown_dist.graph.rewrite`), float constants in `dtype`.
        input_names, input_shapes: in the order of the flat input variables, one example each.
        output_names, output_shapes: likewise.
        dtype: floating type of the model's inputs.
        path: the file; empty for a module.
        warnings: what the user should know, one line each.
    """

    graph: Graph
    input_names: tuple[str, ...]
    input_shapes: tuple[tuple[int, ...], ...]
    output_names: tuple[str, ...]
    output_shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    path: str = ""
    warnings: tuple[str, ...] = ()


def load_onnx(
    path: str | Path,
    input_shape: Sequence[int] | None = None,
    lower: np.ndarray | None = None,
    upper: np.ndarray | None = None,
) -> LoadedModel:
    """Read, capture, rewrite and check an ONNX network.

    Args:
        path: `.onnx` or `.onnx.gz`; external data beside it.
        input_shape: shape of one example of the only input, leading axis included; default: as
            declared, dynamic axes set to 1.
        lower, upper: box over the flat inputs from which the comparison with onnxruntime takes
            points; it also takes points far outside.

    Raises:
        LoadError: the file cannot be read, the box does not fit its inputs, an op cannot be converted
            or captured, or the graph computes something else than onnxruntime (the message names the
            first node that differs).
    """
    model = read_onnx(path)
    ports = input_ports(model, path, input_shape)
    check_box(sum(math.prod(port.shape) for port in ports), path, lower)
    raw = capture(model, ports, path)
    graph = rewrite(raw, ports[0].dtype)
    scalars = [node.name for node in graph if not node.shape]
    if scalars:
        raise LoadError(f"{path}: values without axes (scalars) are not supported yet: {', '.join(scalars)}")
    notes = check_agreement(raw, graph, model, ports, path, lower, upper)
    return LoadedModel(
        graph=graph,
        input_names=tuple(port.name for port in ports),
        input_shapes=tuple(port.shape for port in ports),
        output_names=tuple(value.name for value in model.graph.output),
        output_shapes=tuple(graph[name].shape for name in graph.outputs),
        dtype=ports[0].dtype,
        path=str(path),
        warnings=notes,
    )


def check_box(size: int, path: str | Path, lower: np.ndarray | None) -> None:
    """Check that a box has as many components as the network has inputs.

    Raises:
        LoadError: it does not.
    """
    if lower is not None and len(lower) != size:
        raise LoadError(f"{path}: the property declares {len(lower)} inputs, but the network has {size}")


def capture(model: onnx.ModelProto, ports: Sequence[Port], path: str | Path) -> Graph:
    """Raw graph of ATen calls; its nodes bear the names of the ONNX values they compute.

    Raises:
        LoadError: onnx2pytorch cannot convert an op, or the converted model cannot be captured.
    """
    with _silence():
        module = _convert(model, path)
        converted = {node.output[0]: tuple(node.output) for node in module.onnx_model.graph.node}
        labels = {name: converted[first] for first, name in module.mapping.items()}
        random = torch.Generator().manual_seed(0)
        examples = [torch.rand(port.shape, generator=random, dtype=port.dtype) for port in ports]
        names = [port.name for port in ports]
        try:
            return trace(module, examples, names, lambda name: labels.get(name, ()))
        except LoadError as error:
            raise LoadError(f"{path}: {_with_op(model, first_line(error))}") from error


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep the warnings and prints of onnx2pytorch off the user's terminal."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _convert(model: onnx.ModelProto, path: str | Path) -> Any:
    """The model as an onnx2pytorch module."""
    onnx2pytorch = import_onnx2pytorch()

    try:
        return onnx2pytorch.ConvertModel(convertible_copy(model))
    except Exception as error:  # onnx2pytorch raises many unrelated types
        found = re.search(r"op_type=(\w+)", str(error))
        if found is None:
            raise LoadError(f"{path}: cannot be converted ({first_line(error)})") from error
        op = found.group(1)
        names = [node.name or node.output[0] for node in model.graph.node if node.op_type == op]
        raise LoadError(f"{path}: unsupported ONNX op {op} ({', '.join(names)})") from error


def _with_op(model: onnx.ModelProto, message: str) -> str:
    """The message, with the op type before the name of the ONNX value that it begins with."""
    place = message.split(": ", 1)[0]
    for node in model.graph.node:
        if place in node.output:
            return f"{node.op_type} {message}"
    return message


def check_agreement(
    raw: Graph,
    graph: Graph,
    model: onnx.ModelProto,
    ports: Sequence[Port],
    path: str | Path,
    lower: np.ndarray | None = None,
    upper: np.ndarray | None = None,
) -> tuple[str, ...]:
    """Compare `graph` with onnxruntime on points inside the box and far outside.

    Args:
        raw: the capture before rewriting, to find the node to blame.

    Returns:
        warnings.

    Raises:
        LoadError: onnxruntime rejects the model, or the two differ.
    """
    difference, not_finite = find_difference(graph, ports, path, lower, upper)
    if difference is not None:
        culprit = first_difference(raw, model, ports, difference)
        raise LoadError(
            f"{path}: the captured network differs from onnxruntime by {difference.error:.3g} (outputs up to "
            f"{difference.scale:.3g}); first node that differs: {culprit}"
        )
    return not_finite_note(path, not_finite)


def find_difference(
    graph: Graph,
    ports: Sequence[Port],
    path: str | Path,
    lower: np.ndarray | None = None,
    upper: np.ndarray | None = None,
) -> tuple[Difference | None, int]:
    """`compare` with what onnxruntime makes of the file, on points inside the box and far outside.

    Raises:
        LoadError: onnxruntime rejects the model.
    """
    session = open_session(path)

    def reference(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        try:
            return [torch.from_numpy(value) for value in run_session(session, ports, inputs)]
        except Exception as error:  # onnxruntime's exceptions have no common base
            raise LoadError(f"{path}: onnxruntime cannot run the model ({first_line(error)})") from error

    shapes = [port.shape for port in ports]
    return compare(graph, reference, sample_points(shapes, ports[0].dtype, lower, upper))


def not_finite_note(path: str | Path, count: int) -> tuple[str, ...]:
    """What to warn of when outputs were not finite at `count` of the points."""
    if not count:
        return ()
    return (f"{path}: outputs are NaN or infinite at {count} of the points it was tried on",)


def first_difference(
    raw: Graph, model: onnx.ModelProto, ports: Sequence[Port], difference: Difference
) -> str:
    """The first ONNX node whose value onnxruntime computes differently, as `OpType name`."""
    import onnx
    import onnxruntime

    producers = {name: node for node in model.graph.node for name in node.output}
    wanted = [node.name for node in raw if node.name in producers]
    exposed = onnx.ModelProto()
    exposed.CopyFrom(model)
    declared = {value.name for value in exposed.graph.output}
    exposed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted if name not in declared)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        exposed.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    feed = {p.name: x.to(p.dtype).numpy() for p, x in zip(ports, difference.point, strict=True)}
    expected = dict(zip(wanted, session.run(wanted, feed), strict=True))
    values = execute_all(raw, difference.point)
    for name in wanted:
        theirs = torch.from_numpy(np.asarray(expected[name]))
        producer = producers[name]
        title = f"{producer.op_type} {producer.name or name}"
        if theirs.numel() != values[name].numel():
            return title
        error, scale = relative_excess(values[name], theirs.reshape(values[name].shape))
        if error > TOLERANCE * scale:
            return title
    return f"output {model.graph.output[difference.output].name}"
