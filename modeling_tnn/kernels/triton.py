"""Gated convolution along a sequence with short filters, by products of small matrices in Triton. For GPUs.

    h = act(u) * (k * (mask act(v)))[first .. first + L - 1]          (without a gate: act(x) = x, act(u) = 1)

B batch, L length, D channels, K taps, R rows of a tile, C columns: blocks of R positions, of all sequences.

Forward. Each sequence is cut into blocks of R entries, and the blocks are the columns of a matrix X `(R, C)`. Block c
of the result is the sum over j of T_j times block c - j, where T_j is a Toeplitz tile of the lags around j R:

    T_j[r, s] = k[first + j R + r - s],    Y[:, c] = sum_j T_j X[:, c - j]                                  (1)

A program makes the tiles of one channel from its taps, one after the other, and multiplies each with many columns on
the tensor cores, by about 2 (K + R) operations for an entry.

Backward. The gradient of the inputs is (1) with the taps in reverse. The gradient of the taps adds products of blocks
of g, the gradient of the result, with windows of x: the W > R entries from position c R - j R on, `X_j` `(W, C)`:

    D_j[r, s] = sum_c G[r, c] X_j[s, c],    dk[first + j R + r - s] = sum of D_j along its diagonals         (2)

A program has one channel and one window, walks all columns, and adds along the diagonals once at the end. It has the
whole of W - R + 1 lags, and parts of R - 1 lags on either side: there are two sums for a tap, which are added later.

Operands have the dtype of `v`, sums are float32 (of float32 operands by three products in TF32). Nothing is added by
atomic operations: equal inputs give equal bits. The programs of one channel are neighbours, so that it is read from
memory once. Higher derivatives: `toeplitz_fused.eager_windows`. This file is imported where Triton is installed.
"""

from collections.abc import Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from torch import nn
from transformers.activations import GELUActivation, LinearActivation, SiLUActivation

from ..toeplitz_fused import NO_GATE, Gate, differentiable_gradients, eager_windows, must_differentiate, windows_of
from .fallback import PRODUCTS, attempt

# Activations that the kernels have, by their classes.
FUNCTIONS = {nn.ReLU: "relu", nn.SiLU: "silu", SiLUActivation: "silu", GELUActivation: "gelu"}
FUNCTIONS |= dict.fromkeys((type(None), nn.Identity, LinearActivation), "none")

# Rows of a tile (128 were slower), and zeros around the taps of a channel, so that the loads of a tile need no test.
ROWS = 64
MARGIN = tl.constexpr(128)

# Warps and stages of the product by its columns, for operands of two bytes and of four. The last ones are for GPUs of
# the LARGE generations (Hopper, Blackwell of data centres). An H100 was fastest with 128 and 256 in bfloat16.
PRODUCT_SIZES = {2: {32: (4, 3), 64: (4, 3), 128: (4, 3), 256: (8, 3)}, 4: {32: (4, 3), 64: (4, 3)}}
LARGE = (9, 10)

# Columns at a time, entries of a window, warps and stages of the gradient of the taps, likewise.
TAP_SIZES = {2: (64, 128, 4, 3), 4: (16, 128, 4, 3)}

# Input precision of the tensor cores by bytes: four bytes as three products, with an error of float32.
PRECISION = {2: "tf32", 4: "tf32x3"}

# Channels and positions of a program of the pointwise kernel, and numbers of one of the padding kernel.
CHANNELS, NUMBERS, BLOCK = 32, 64, 1024


@triton.jit
def activated(x, ACT: tl.constexpr):
    """act(x)."""
    if ACT == "silu":
        x = x / (1 + tl.exp(-x))
    if ACT == "relu":
        x = tl.where(x < 0, 0.0, x)
    if ACT == "gelu":
        x = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    return x


@triton.jit
def slope(x, ACT: tl.constexpr):
    """The derivative of act at x."""
    if ACT == "silu":
        s = 1 / (1 + tl.exp(-x))
        x = s * (1 + x * (1 - s))
    elif ACT == "relu":
        x = tl.where(x > 0, 1.0, 0.0)
    elif ACT == "gelu":
        x = 0.5 * (1 + tl.erf(x * 0.7071067811865476)) + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    else:
        x = tl.full(x.shape, 1.0, tl.float32)
    return x


@triton.jit(do_not_specialize=["num_taps", "width"])
def padding_kernel(kernel, taps, kernel_d, kernel_k, num_taps, width, BLOCK: tl.constexpr):
    """`taps` of one channel: those of `kernel`, with zeros on both sides."""
    parts = tl.cdiv(width, BLOCK)
    d, at = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    tap = at - MARGIN
    value = tl.load(kernel + d * kernel_d + tap * kernel_k, mask=(tap >= 0) & (tap < num_taps), other=0.0)
    tl.store(taps + d * width + at, value.to(taps.dtype.element_ty), mask=at < width)


@triton.jit
def pointwise_kernel(
    v, mask, x, h, u, y, g, u_gradient, v_d, v_n, h_d, h_n, u_d, u_n, channels, numbers,
    ACT: tl.constexpr, CHANNELS: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """x = mask act(v), and from the gradient `h` of act(u) y those of y, `g`, and of u; each is left out if None."""
    parts = tl.cdiv(numbers, NUMBERS)
    d = (tl.program_id(0) // parts * CHANNELS + tl.arange(0, CHANNELS)).to(tl.int64)[:, None]
    n = (tl.program_id(0) % parts * NUMBERS + tl.arange(0, NUMBERS)).to(tl.int64)[None, :]
    keep, place = (d < channels) & (n < numbers), d * numbers + n
    if x is not None:
        inputs = activated(tl.load(v + d * v_d + n * v_n, mask=keep, other=0.0).to(tl.float32), ACT)
        if mask is not None:
            inputs = tl.where(tl.load(mask + n, mask=n < numbers, other=0) != 0, inputs, 0.0)
        tl.store(x + place, inputs.to(x.dtype.element_ty), mask=keep)
    if g is not None:
        gradient = tl.load(h + d * h_d + n * h_n, mask=keep, other=0.0).to(tl.float32)
        gate = tl.load(u + d * u_d + n * u_n, mask=keep, other=0.0).to(tl.float32)
        tl.store(g + place, (gradient * activated(gate, ACT)).to(g.dtype.element_ty), mask=keep)
        mixed = tl.load(y + place, mask=keep, other=0.0).to(tl.float32)
        of_gate = gradient * mixed * slope(gate, ACT)
        tl.store(u_gradient + place, of_gate.to(u_gradient.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["batch", "num_taps", "first"])
def product_kernel(
    x, taps, out, mask, side, mixed, x_d, taps_d, side_d, batch, length, num_taps, first,
    ACT: tl.constexpr, BACKWARD: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Equation (1) for one channel and some columns, times act(u), u = `side`.

    `BACKWARD` takes the taps in reverse, and `side` is the v at which act is differentiated.
    """
    blocks = tl.cdiv(length, ROWS)
    tl.assume((batch > 0) & (length > 0))  # without it the divisions take registers, and fewer programs run at once
    parts = tl.cdiv(batch * blocks, COLUMNS)
    d, begin = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts * COLUMNS
    column = begin + tl.arange(0, COLUMNS)
    block, b = column // batch, column % batch  # early blocks of all sequences come first
    row = tl.arange(0, ROWS)
    # Tiles outside the filter, or that meet no block of the sequences, are left out.
    lowest, highest = begin // batch, tl.minimum(blocks - 1, (begin + COLUMNS - 1) // batch)
    start = tl.maximum(-((first + ROWS - 1) // ROWS), lowest - (blocks - 1))
    stop = tl.minimum((num_taps - 1 - first + ROWS - 1) // ROWS, highest) + 1
    # A scalar pointer and small offsets: a pointer for each entry would take most registers.
    taps += d * taps_d + MARGIN + (num_taps - 1 - first if BACKWARD else first)
    x += d * x_d
    at = block[None, :] * ROWS + row[:, None]
    start_of_text = b[None, :] * length
    total = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for j in range(start, stop):
        lag = row[:, None] - row[None, :]
        tile = tl.load((taps - j * ROWS) - lag if BACKWARD else (taps + j * ROWS) + lag)
        source = at - j * ROWS
        entries = tl.load(x + (start_of_text + source), mask=(source >= 0) & (source < length), other=0.0)
        total = tl.dot(tile, entries, total, input_precision=PRECISION)
    keep, place = at < length, start_of_text + at
    row_of_channel = d * batch * length
    if mixed is not None:
        tl.store(mixed + row_of_channel + place, total.to(mixed.dtype.element_ty), mask=keep)
    if side is not None:
        s = tl.load(side + d * side_d + place, mask=keep, other=0.0).to(tl.float32)
        total = total * (slope(s, ACT) if BACKWARD else activated(s, ACT))
    if BACKWARD and mask is not None:
        total = tl.where(tl.load(mask + place, mask=keep, other=0) != 0, total, 0.0)
    tl.store(out + row_of_channel + place, total.to(out.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["batch", "windows", "lag", "tap"])
def tap_gradient_kernel(
    g, x, sums, g_d, x_d, batch, length, windows, lag, tap,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Equation (2) for one channel and window. Window 0 is `lag` blocks late, and has in its entry (0, 0) the `tap`.

    Each window writes W numbers to both rows of `sums` `(D, 2, windows W)`: the parts of the tap of its entry (0, 0)
    and of later ones, and those of the W taps before it. Negative taps are counted from the end of a row.
    """
    d, window = (tl.program_id(0) // windows).to(tl.int64), tl.program_id(0) % windows
    blocks, wide = tl.cdiv(length, ROWS), WINDOW // ROWS
    lag += window * wide
    row, entry = tl.arange(0, ROWS)[:, None], tl.arange(0, WINDOW)[None, :]
    g += d * g_d
    x += d * x_d
    # Early blocks of all sequences come first. Those whose window is outside the sequence are left out.
    start, stop = tl.maximum(lag - (wide - 1), 0) * batch, tl.minimum(blocks, blocks + lag) * batch
    total = tl.full((ROWS, WINDOW), 0.0, tl.float32)
    for begin in range(start, stop, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)[:, None]
        block, text, keep = column // batch, column % batch * length, column < stop
        at = block * ROWS + tl.arange(0, ROWS)[None, :]
        later = tl.load(g + (text + at), mask=keep & (at < length), other=0.0)
        at = (block - lag) * ROWS + entry
        earlier = tl.load(x + (text + at), mask=keep & (at >= 0) & (at < length), other=0.0)
        total = tl.dot(tl.trans(later), earlier, total, input_precision=PRECISION)
    # Column m gets the diagonal r - s = m, where r >= m, and m - W.
    total = tl.gather(total, (row - entry) & (WINDOW - 1), 1)
    size, m = windows * WINDOW, tl.arange(0, WINDOW)
    sums += d * 2 * size
    tap += window * WINDOW + m
    tl.store(sums + tap % size, tl.sum(tl.where(row >= entry, total, 0.0), 0))
    tl.store(sums + size + (tap - WINDOW + size) % size, tl.sum(tl.where(row < entry, total, 0.0), 0))


class TiledConvolution(torch.autograd.Function):
    """The gated convolution above on views `(D, B, L)`, with a float32 `kernel` and an `act` of the `FUNCTIONS`."""

    @staticmethod
    def forward(ctx, v, kernel, u, mask, act, first: int) -> torch.Tensor:
        mixed = v.new_empty(v.shape) if u is not None and any(ctx.needs_input_grad[:3]) else None
        windows = windows_of(v.permute(1, 2, 0), kernel, first, several=False)

        def by_tiles() -> tuple:
            taps = padded(kernel, v.dtype)
            return product(pointwise(v, mask, act)[0], kernel, first, mask, act, u, mixed, taps=taps), taps

        h, taps = attempt(PRODUCTS, by_tiles, lambda: (eager_windows(v, kernel, u, mask, act, windows), None))
        ctx.save_for_backward(v, kernel, u, mask, mixed, taps)
        ctx.act, ctx.first, ctx.windows = act, first, windows
        return h

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        (v, kernel, u, mask, mixed, taps), needed, act = ctx.saved_tensors, ctx.needs_input_grad[:3], ctx.act
        eager = partial(eager_windows, mask=mask, act=act, windows=ctx.windows)
        by_autograd = partial(differentiable_gradients, eager, (v, kernel, u), needed, gradient)
        by_tiles = partial(tile_gradients, gradient, v, kernel, u, mask, mixed, act, ctx.first, needed, taps)
        found = by_autograd() if must_differentiate(gradient) else attempt(PRODUCTS, by_tiles, by_autograd)
        return *found, None, None, None


def tile_gradients(gradient, v, kernel, u, mask, mixed, act, first: int, wanted: Sequence[bool], taps=None) -> tuple:
    """`toeplitz_fused.window_gradients` for `TiledConvolution`, with the `taps` of `padded` if they are known."""
    (want_v, want_kernel, want_u), num_taps, v_gradient = wanted, kernel.shape[1], None
    x, g, u_gradient = pointwise(v, mask, act, want_kernel, gradient, u, mixed)
    g = rows(g)
    kernel_gradient = tap_gradient(g, x, num_taps, first) if want_kernel else None
    if want_v:
        side = v if FUNCTIONS[type(act)] != "none" else None
        v_gradient = product(g, kernel, num_taps - 1 - first, mask, act, side, backward=True, taps=taps)
    return v_gradient, kernel_gradient, u_gradient if want_u else None


def tiled_convolution(v: torch.Tensor, kernel: torch.Tensor, first: int, gate: Gate = NO_GATE) -> torch.Tensor:
    """The `TiledConvolution` of `v` `(B, L, D)`. `v` and the gate may have any memory layout."""
    if type(gate.act) not in FUNCTIONS:  # then the activation is computed around the kernels
        return gate.apply(tiled_convolution(gate.inputs(v), kernel, first), "fused")
    u = None if gate.u is None else gate.u.permute(2, 0, 1)
    return TiledConvolution.apply(v.permute(2, 0, 1), kernel, u, gate.mask, gate.act, first).permute(1, 2, 0)


def pointwise(v, mask, act, activate=True, h=None, u=None, mixed=None) -> tuple[torch.Tensor | None, ...]:
    """mask act(v), unless not to `activate`, and from the gradient `h` of act(u) y those of y and u, `(D, B, L)` each.

    `mixed` is y; without `u` its gradient is `h`. One launch, or none if nothing changes.
    """
    activate = activate and (FUNCTIONS[type(act)] != "none" or mask is not None)
    if not activate and u is None:
        return v, h, None
    x = v.new_empty(v.shape) if activate else v
    g, u_gradient = (h, None) if u is None else (v.new_empty(v.shape), v.new_empty(v.shape, dtype=u.dtype))
    channels, numbers = v.shape[0], v[0].numel()
    given = (v if activate else None, None if u is None else h, u)
    given = [None if one is None else one.reshape(channels, numbers) for one in given]
    strides = [stride for one in given for stride in ((0, 0) if one is None else one.stride())]
    grid = triton.cdiv(channels, CHANNELS) * triton.cdiv(numbers, NUMBERS)
    with torch.cuda.device_of(v):
        pointwise_kernel[(grid,)](
            given[0], as_bytes(mask), x if activate else None, given[1], given[2], mixed, None if u is None else g,
            u_gradient, *strides, channels, numbers, ACT=FUNCTIONS[type(act)], CHANNELS=CHANNELS, NUMBERS=NUMBERS,
        )  # fmt: skip
    return x, g, u_gradient


def product(v, kernel, first, mask, act, side=None, mixed=None, backward=False, taps=None) -> torch.Tensor:
    """Equation (1) for `v` `(D, B, L)`, as `product_kernel`, with the `taps` of `padded` if they are known."""
    (channels, batch, length), num_taps = v.shape, kernel.shape[1]
    v, side, out = rows(v), None if side is None else rows(side), v.new_empty(v.shape)
    taps = padded(kernel, v.dtype) if taps is None else taps
    large = v.device.type != "cuda" or torch.cuda.get_device_capability(v.device)[0] in LARGE
    columns, warps, stages = product_sizes(num_taps, batch, length, v.element_size(), large)
    grid = channels * triton.cdiv(batch * triton.cdiv(length, ROWS), columns)
    with torch.cuda.device_of(v):
        product_kernel[(grid,)](
            v, taps, out, as_bytes(mask), side, mixed,
            v.stride(0), taps.stride(0), 0 if side is None else side.stride(0), batch, length, num_taps, first,
            ACT=FUNCTIONS[type(act)], BACKWARD=backward, PRECISION=PRECISION[v.element_size()],
            ROWS=ROWS, COLUMNS=columns, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out


def padded(kernel: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`kernel` `(D, K)` in `dtype` with a margin of zeros on both sides."""
    (channels, num_taps), width = kernel.shape, kernel.shape[1] + 2 * MARGIN.value
    taps = kernel.new_empty(channels, width, dtype=dtype)
    with torch.cuda.device_of(kernel):
        grid = channels * triton.cdiv(width, BLOCK)
        padding_kernel[(grid,)](kernel, taps, *kernel.stride(), num_taps, width, BLOCK=BLOCK)
    return taps


def product_sizes(num_taps: int, batch: int, length: int, bytes_of_entry: int, large: bool) -> tuple[int, int, int]:
    """Columns, warps and stages of the product; `large`: on a GPU of the `LARGE` generations.

    Columns share tiles, but early blocks are multiplied with tiles that reach before the sequence.
    """
    sizes = PRODUCT_SIZES[bytes_of_entry]
    many = bytes_of_entry == 4 or 4 * ROWS <= num_taps <= length // 2
    widest = max(sizes) if large and many else max(sizes) // 2
    columns = min(widest, max(min(sizes), triton.next_power_of_2(batch * triton.cdiv(length, ROWS))))
    return columns, *sizes[columns]


def tap_gradient(g: torch.Tensor, x: torch.Tensor, num_taps: int, first: int) -> torch.Tensor:
    """Equation (2): the gradient of the taps, float32 `(D, K)`, from `g` and `x`, `(D, B, L)` each."""
    channels, batch, length = x.shape
    g, x = rows(g), rows(x)
    columns, window, warps, stages = TAP_SIZES[x.element_size()]
    # The lags W - R before entry (0, 0) are whole. Tap 0 is among them, and the first window begins with a block.
    tap = window - ROWS - -first % ROWS
    windows = 1 + max(0, triton.cdiv(num_taps - 1 - tap, window))
    sums = x.new_empty(channels, 2, windows * window, dtype=torch.float32)
    with torch.cuda.device_of(x):
        tap_gradient_kernel[(channels * windows,)](
            g, x, sums, g.stride(0), x.stride(0), batch, length, windows, (tap - first) // ROWS, tap,
            PRECISION=PRECISION[x.element_size()], ROWS=ROWS, COLUMNS=columns, WINDOW=window,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return sums[:, 0, :num_taps] + sums[:, 1, :num_taps]


def rows(x: torch.Tensor) -> torch.Tensor:
    """`x` `(D, B, L)`, copied unless each channel lies in one piece, as the kernels read it."""
    return x if x[0].is_contiguous() else x.contiguous()


def as_bytes(mask: torch.Tensor | None) -> torch.Tensor | None:
    """A mask `(B, L)` as numbers without gaps."""
    return None if mask is None else mask.contiguous().view(torch.uint8)
