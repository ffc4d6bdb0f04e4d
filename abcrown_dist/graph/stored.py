"""A loaded model as one file: structure as JSON, constants as raw bytes, digests of both. No pickle.

Layout: `MAGIC`, the SHA-256 of the structure, its length (8 bytes, little-endian), the structure, then the
constants one after the other. The structure holds every constant's own SHA-256, so that its digest
stands for the whole file. Nothing is interpreted before its digest has proved right.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from abcrown_dist.graph.check import GraphError, check
from abcrown_dist.graph.ir import Arg, Const, Graph, Node
from abcrown_dist.graph.load_onnx import LoadedModel

MAGIC = b"abcrown_dist graph\n"
_DIGEST = hashlib.sha256().digest_size
_LENGTH = 8
# Sorts of values in calls that JSON lacks, by the tag that they are written under.
_TORCH_VALUES: dict[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


class Unusable(Exception):
    """A file that is damaged, truncated or foreign; the message says which, without the file's name."""


class Unstorable(Exception):
    """A model that holds something this format has no form for."""


@dataclass(frozen=True)
class Stored:
    """A model read from or written to a file.

    Attributes:
        model: its `path` and `warnings` are empty.
        extra: what the writer put beside it, as JSON values.
        digest: hexadecimal SHA-256 that stands for all of it.
    """

    model: LoadedModel
    extra: Mapping[str, Any]
    digest: str


def write_model(stream: BinaryIO, model: LoadedModel, extra: Mapping[str, Any]) -> str:
    """Write `model` and the JSON values in `extra`; returns the digest that stands for both.

    Raises:
        Unstorable: the format has no form for something in the model; nothing has been written.
    """
    memory = {key: _memory(key, value) for key, value in model.graph.constants.items()}
    structure = json.dumps({"extra": dict(extra), **_structure(model, memory)}).encode()
    digest = hashlib.sha256(structure)
    stream.write(MAGIC + digest.digest() + len(structure).to_bytes(_LENGTH, "little") + structure)
    for span in memory.values():
        stream.write(_bytes(span))
    return digest.hexdigest()


def digest(model: LoadedModel) -> str:
    """Hexadecimal SHA-256 of all that a network computes: the same for equal models, wherever they come from.

    Raises:
        Unstorable: see `write_model`.
    """
    memory = {key: _memory(key, value) for key, value in model.graph.constants.items()}
    return hashlib.sha256(json.dumps(_structure(model, memory)).encode()).hexdigest()


def read_model(stream: BinaryIO) -> Stored:
    """Read what `write_model` wrote: bit for bit the same constants, in the same memory layout.

    Raises:
        Unusable: the file is anything else.
    """
    left = os.fstat(stream.fileno()).st_size
    if stream.read(len(MAGIC)) != MAGIC:
        raise Unusable("it is no stored network")
    digest = stream.read(_DIGEST)
    length = int.from_bytes(stream.read(_LENGTH), "little")
    left -= len(MAGIC) + _DIGEST + _LENGTH + length
    if left < 0:
        raise Unusable("it is cut off")
    text = stream.read(length)
    if hashlib.sha256(text).digest() != digest:
        raise Unusable("its structure is damaged")
    try:
        found = json.loads(text)
        if sum(_nbytes(entry) for entry in found["constants"].values()) != left:
            raise Unusable("it is cut off, or something follows it")
        constants = {key: _read_constant(stream, key, entry) for key, entry in found["constants"].items()}
        return Stored(_model(found, constants), found["extra"], digest.hex())
    except (AttributeError, GraphError, IndexError, KeyError, TypeError, ValueError) as error:
        raise Unusable(f"its structure is of another version ({type(error).__name__}: {error})") from error


def _structure(model: LoadedModel, memory: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    graph = model.graph
    return {
        "input_names": model.input_names,
        "input_shapes": model.input_shapes,
        "output_names": model.output_names,
        "output_shapes": model.output_shapes,
        "dtype": _name(model.dtype),
        "inputs": graph.inputs,
        "outputs": graph.outputs,
        "nodes": [_encode_node(node) for node in graph],
        "constants": {
            key: {
                "dtype": _name(value.dtype),
                "shape": list(value.shape),
                "stride": value.stride(),
                "span": memory[key].numel(),
                "sha256": hashlib.sha256(_bytes(memory[key])).hexdigest(),
            }
            for key, value in graph.constants.items()
        },
    }


def _model(found: Mapping[str, Any], constants: Mapping[str, torch.Tensor]) -> LoadedModel:
    graph = Graph(
        nodes=tuple(_decode_node(node) for node in found["nodes"]),
        inputs=tuple(found["inputs"]),
        outputs=tuple(found["outputs"]),
        constants=constants,
    )
    return LoadedModel(
        graph=check(graph),
        input_names=tuple(found["input_names"]),
        input_shapes=tuple(tuple(shape) for shape in found["input_shapes"]),
        output_names=tuple(found["output_names"]),
        output_shapes=tuple(tuple(shape) for shape in found["output_shapes"]),
        dtype=_torch_value(torch.dtype, found["dtype"]),
    )


def _memory(key: str, value: torch.Tensor) -> torch.Tensor:
    """The stretch of memory that `value` spans, gaps included, as a tensor of one axis.

    Strides are kept because kernels, and with them the last bits of sums, depend on them.
    """
    plain = value.layout is torch.strided and value.device.type == "cpu" and not value.is_quantized
    if not plain or value.is_conj() or value.is_neg():
        raise Unstorable(f"the constant {key} is no plain tensor")
    return value.detach().as_strided((_span(value.shape, value.stride()),), (1,))


def _span(shape: Any, stride: Any) -> int:
    """Number of elements from the first to the last one of a strided tensor."""
    if 0 in shape:
        return 0
    return 1 + sum((extent - 1) * step for extent, step in zip(shape, stride, strict=True))


def _bytes(span: torch.Tensor) -> memoryview:
    """Memory of a contiguous tensor of one axis, writable."""
    array: Any = span.view(torch.uint8).numpy()
    return memoryview(array)


def _nbytes(entry: Mapping[str, Any]) -> int:
    return int(entry["span"]) * _torch_value(torch.dtype, entry["dtype"]).itemsize


def _read_constant(stream: BinaryIO, key: str, entry: Mapping[str, Any]) -> torch.Tensor:
    """One constant, in memory of its own."""
    shape, stride = entry["shape"], entry["stride"]
    if min([*shape, *stride], default=0) < 0 or entry["span"] != _span(shape, stride):
        raise Unusable(f"the constant {key} has another size than its shape")
    span = torch.empty(entry["span"], dtype=_torch_value(torch.dtype, entry["dtype"]))
    buffer = _bytes(span)
    if stream.readinto(buffer) != len(buffer) or hashlib.sha256(buffer).hexdigest() != entry["sha256"]:  # type: ignore[attr-defined]
        raise Unusable(f"the constant {key} is damaged")
    return span.as_strided(shape, stride)


def _encode_node(node: Node) -> list[Any]:
    call = [
        _encode(node.args),
        {name: _encode(value) for name, value in node.kwargs.items()},
        {name: _encode(value) for name, value in node.attrs.items()},
    ]
    return [node.name, node.op, node.inputs, node.shape, *call, node.target, node.output]


def _decode_node(found: list[Any]) -> Node:
    name, op, inputs, shape, args, kwargs, attrs, target, output = found
    return Node(
        name=name,
        op=op,
        inputs=tuple(inputs),
        shape=tuple(shape),
        args=_decode(args),
        kwargs={key: _decode(value) for key, value in kwargs.items()},
        attrs={key: _decode(value) for key, value in attrs.items()},
        target=target,
        output=output,
    )


def _encode(value: Any) -> Any:
    """A value of a call: plain ones and tuples as JSON's own, others as an object with a single tag."""
    if value is None or type(value) in (bool, int, float, str):
        return value  # Python's JSON reads floats back bit for bit, -0.0 and infinities included
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if isinstance(value, list):
        return {"list": [_encode(item) for item in value]}
    if isinstance(value, Arg):
        return {"arg": value.index}
    if isinstance(value, Const):
        return {"const": value.key}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for tag, kind in _TORCH_VALUES.items():
        if isinstance(value, kind):
            return {tag: _name(value)}
    raise Unstorable(f"a call has an argument of type {type(value).__name__}")


def _decode(found: Any) -> Any:
    if isinstance(found, list):
        return tuple(_decode(item) for item in found)
    if not isinstance(found, dict):
        return found
    ((tag, value),) = found.items()
    if tag == "list":
        return [_decode(item) for item in value]
    if tag == "arg":
        return Arg(value)
    if tag == "const":
        return Const(value)
    if tag == "device":
        return torch.device(value)
    return _torch_value(_TORCH_VALUES[tag], value)


def _name(value: Any) -> str:
    """`float32` for torch.float32."""
    return str(value).removeprefix("torch.")


def _torch_value(kind: type, name: str) -> Any:
    value = getattr(torch, name)
    if not isinstance(value, kind):
        raise ValueError(f"{name} is no {kind.__name__}")
    return value
