"""Adam on plain tensors that hold no autograd graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adam import adam


class Adam:
    """Ascent by the rule of Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015.

    The same numbers as `torch.optim.Adam(fused=True, maximize=True)`, through its functional form:
    making an object of that class imports torch._dynamo, which takes longer than most proofs.

    Args:
        parameters: changed in place by every step.
        lr: step size; the attribute of this name may be changed between steps.
    """

    def __init__(self, parameters: Sequence[Tensor], lr: float) -> None:
        self.parameters, self.lr = list(parameters), lr
        self._means = [torch.zeros_like(p) for p in self.parameters]
        self._squares = [torch.zeros_like(p) for p in self.parameters]
        self._steps = [torch.zeros((), device=p.device) for p in self.parameters]

    def step(self, gradients: Sequence[Tensor]) -> None:
        """Move each parameter uphill along its gradient.

        The fused kernel walks raw memory: each gradient must have the strides of its parameter.
        """
        adam(
            self.parameters, list(gradients), self._means, self._squares, [], self._steps,
            fused=True, amsgrad=False, maximize=True,
            beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, lr=self.lr,
        )  # fmt: skip
