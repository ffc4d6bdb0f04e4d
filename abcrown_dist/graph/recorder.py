"""The dispatch mode that records every ATen call which depends on an input.

In-place calls are recorded as their plain variants. A write that changes an alias in a way that
cannot be expressed is refused as soon as that alias is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from abcrown_dist.graph.execute import resolve_target
from abcrown_dist.graph.ir import Arg, Const, Node
from abcrown_dist.util.errors import LoadError

# The values of their results do not depend on the values of their operands.
_SHAPE_ONLY = frozenset(
    {"zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty"}
)


@dataclass
class _Storage:
    """Memory that holds values which depend on an input.

    Attributes:
        version: number of writes so far.
        written: the tensor that the last write went through.
        op: name of the op that wrote.
    """

    version: int = 0
    written: torch.Tensor | None = None
    op: str = ""


@dataclass(frozen=True)
class _Tracked:
    """A tensor that depends on an input: its node, as of `version` writes to its storage."""

    tensor: torch.Tensor
    name: str
    version: int


class Constants:
    """The constants read so far, each storage and geometry once."""

    def __init__(self, module: torch.nn.Module) -> None:
        named = [*module.named_parameters(), *module.named_buffers()]
        self._names = {_memory(tensor): name for name, tensor in named}
        self._keys: dict[tuple[Any, ...], str] = {}
        self._read: set[int] = set()
        self._overwritten: dict[int, str] = {}
        self.values: dict[str, torch.Tensor] = {}

    def key(self, tensor: torch.Tensor) -> str:
        """Key of `tensor`, registering it on first sight."""
        identity = (_memory(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and identity in self._keys:
            return self._keys[identity]
        key = unique_name(self._names.get(_memory(tensor), "constant"), self.values)
        self._keys[identity] = key
        self.values[key] = tensor.detach()
        self._read.add(_memory(tensor))
        return key

    def note_write(self, tensor: torch.Tensor, op: str) -> None:
        """Remember that `op` writes to `tensor`, when that matters: after it was read."""
        if _memory(tensor) in self._read:
            self._overwritten[_memory(tensor)] = op

    def finish(self, used: set[str]) -> dict[str, torch.Tensor]:
        """The constants in `used`.

        Raises:
            LoadError: when one of them was overwritten after it had been read.
        """
        for key in used:
            op = self._overwritten.get(_memory(self.values[key]))
            if op is not None:
                raise LoadError(f"{op} overwrites the constant {key} in place after it was read")
        return {key: value for key, value in self.values.items() if key in used}


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def unique_name(wanted: str, taken: Mapping[str, Any]) -> str:
    name, count = wanted, 1
    while name in taken:
        name, count = f"{wanted}.{count}", count + 1
    return name


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def _written(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    """The tensors that an in-place call writes to."""
    found: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found.extend(tensors_in(value))
    return found


class Recorder(TorchDispatchMode):
    """Records the calls that depend on an input as nodes."""

    def __init__(self, constants: Constants) -> None:
        super().__init__()
        self.nodes: dict[str, Node] = {}
        self.scopes: list[str] = []
        self._constants = constants
        self._tracked: dict[int, _Tracked] = {}
        self._storages: dict[int, _Storage] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: without its wrapper, which would import torch._dynamo (over a second) at the first call."""
        return False

    def add_input(self, tensor: torch.Tensor, name: str) -> None:
        """Make `tensor` the input `name`."""
        self.nodes[name] = Node(name, "input", (), tuple(tensor.shape))
        self._track(tensor, name)

    def node_of(self, tensor: torch.Tensor) -> str | None:
        """Name of the node that holds the present value of `tensor`, or None when it is constant.

        Raises:
            LoadError: when the value depends on an input in a way that was not recorded.
        """
        tracked = self._tracked.get(id(tensor))
        storage = self._storages.get(_memory(tensor)) if tensor.numel() else None
        if tracked is None or storage is None:
            if storage is not None and tracked is None:
                raise LoadError(self._untracked(storage))
            return None if tracked is None else tracked.name
        if tracked.version == storage.version:
            return tracked.name
        return self._rewritten_alias(tensor, storage)

    def _untracked(self, storage: _Storage) -> str:
        if storage.version:
            return f"{self.place()}reads a tensor that {storage.op} changed through another view of it"
        return f"{self.place()}reads a value of the input's path that left PyTorch (as by .numpy())"

    def _rewritten_alias(self, tensor: torch.Tensor, storage: _Storage) -> str:
        """Node for a tensor overwritten through an alias of the same memory in the same order."""
        source = storage.written
        same = source is not None and tensor.is_contiguous() and source.is_contiguous()
        if source is None or not same or not _same_range(tensor, source):
            raise LoadError(
                f"{self.place()}reads a tensor that {storage.op} changed in place through a view; "
                "rewrite the model without that in-place write"
            )
        origin = self._tracked[id(source)].name
        shape = tuple(tensor.shape)
        view = Node("", "view", (origin,), shape, (Arg(0), shape), target="aten.view.default")
        name = self._append("view", view)
        self._track(tensor, name)
        return name

    def place(self) -> str:
        """Prefix for messages: where in the model the capture is."""
        return f"{self.scopes[-1]}: " if self.scopes and self.scopes[-1] else ""

    def _track(self, tensor: torch.Tensor, name: str) -> None:
        version = 0
        if tensor.numel():
            version = self._storages.setdefault(_memory(tensor), _Storage()).version
        self._tracked[id(tensor)] = _Tracked(tensor, name, version)

    def _append(self, op: str, node: Node) -> str:
        scope = self.scopes[-1] if self.scopes else ""
        name = unique_name(f"{scope}/{op}" if scope else op, self.nodes)
        self.nodes[name] = replace(node, name=name)
        return name

    def _template(self, value: Any, inputs: list[str]) -> Any:
        """`value` with placeholders for its tensors; appends the nodes that it reads to `inputs`."""
        if isinstance(value, torch.Tensor):
            name = self.node_of(value)
            if name is None:
                return Const(self._constants.key(value))
            inputs.append(name)
            return Arg(len(inputs) - 1)
        if isinstance(value, (tuple, list)):
            return tuple(self._template(item, inputs) for item in value)
        return value

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if not any(self.node_of(tensor) is not None for tensor in tensors_in([args, kwargs])):
            if func._schema.is_mutable:
                for tensor in _written(func, args, kwargs):
                    self._constants.note_write(tensor, name)
            return func(*args, **kwargs)
        if name in _SHAPE_ONLY:
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return self._write(func, name, args, kwargs)
        inputs: list[str] = []
        templates = self._template(args, inputs), {k: self._template(v, inputs) for k, v in kwargs.items()}
        result = func(*args, **kwargs)
        self._record(name, str(func), inputs, templates, result)
        return result

    def _record(
        self, op: str, target: str, inputs: list[str], templates: tuple[Any, dict[str, Any]], result: Any
    ) -> None:
        if isinstance(result, torch.Tensor):
            results, several = [result], False
        elif isinstance(result, (tuple, list)):
            results, several = list(result), True
        else:
            raise LoadError(
                f"{self.place()}{op} turns a value that depends on the input into a Python number; "
                "control flow that depends on the input is not supported"
            )
        for index, tensor in enumerate(results):
            if isinstance(tensor, torch.Tensor):
                output = index if several else None
                node = Node(
                    "", op, tuple(inputs), tuple(tensor.shape), *templates, target=target, output=output
                )
                self._track(tensor, self._append(op, node))

    def _write(
        self, func: torch._ops.OpOverload, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Record an in-place call as its plain variant and note who can no longer be trusted."""
        written = _written(func, args, kwargs)
        plain = name.removesuffix("_")
        if len(written) != 1 or plain == name or written[0] is not args[0]:
            raise LoadError(f"{self.place()}the in-place call {func} is not supported")
        target = written[0]
        inputs: list[str] = []
        if plain == "copy":
            templates = self._copy(target, args[1], inputs)
            plain, overload = "expand", "aten.expand.default"
        else:
            # The plain variant must read what was there before the write.
            before = target if self.node_of(target) is not None else target.clone()
            templates = (
                self._template((before, *args[1:]), inputs),
                {key: self._template(value, inputs) for key, value in kwargs.items()},
            )
            overload = f"aten.{plain}.{func._overloadname}"
            self._require(overload, func)
        result = func(*args, **kwargs)
        self._constants.note_write(target, name)
        storage = self._storages.setdefault(_memory(target), _Storage())
        storage.version, storage.written, storage.op = storage.version + 1, target, name
        node = Node("", plain, tuple(inputs), tuple(target.shape), *templates, target=overload)
        self._track(target, self._append(plain, node))
        return result

    def _copy(
        self, target: torch.Tensor, source: torch.Tensor, inputs: list[str]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if source.dtype != target.dtype:
            raise LoadError(f"{self.place()}copy_ from {source.dtype} to {target.dtype} is not supported")
        return (self._template(source, inputs), tuple(target.shape)), {}

    def _require(self, overload: str, func: torch._ops.OpOverload) -> None:
        try:
            resolve_target(overload)
        except AttributeError:
            raise LoadError(f"{self.place()}the in-place call {func} has no plain variant") from None

    def output(self, tensor: torch.Tensor) -> str:
        """Node of an output. A constant one becomes an affine function of the first input variable
        with slope zero, so that every node of a graph depends on an input."""
        name = self.node_of(tensor)
        if name is not None:
            return name
        values = tensor.detach().reshape(-1)
        if not values.is_floating_point():
            values = values.to(torch.get_default_dtype())
        source = next(node for node in self.nodes.values() if node.op == "input")
        size, count, shape = source.size, tensor.numel(), tuple(tensor.shape)
        flat = Node("", "view", (source.name,), (size,), (Arg(0), (size,)), target="aten.reshape.default")
        name = self._append("flat", flat)
        first = Node("", "slice", (name,), (1,), (Arg(0), 0, 0, 1), target="aten.slice.Tensor")
        name = self._append("first", first)
        weight = self._constants.key(values.new_zeros(count, 1))
        attrs = {"weight": Const(weight), "bias": Const(self._constants.key(values))}
        name = self._append("constant", Node("", "linear", (name,), (count,), attrs=attrs))
        view = Node("", "view", (name,), shape, (Arg(0), shape), target="aten.reshape.default")
        return self._append("output", view)


def _same_range(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(a.storage_offset() == b.storage_offset() and a.numel() == b.numel() and a.dtype == b.dtype)
