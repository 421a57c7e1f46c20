"""The cross entropy of rows of logits and its gradient, in place of the logits, by one Triton kernel. For GPUs.

    loss_n = logsumexp_v(z_nv) - z_n,y_n,    dz_nv = exp(z_nv - logsumexp_v(z_nv)) - [v = y_n]              (1)

N rows, V words, C columns: V and padding, which makes rows start where the memory can be read in whole pieces.

A program has one row and reads it twice. In the first pass each thread keeps the maximum of its numbers and the sum of
their exponentials, so that threads wait for each other only once, at the end. The second pass goes backwards, because
what was read last is still in the cache, and writes (1) over the logits. All arithmetic is float32. Each number is
written by the thread that reads it: equal inputs give equal bits. This file is imported where Triton is installed.
"""

import torch
import triton
import triton.language as tl

# Numbers of a row that a program has at a time, and those of a thread: 16 bytes in half precision.
BLOCK = 8192
VECTOR = 8

# The start of a running maximum. With minus infinity the first difference would not be a number.
LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def loss_kernel(
    z, labels, losses, words, columns, ignore_index,
    WRITE: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Equation (1) for one row. `WRITE` says whether the gradient is written."""
    row = tl.program_id(0).to(tl.int64)  # rows times columns may exceed 2^31
    z += row * columns
    label = tl.load(labels + row)
    at = tl.arange(0, BLOCK // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    if label == ignore_index:
        tl.store(losses + row, 0.0)
        if WRITE:
            for start in range(0, columns, BLOCK):
                tl.store(z + start + at, tl.zeros_like(at).to(z.dtype.element_ty), mask=start + at < columns)
        return
    inside = (label >= 0) & (label < words)
    own = tl.load(z + label, mask=inside, other=float("nan")).to(tl.float32)
    top = tl.full((BLOCK // VECTOR,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK // VECTOR,), tl.float32)
    for start in range(0, columns, BLOCK):
        x = tl.load(z + start + at, mask=start + at < columns, other=0.0, eviction_policy="evict_last")
        x = tl.where(start + at < words, x.to(tl.float32), float("-inf"))
        higher = tl.maximum(top, tl.max(x, 1))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher[:, None]), 1)
        top = higher
    highest = tl.max(top, 0)
    total = tl.sum(total * tl.exp(top - highest), 0)
    tl.store(losses + row, tl.log(total) + highest - own)
    if WRITE:
        tl.debug_barrier()  # no thread may write before all have read `own`
        scale = 1 / total
        blocks = (columns + BLOCK - 1) // BLOCK
        for i in range(0, blocks):
            place = (blocks - 1 - i) * BLOCK + at
            x = tl.load(z + place, mask=place < columns, other=0.0, eviction_policy="evict_first")
            p = tl.where(place < words, tl.exp(x.to(tl.float32) - highest) * scale, 0.0)
            p = tl.where(place == label, p - 1, p)
            tl.store(z + place, p.to(z.dtype.element_ty), mask=place < columns)


def fill_by_kernel(z: torch.Tensor, words: int, labels, losses, ignore_index: int, write: bool):
    """`loss.fill_by_pytorch` of contiguous logits and labels, float32 `losses`; NaN for a label outside [0, words)."""
    block = min(BLOCK, max(32 * VECTOR, triton.next_power_of_2(z.shape[1])))
    with torch.cuda.device_of(z):
        loss_kernel[len(z),](
            z, labels, losses, words, z.shape[1], ignore_index,
            WRITE=write, BLOCK=block, VECTOR=VECTOR, num_warps=block // (32 * VECTOR),
        )  # fmt: skip
