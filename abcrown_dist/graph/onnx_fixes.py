"""Rewrites of an ONNX model that keep onnx2pytorch 0.6 from misreading it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx


def convertible_copy(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy that onnx2pytorch converts rightly (and that it may change: it drops nodes it fuses)."""
    copy = type(model)()
    copy.CopyFrom(model)
    _keep_matrix_products(copy)
    return copy


def _keep_matrix_products(model: onnx.ModelProto) -> None:
    """Hide from onnx2pytorch those initialisers of MatMul that are no weight (I, O) on the right.

    It makes a dense layer of every MatMul that has an initialiser, also when that stands on the left
    or has more than two axes; behind a Constant node the product stays a product.
    """
    import onnx

    initial = {tensor.name: tensor for tensor in model.graph.initializer}
    constants: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if node.op_type != "MatMul":
            continue
        for side, name in enumerate(node.input):
            if name in initial and (side == 0 or len(initial[name].dims) != 2):
                node.input[side] = f"{name}::constant::{len(constants)}"
                value = onnx.helper.make_node("Constant", [], [node.input[side]], value=initial[name])
                constants.append(value)
    nodes = [*constants, *model.graph.node]
    if constants:
        del model.graph.node[:]
        model.graph.node.extend(nodes)
