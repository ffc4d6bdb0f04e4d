"""Reading ONNX files: plain, gzipped, with external data; and running them in onnxruntime."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from abcrown_dist.util.errors import LoadError

if TYPE_CHECKING:
    import onnx


_DTYPES = {"FLOAT": torch.float32, "DOUBLE": torch.float64}


@dataclass(frozen=True)
class Port:
    """An input or output of an ONNX model: its name, shape of one example, and element type."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def read_onnx(path: str | Path) -> onnx.ModelProto:
    """The model in a `.onnx` or `.onnx.gz` file, external data included.

    Raises:
        LoadError: the file is missing, cannot be read or holds no ONNX graph.
    """
    import onnx

    path = Path(path)
    if not path.is_file():
        raise LoadError(f"{path}: no such file")
    try:
        if path.suffix == ".gz":
            # External data, if any, lies beside the compressed file.
            with gzip.open(path, "rb") as stream:
                model = onnx.load_model_from_string(stream.read())
            onnx.load_external_data_for_model(model, str(path.parent))
        else:
            model = onnx.load(str(path))
    except FileNotFoundError as error:
        raise LoadError(f"{path}: the external data file {error.filename or error} is missing") from error
    except Exception as error:  # protobuf, gzip and onnx raise many unrelated types
        raise LoadError(f"{path}: not a readable ONNX file ({first_line(error)})") from error
    if not model.graph.output:
        raise LoadError(f"{path}: not an ONNX model (it holds no graph with outputs)")
    return model


def external_files(path: str | Path) -> list[str]:
    """Files that hold the model's external data, as it names them: relative to its own folder.

    Raises:
        LoadError: the file holds no ONNX model.
        OSError: the file cannot be read.
    """
    import onnx

    path = Path(path)
    content = path.read_bytes()
    try:
        model = onnx.load_model_from_string(gzip.decompress(content) if path.suffix == ".gz" else content)
    except Exception as error:  # protobuf and gzip raise many unrelated types
        raise LoadError(f"{path}: not a readable ONNX file ({first_line(error)})") from error
    holders = [model.graph, *model.functions]
    tensors = [tensor for holder in holders for tensor in _tensors(holder)]
    places = [entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location"]
    return sorted(set(places))


def _tensors(holder: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.TensorProto]:
    """Initialisers and attributes of a graph or function, those of inner graphs included."""
    yield from getattr(holder, "initializer", ())
    for sparse in getattr(holder, "sparse_initializer", ()):
        yield from (sparse.values, sparse.indices)
    for attribute in (attribute for node in holder.node for attribute in node.attribute):
        yield from (attribute.t, *attribute.tensors)
        for inner in (attribute.g, *attribute.graphs):
            yield from _tensors(inner)


def first_line(error: BaseException) -> str:
    """First line of an error's message, or its type when it has none."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def input_ports(
    model: onnx.ModelProto, path: str | Path, input_shape: Sequence[int] | None = None
) -> tuple[Port, ...]:
    """The inputs proper: those without an initialiser, dynamic axes set to 1.

    Args:
        input_shape: shape of the only input, instead of the declared one.

    Raises:
        LoadError: no input, an unknown rank or element type, several element types, or an `input_shape` that
            does not fit.
    """
    initialised = {tensor.name for tensor in model.graph.initializer}
    ports = tuple(_port(value, path) for value in model.graph.input if value.name not in initialised)
    if not ports:
        raise LoadError(f"{path}: the model has no input")
    if len({port.dtype for port in ports}) > 1:
        raise LoadError(f"{path}: inputs of different floating-point types are not supported")
    if input_shape is None:
        return ports
    if len(ports) != 1:
        raise LoadError(f"{path}: an input shape is given, but the model has {len(ports)} inputs")
    return (Port(ports[0].name, tuple(int(extent) for extent in input_shape), ports[0].dtype),)


def _port(value: onnx.ValueInfoProto, path: str | Path) -> Port:
    import onnx

    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type") or not tensor.HasField("shape"):
        raise LoadError(f"{path}: input {value.name} is no tensor of known rank; give its shape")
    shape = tuple(dim.dim_value if dim.dim_value > 0 else 1 for dim in tensor.shape.dim)
    kind = onnx.TensorProto.DataType.Name(tensor.elem_type)
    if kind not in _DTYPES:
        allowed = " and ".join(_DTYPES)
        raise LoadError(f"{path}: input {value.name} has element type {kind}; only {allowed} are supported")
    return Port(value.name, shape, _DTYPES[kind])


def open_session(path: str | Path) -> Any:
    """An onnxruntime session on the CPU with one thread, for a model file of either kind.

    Raises:
        LoadError: onnxruntime rejects the model.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    path = Path(path)
    beside = str(path.resolve().parent)  # where a decompressed model finds its external data
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", beside)
    try:
        source: Any = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else str(path)
        return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions have no common base
        raise LoadError(f"{path}: onnxruntime rejects the model ({first_line(error)})") from error


def run_session(session: Any, ports: Sequence[Port], inputs: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """Outputs of a session on one example, in the order of its declaration."""
    feed = {port.name: tensor.to(port.dtype).numpy() for port, tensor in zip(ports, inputs, strict=True)}
    return [np.asarray(value) for value in session.run(None, feed)]
