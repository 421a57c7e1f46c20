"""Mix the outer products of keys and values by one filter for each head, and read the result by queries.

    z_i = sum_j t_{i-j} k_j v_j^T,    y_i = z_i^T q_i                                                        (1)
    y   = ((q k^T) o T) v,            T_ij = t_{i-j},  o entry by entry                                      (2)

B batch, L length, D channels in H heads of N, G filters (H, or each for several neighbouring heads), K taps.

This is the inside of MultiHyena (Massaroli et al., "Laughing Hyena Distillery", NeurIPS 2023, section 4; RTF paper,
section 4.4). (1) is the product of an operator with N^2 sequences for each head, O(N^2 L log L), and decoding has N
times the state of D channels. It serves every operator, and is the oracle of (2), which takes O(N L^2) for a head.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from .numerics import by_parts, compute_dtype, is_exported, is_fused
from .packing import Batches
from .tno import Kernel, ToeplitzOperator, gated_matmul, is_convolution, kernel_arguments
from .toeplitz import causal_toeplitz_matmul, fit_lags, toeplitz_matmul
from .toeplitz_fused import NO_GATE, groups_as_rows, is_response, rows_as_groups

# (2) is faster up to this many positions for each of the N^2 entries of a head (measured on a CPU, N from 4 to 32).
LONGEST_MASK = 2


class OuterProduct(NamedTuple):
    """Equation (1) around an operator, in the place of a `Gate`. It reads keys and values, `(B, L, 2D)`."""

    size: int  # N
    u: torch.Tensor | None = None  # (B, L, D), the queries
    mask: torch.Tensor | None = None  # (B, L), False at padding; None if there is none

    is_elementwise = False

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """`(B, L, D)` as `(H, N, B, L)`."""
        return x.permute(2, 0, 1).unflatten(0, (-1, self.size))

    def keys_and_values(self, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Keys and values, zero at padding, `(H, N, B, L)` each."""
        v = v if self.mask is None else v.masked_fill(~self.mask[..., None], 0)
        return tuple(map(self.heads, v.chunk(2, dim=-1)))

    def inputs(self, v: torch.Tensor) -> torch.Tensor:
        """The inputs of the operator, `(B, L, HN^2)`."""
        return outer(*self.keys_and_values(v)).permute(1, 2, 0)

    def apply(self, mixed: torch.Tensor, implementation: str) -> torch.Tensor:
        """The outputs `(B, L, D)` from those of the operator, `(B, L, HN^2)`."""
        return mixed if self.u is None else read(mixed.permute(2, 0, 1), self.heads(self.u)).permute(1, 2, 0)

    def of_documents(self, multiply: Callable, batches: Batches, v: torch.Tensor, implementation: str) -> torch.Tensor:
        """As for `Gate`. The queries go into the documents with `v`."""

        def product(x: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
            u, v = x.tensor_split([self.u.shape[2]], dim=2)
            return multiply(v, self._replace(u=u, mask=real))

        return batches.map_documents(product, torch.cat([self.u, v], dim=2))

    def matmul(self, operator: ToeplitzOperator, v: torch.Tensor, kernel: Kernel | None) -> torch.Tensor:
        """The product `(B, L, D)`, by the faster form."""
        if not is_convolution(operator) or is_exported():
            return self.apply(gated_matmul(operator, self.inputs(v), NO_GATE, kernel), operator.implementation)
        if kernel is None or is_response(kernel):
            kernel = operator.kernel_of(*kernel_arguments(operator, v, as_taps=True))
        parts = self.heads(self.u), *self.keys_and_values(v)
        short = is_fused(operator.implementation) and v.shape[1] <= LONGEST_MASK * self.size**2
        form = masked_product if short else partial(convolved_product, implementation=operator.implementation)
        heads = len(parts[0]) // len(kernel)  # of a filter

        def of_filters(chosen: slice) -> torch.Tensor:  # (C, B, L)
            start, stop, _ = chosen.indices(len(kernel))
            some = (part[start * heads : stop * heads] for part in parts)
            return form(*some, kernel[start:stop], operator.causal).unflatten(0, (stop - start, -1))

        width = v.numel() // v.shape[2] * heads * self.size**2
        return by_parts(of_filters, len(kernel), width, v).flatten(0, 1).to(v.dtype).permute(1, 2, 0)


def outer(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """k v^T, `(HN^2, B, L)`, of `(H, N, B, L)` each."""
    return (keys[:, :, None] * values[:, None]).flatten(0, 2)


def read(mixed: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """z^T q, `(D, B, L)`, of `(HN^2, B, L)` and `(H, N, B, L)`."""
    size = queries.shape[1]
    return (mixed.unflatten(0, (-1, size, size)) * queries[:, :, None]).sum(1).flatten(0, 1)


def convolved_product(queries, keys, values, kernel, causal: bool, implementation: str = "eager") -> torch.Tensor:
    """The outputs `(D, B, L)` by equation (1), for heads `(H, N, B, L)` and taps `(G, K)` or `(G, 2K - 1)`."""
    products = outer(keys, values)  # (HN^2, B, L)
    size = len(products) // len(kernel)
    multiply = causal_toeplitz_matmul if causal else toeplitz_matmul
    rows = groups_as_rows(products.permute(1, 2, 0), size)  # (nB, L, G)
    mixed = rows_as_groups(multiply(rows, kernel, implementation), size)  # (B, L, HN^2)
    return read(mixed.permute(2, 0, 1), queries)


def masked_product(queries, keys, values, kernel, causal: bool) -> torch.Tensor:
    """The outputs of `convolved_product`, by equation (2)."""
    dtype, length = compute_dtype(torch.promote_types(values.dtype, kernel.dtype)), values.shape[-1]
    q, k, v = (x.permute(0, 2, 3, 1).to(dtype) for x in (queries, keys, values))  # (H, B, L, N)
    # As `dense_toeplitz`, with fast gradients.
    lags = kernel.to(dtype)
    lags = pad(lags, (length - 1, length - lags.shape[1])) if causal else fit_lags(lags, length)  # (G, 2L-1)
    matrices = lags.flip(1).unfold(1, length, 1).flip(1)  # (G, L, L)
    scores = (q @ k.mT).unflatten(0, (len(kernel), -1)) * matrices[:, None, None]  # (G, H/G, B, L, L)
    return (scores.flatten(0, 1) @ v).permute(0, 3, 1, 2).flatten(0, 1)
