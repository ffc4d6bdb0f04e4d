"""The network as a value: an immutable list of nodes in topological order.

Every node stands for one tensor of *one example*, its leading 1 included; the engine adds its own
leading domain axis B (and row axis R for coefficients), so no part of the program ever guesses
which axis is the batch. Constants (weights) live beside the nodes in `Graph.constants`, by key,
so that they can be sharded without touching the nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Arg:
    """Placeholder in `Node.args`: the value of `Node.inputs[index]`."""

    index: int


@dataclass(frozen=True)
class Const:
    """Placeholder in `Node.args` (or a value in `Node.attrs`): the constant `Graph.constants[key]`."""

    key: str


@dataclass(frozen=True)
class Node:
    """One tensor of the network and the call that computes it.

    Attributes:
        name: unique name, close to the ONNX or ATen name.
        op: what computes it. `input`; canonical hot ops `linear`, `conv`; canonical nonlinearities
            `relu`, `leaky_relu`; else the bare ATen name (`view`, `cat`, `mul`, `sigmoid`, ...),
            which is then called with `args` and `kwargs`.
        inputs: names of the nodes that it reads. A node that is read twice by one call may be named
            twice.
        shape: shape of one example.
        args, kwargs: template of the ATen call for nodes that are not canonical: nested tuples with
            `Arg` and `Const` in place of tensors. Empty for canonical nodes.
        attrs: static attributes of canonical nodes (see below).
        target: full ATen overload, e.g. `aten.view.default`; empty for canonical nodes.
        output: which result of a call with several results this node is, else None.

    Canonical nodes:
        `linear`: y[..., o] = sum_i x[..., i] weight[o, i] + bias[o];
            attrs `weight: Const` (O, I), `bias: Const | None` (O,).
        `conv`: `torch.ops.aten.convolution`; attrs `weight: Const`, `bias: Const | None`, `stride`,
            `padding`, `dilation`, `transposed`, `output_padding`, `groups` (tuples over the
            spatial axes, bool, tuple, int). Input (1, C, *spatial).
        `relu`; `leaky_relu`: attr `negative_slope: float`.

    An affine node that stands for several calls has the attr `fused`: by how many roundings the network's own
    computation of them exceeds that of the node, and the largest sum of magnitudes that its constant part
    adds up. One whose coefficients are all 0, 1 or -1, and whose constants float32 holds, has the attr
    `unit`.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    shape: tuple[int, ...]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    attrs: Mapping[str, Any] = field(default_factory=dict)
    target: str = ""
    output: int | None = None

    @property
    def size(self) -> int:
        """Number of neurons."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def fused(self) -> tuple[int, float]:
        """The attr `fused`; nothing where the node stands for its own call only."""
        count, magnitude = self.attrs.get("fused", (0, 0.0))
        return int(count), float(magnitude)

    @property
    def unit(self) -> bool:
        """Whether all coefficients are 0, 1 or -1 and all constants exact in float32."""
        return bool(self.attrs.get("unit", False))

    def constants(self) -> tuple[str, ...]:
        """Keys of the constants that this node reads, in order, without repetition."""
        found: dict[str, None] = {}
        stack: list[Any] = [list(self.attrs.values()), list(self.kwargs.values()), self.args]
        while stack:
            item = stack.pop()
            if isinstance(item, Const):
                found[item.key] = None
            elif isinstance(item, (tuple, list)):
                stack.extend(reversed(item))
        return tuple(found)


@dataclass(frozen=True)
class Graph:
    """Nodes in topological order, inputs and outputs by name, and the constants they read."""

    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: Mapping[str, torch.Tensor]

    def __post_init__(self) -> None:
        by_name = {node.name: node for node in self.nodes}
        readers: dict[str, list[str]] = {name: [] for name in by_name}
        for node in self.nodes:
            for source in dict.fromkeys(node.inputs):
                readers[source].append(node.name)
        object.__setattr__(self, "_by_name", by_name)
        object.__setattr__(self, "_readers", {k: tuple(v) for k, v in readers.items()})

    def __getitem__(self, name: str) -> Node:
        return self._by_name[name]  # type: ignore[attr-defined]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    def readers(self, name: str) -> tuple[str, ...]:
        """Names of the nodes that read `name`, each once, in topological order."""
        return self._readers[name]  # type: ignore[attr-defined]

    @property
    def input_size(self) -> int:
        """Number of input variables over all inputs (X_0 ... in declaration and C order)."""
        return sum(self[name].size for name in self.inputs)

    @property
    def output_size(self) -> int:
        """Number of output variables over all outputs (Y_0 ...)."""
        return sum(self[name].size for name in self.outputs)
