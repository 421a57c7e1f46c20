"""Toeplitz operators along the rows and the columns of an image (the 2-D models of the Long Range Arena code of TNN).

    y = C(R(v)) + R(C(v)) = 2 C(R(v)),    (R v)_{a,b} = sum_c r_{b-c} v_{a,c},    (C v)_{a,b} = sum_c k_{a-c} v_{c,b}

B batch, S side of the image, L = S^2 tokens in row-major order, D channels. R and C are linear and act on different
axes, so they commute, and one order is enough. The kernels along the two axes are two operators of one variant.
"""

import math

import torch

from .gating import Gating
from .tno import ToeplitzOperator


class GridOperator(ToeplitzOperator):
    """Two operators as one on a square image; bidirectional only.

    Args:
        rows: the operator along each row, for sequences of S positions.
        columns: the operator along each column.
    """

    def __init__(self, config, layer_idx: int, rows: ToeplitzOperator, columns: ToeplitzOperator):
        super().__init__(config, layer_idx)
        self.rows, self.columns = rows, columns

    def coefficients(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        """Not defined: the matrix of an image is Toeplitz in blocks.

        Raises:
            ValueError: always; `rows` and `columns` have coefficients.
        """
        raise ValueError("num_axes=2 has no coefficients of its own: ask the operators `rows` and `columns`.")

    def mix(self, v: torch.Tensor, gating: Gating | None = None) -> torch.Tensor:
        """`(B, S^2, D)` to `(B, S^2, D)`.

        Raises:
            ValueError: the number of tokens is not a square.
        """
        side = image_side(v.shape[1])
        image = (v if gating is None else gating.open(v)).unflatten(1, (side, side))  # (B, S, S, D)
        mixed = along_last_axis(self.rows, image)
        mixed = 2 * along_last_axis(self.columns, mixed.transpose(1, 2)).transpose(1, 2).flatten(1, 2)
        return mixed if gating is None else gating.close(mixed, self.product)

    def dense(self, length: int) -> torch.Tensor:
        side = image_side(length)
        rows, columns = self.rows.dense(side), self.columns.dense(side)  # (D, S, S) each
        return 2 * torch.einsum("dac,dbe->dabce", columns, rows).reshape(-1, length, length)


def along_last_axis(operator: ToeplitzOperator, image: torch.Tensor) -> torch.Tensor:
    """`operator` along the last but one dimension of `(B, S, S, D)`, the last axis of the image."""
    return operator(image.flatten(0, 1)).unflatten(0, image.shape[:2])


def image_side(length: int) -> int:
    """S for S^2 tokens.

    Raises:
        ValueError: `length` is not a square.
    """
    side = math.isqrt(length)
    if side**2 != length:
        raise ValueError(f"A sequence of {length} tokens is not possible with num_axes=2: it must be a square image.")
    return side
