"""The judge of counterexamples: replays a candidate and decides in exact arithmetic.

It shares no code with the search, the bounds or the front end. The network is run by onnxruntime
on the file that the user named, or by a Python callable; a candidate's decimals are the ones that
are printed later, and every comparison is made in rational numbers, with no tolerance.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Callable, Sequence
from decimal import Context, Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from abcrown_dist.spec.property import Box, Disjunct, Property, Witness
from abcrown_dist.util.errors import LoadError

Model = Callable[[np.ndarray], Any]
_ONNX_TYPES: dict[str, type[np.floating[Any]]] = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
}


class OnnxModel:
    """An ONNX file as a function from the flat input vector to the flat output vector.

    Args:
        path: ONNX file, plain or compressed by gzip. External data is found beside it.
        shapes: shape of each input; by default the file's own, with 1 for every axis left open.

    Attributes:
        dtype: the inputs' floating-point type.
        num_inputs: sum of the inputs' sizes.

    Raises:
        LoadError: onnxruntime cannot load the file, or an input is not of a floating-point type.
    """

    def __init__(self, path: str | Path, shapes: Sequence[Sequence[int]] | None = None) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 4
        beside = str(Path(path).resolve().parent)  # where a decompressed model finds its external data
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", beside)
        self._path = path
        try:
            model = gzip.decompress(Path(path).read_bytes()) if str(path).endswith(".gz") else str(path)
            self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except OSError as error:
            raise LoadError(f"{path}: cannot read the model: {error.strerror or error}") from None
        except Exception as error:  # onnxruntime has a class of its own for each kind of failure
            raise LoadError(f"{path}: onnxruntime cannot load the model: {_first_line(error)}") from None
        inputs = self._session.get_inputs()
        self._names = [item.name for item in inputs]
        self._shapes = [tuple(shape) for shape in shapes or (_closed(item.shape) for item in inputs)]
        self._dtypes = [_dtype(path, item) for item in inputs]
        self.dtype: type[np.floating[Any]] = self._dtypes[0]
        self.num_inputs = sum(math.prod(shape) for shape in self._shapes)
        if len(self._shapes) != len(inputs):
            raise LoadError(f"{path}: {len(self._shapes)} input shapes for {len(inputs)} inputs")
        if any(dtype is not self.dtype for dtype in self._dtypes):
            raise LoadError(f"{path}: inputs of different floating-point types are not supported")

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Outputs (m,) in float64 for inputs (n,) of `dtype`: all outputs in order, each in C order."""
        sizes = [math.prod(shape) for shape in self._shapes]
        parts = np.split(x, np.cumsum(sizes)[:-1])
        arrays = (part.reshape(shape) for part, shape in zip(parts, self._shapes, strict=True))
        feed = dict(zip(self._names, arrays, strict=True))
        try:
            outputs = self._session.run(None, feed)
        except Exception as error:
            raise LoadError(f"{self._path}: onnxruntime cannot run the model: {_first_line(error)}") from None
        return np.concatenate([np.asarray(output, dtype=np.float64).ravel() for output in outputs])


class Confirmer:
    """Decides whether a point is a counterexample to a property of a network.

    Args:
        prop: the property.
        model: path of the ONNX file, or a callable from the flat inputs (n,) in `dtype` to the
            outputs, of any shape.
        input_shapes: shape of each ONNX input; by default the file's own (see `OnnxModel`).
        dtype: input type of a callable; an ONNX file has its own.

    Raises:
        LoadError: the model cannot be loaded, or does not have the property's number of inputs.
    """

    def __init__(
        self,
        prop: Property,
        model: str | Path | Model,
        *,
        input_shapes: Sequence[Sequence[int]] | None = None,
        dtype: type[np.floating[Any]] = np.float32,
    ) -> None:
        self._property = prop
        if callable(model):
            self._model: Model = model
            self._dtype = dtype
            return
        onnx = OnnxModel(model, input_shapes)
        self._model, self._dtype = onnx, onnx.dtype
        if onnx.num_inputs != prop.num_inputs:
            raise LoadError(
                f"{prop.source}: the property declares {prop.num_inputs} inputs, "
                f"but the network has {onnx.num_inputs}"
            )

    def evaluate(self, x: np.ndarray) -> np.ndarray:
        """Outputs (m,) in float64 at the inputs (n,), cast to the model's type."""
        with np.errstate(over="ignore"):
            return self._run(np.asarray(x).astype(self._dtype).ravel())

    def confirm(self, x: np.ndarray, disjunct_index: int) -> Witness | None:
        """The witness that a candidate amounts to, or None if it is no counterexample.

        Args:
            x: candidate, (n,) float64. It is moved into the box if it is outside.
            disjunct_index: which disjunct it is meant to fulfil.

        Raises:
            LoadError: the model cannot be run.
        """
        disjunct = self._property.disjuncts[disjunct_index]
        if not np.isfinite(x).all():
            return None
        point = self._decimals(np.asarray(x, dtype=np.float64).ravel(), disjunct)
        if not _inside(point, disjunct.box):
            return None
        outputs = [self._run(inputs) for inputs in self._casts(point)]
        if not all(_fulfilled(disjunct, point, answer) for answer in outputs):
            return None
        return Witness(point, outputs[0].tolist(), disjunct_index)

    def release(self) -> None:
        """The session stays open: one process has room for the model."""

    def _run(self, inputs: np.ndarray) -> np.ndarray:
        outputs = self._model(inputs)
        detach = getattr(outputs, "detach", None)
        flat = np.asarray(detach() if detach else outputs, dtype=np.float64).ravel()
        if flat.size != self._property.num_outputs:
            raise LoadError(
                f"{self._property.source}: the property declares {self._property.num_outputs} outputs, "
                f"but the network has {flat.size}"
            )
        return flat

    def _decimals(self, x: np.ndarray, disjunct: Disjunct) -> list[Decimal]:
        """A decimal in the box for each component, of the model's type wherever the box allows one.

        Short decimals of the model's numbers come first, their exact values next, and the bounds
        as written last: a box that no number of the type lies in still has its decimals.
        """
        box = disjunct.box
        with np.errstate(over="ignore"):
            values = x.astype(self._dtype)
        open_lower, open_upper = _open_sides(disjunct)
        point = []
        for i, (value, low, high) in enumerate(zip(values, box.lower, box.upper, strict=True)):
            decimal = _closest(value, low, high)
            if (decimal == low and i in open_lower) or (decimal == high and i in open_upper):
                decimal = _interior(decimal, low, high, self._dtype)
            point.append(decimal)
        return point

    def _casts(self, point: Sequence[Decimal]) -> list[np.ndarray]:
        """The point in the model's type, as every reader of its decimals may arrive at it.

        Reading a decimal as float64 and rounding that once more can differ from reading it as
        float32 at once, by one unit. Where it does, both must be counterexamples.
        """
        exact = np.array([float(value) for value in point])
        with np.errstate(over="ignore"):
            twice = exact.astype(self._dtype)
        once = twice.copy()
        for i in np.flatnonzero(_is_midpoint(exact, twice)).tolist():
            halfway = Decimal(float(exact[i]))
            if halfway != point[i]:  # else a true tie: both readers round it to even
                toward = np.inf if point[i] > halfway else -np.inf
                once[i] = np.nextafter(exact[i], toward)
        return [twice] if np.array_equal(once, twice) else [twice, once]


def _is_midpoint(exact: np.ndarray, cast: np.ndarray) -> np.ndarray:
    """Where a float64 lies halfway between its cast and a neighbour of that."""
    wide = cast.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        neighbour = np.nextafter(cast, np.where(exact > wide, np.inf, -np.inf).astype(cast.dtype))
        halfway = (wide + neighbour.astype(np.float64)) / 2
    between: np.ndarray = (exact != wide) & (exact == halfway)
    return between


def _closest(value: np.floating[Any], low: Decimal, high: Decimal) -> Decimal:
    """The value if it is in the range, else the nearer end of the range."""
    if not np.isfinite(value):
        return low if value < 0 else high
    short = Decimal(str(value))
    if low <= short <= high:
        return short or Decimal(0)  # without the sign of a negative zero
    exact = Decimal(float(value))
    return min(max(exact, low), high)


def _interior(end: Decimal, low: Decimal, high: Decimal, dtype: type[np.floating[Any]]) -> Decimal:
    """A decimal strictly between the ends of a range, close to `end`, one of them."""
    toward = dtype(np.inf) if end == low else dtype(-np.inf)
    neighbour = Decimal(str(np.nextafter(dtype(float(end)), toward)))
    if low < neighbour < high:
        return neighbour
    exact = Context(prec=5000)
    return exact.multiply(exact.add(low, high), Decimal("0.5"))


def _open_sides(disjunct: Disjunct) -> tuple[set[int], set[int]]:
    """Inputs whose lower, and whose upper, bound is excluded by a strict constraint on them alone."""
    lower: set[int] = set()
    upper: set[int] = set()
    if disjunct.strict is None or not disjunct.strict.any():
        return lower, upper
    groups = disjunct.groups
    for k, ((coefficients, _), strict) in enumerate(zip(disjunct.terms, disjunct.strict, strict=True)):
        alternative = groups is not None and (groups[-1] == groups[-1, k]).sum() > 1  # it need not hold
        if strict and len(coefficients) == 1 and not alternative:
            ((name, coefficient),) = coefficients.items()
            if name[0] == "X":
                (upper if coefficient > 0 else lower).add(int(name[2:]))
    return lower, upper


def _inside(point: Sequence[Decimal], box: Box) -> bool:
    return all(low <= x <= high for x, low, high in zip(point, box.lower, box.upper, strict=True))


def _fulfilled(disjunct: Disjunct, point: Sequence[Decimal], outputs: np.ndarray) -> bool:
    """Whether the constraints hold, exactly as written. Outputs that are not finite fulfil nothing."""
    if not np.isfinite(outputs).all():
        return False
    strict = disjunct.strict if disjunct.strict is not None else np.zeros(len(disjunct.terms), dtype=bool)
    if not len(disjunct.terms) == len(strict) == len(disjunct.rhs):
        raise ValueError("a disjunct without its constraints as written cannot be confirmed")
    held = np.zeros(len(strict), dtype=bool)
    for k, ((coefficients, rhs), is_strict) in enumerate(zip(disjunct.terms, strict, strict=True)):
        total = Fraction(0)
        for name, coefficient in coefficients.items():
            index = int(name[2:])
            value = point[index] if name[0] == "X" else outputs[index].item()
            total += Fraction(coefficient) * Fraction(value)
        held[k] = total < rhs if is_strict else total <= rhs
    for level, group in enumerate(() if disjunct.groups is None else disjunct.groups):
        # Even levels join by "and", odd ones by "or"; `group` names the first row of each row's group.
        join = np.any if level % 2 else np.all
        held = np.array([join(held[group == first]) for first in group])
    return bool(held.all())


def _closed(shape: Sequence[int | str | None]) -> tuple[int, ...]:
    """A shape with 1 for every axis that the file leaves open."""
    return tuple(extent if isinstance(extent, int) and extent > 0 else 1 for extent in shape)


def _dtype(path: str | Path, item: Any) -> type[np.floating[Any]]:
    if item.type not in _ONNX_TYPES:
        raise LoadError(f"{path}: the input '{item.name}' has type {item.type}, not a floating-point one")
    return _ONNX_TYPES[item.type]


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
