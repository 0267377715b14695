"""The Muon optimizer, in float32 and for many matrices at once.

A small language model needs fewer steps with Muon than with Adam. torch.optim.Muon orthogonalises in bfloat16 and one
matrix at a time: on a CPU without bfloat16 instructions that takes 7 s a step for the tiny target, whose forward and
backward passes take 1.3 s. Stacking matrices of one shape and staying in float32 takes 0.2 s.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return [N, R, C] matrices with their singular values pushed towards 1, by five Newton-Schulz steps."""
    if matrices.shape[1] > matrices.shape[2]:
        return orthogonalize(matrices.mT).mT
    matrices = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = matrices @ matrices.mT
        matrices = 3.4445 * matrices + (2.0315 * gram @ gram - 4.7750 * gram) @ matrices
    return matrices


class Muon(torch.optim.Optimizer):
    """Nesterov momentum whose update is orthogonalised, so that every direction of a matrix learns at the same rate.

    Only for matrices: embeddings and norms need another optimizer.
    """

    def __init__(self, matrices: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for matrix in matrices:
            by_shape.setdefault(matrix.shape, []).append(matrix)
        super().__init__([{"params": group} for group in by_shape.values()], {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update the matrices from their gradients."""
        for group in self.param_groups:
            matrices, momentum = group["params"], group["momentum"]
            gradients = torch.stack([matrix.grad for matrix in matrices])
            average = group.setdefault("average", torch.zeros_like(gradients)).lerp_(gradients, 1 - momentum)
            updates = orthogonalize(gradients.lerp(average, momentum))
            rows, columns = updates.shape[1:]
            for matrix, update in zip(matrices, updates, strict=True):
                matrix.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)
