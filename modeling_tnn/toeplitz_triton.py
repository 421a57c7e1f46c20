"""Gated convolution along a sequence with short filters, by products of small matrices in Triton. For GPUs.

    h = act(u) * (k * (mask act(v)))[first .. first + L - 1]          (without a gate: act(x) = x, act(u) = 1)

B batch, L length, D channels, K taps, R rows of a tile, C columns: blocks of R positions, of all sequences.

Forward. Each sequence is cut into blocks of R entries, and the blocks are the columns of a matrix X `(R, C)`. Block c
of the result is the sum over j of T_j times block c - j, where T_j is a Toeplitz tile of the lags around j R:

    T_j[r, s] = k[first + j R + r - s],    Y[:, c] = sum_j T_j X[:, c - j]                                  (1)

A program makes the tiles of one channel from its taps, one after the other, and multiplies each with many columns on
the tensor cores. That is about 2 (K + R) operations for an entry.

Backward. The gradient of the inputs is (1) with the taps in reverse. The gradient of the taps is a correlation. Tap
p Q + q is entry (q, p) of one product of shifted copies, which needs no tiles and no sums along diagonals:

    dk[p Q + q] = sum_n g[n + q] x[n + first - p Q]                                                        (2)

Operands have the dtype of `v`, sums are float32 (of float32 operands by three products in TF32). Nothing is added by
atomic operations: with one choice of the autotuner, equal inputs give equal bits. Higher derivatives are those of
`toeplitz_fused.eager_windows`.

This file is imported only where Triton is installed. With the environment variable TRITON_INTERPRET=1, Triton
computes on the CPU, slowly; tests do.
"""

from functools import partial

import torch

from .gating import NO_GATE, Activation, Gate, differentiable_gradients, must_differentiate
from .numerics import next_fast_len
from .toeplitz_fused import eager_windows, single_window

try:  # transformers refuses files of a checkpoint that need packages which are not there, except inside `try`
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("tno_implementation='triton' needs the package triton, which is not installed") from error

# Filters up to this length are activated in each load of an entry, which happens once for each tile. Longer ones have
# many tiles, and their inputs are activated once, before the product. (By arithmetic: not measured.)
FEW_TAPS = 256

# Zeros before and after the taps of a channel: at least two tiles. Then the loads of a tile need no test.
MARGIN = tl.constexpr(256)

# Numbers that a program of an elementwise kernel has.
BLOCK = 1024

# What the kernels take: taps on both sides together, positions of all sequences (CUDA limits the programs of a channel
# to 65,535), and the inputs.
MOST_TAPS, MOST_POSITIONS = 2**12, 2**25
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Activations that the kernels have, by their classes. These have names here because a kernel of the Hub, which this
# file is too, may import nothing but PyTorch and Triton.
FUNCTIONS = {
    "builtins.NoneType": "none",
    "torch.nn.modules.linear.Identity": "none",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.SiLU": "silu",
    "transformers.activations.LinearActivation": "none",
    "transformers.activations.GELUActivation": "gelu",
    "transformers.activations.SiLUActivation": "silu",
}

# What the autotuner tries: the sizes of a tile, then warps and stages. The first one has no spilled registers in any
# precision and fits every GPU. The interpreter cannot measure, and takes it.
PRODUCT_SIZES = [(64, 32, 4, 3), (64, 64, 4, 3), (64, 128, 8, 3), (128, 64, 8, 2)]

# A program has the product of the first two as many taps: 256 in the last one, for short filters.
CORRELATION_SIZES = [(64, 32, 64, 4, 3), (64, 16, 64, 4, 3), (128, 16, 64, 4, 3), (16, 16, 64, 1, 3)]


def configs(choices: list[tuple[int, ...]], *names: str) -> list[triton.Config]:
    """The `choices` for the autotuner, with the `names` of the sizes."""
    return [
        triton.Config(dict(zip(names, choice, strict=False)), num_warps=choice[-2], num_stages=choice[-1])
        for choice in (choices[:1] if triton.knobs.runtime.interpret else choices)
    ]


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


@triton.jit
def input_kernel(v, mask, out, v_d, numbers, ACT: tl.constexpr, BLOCK: tl.constexpr):
    """out = mask act(v), for a part of the `numbers` B L of one channel."""
    d, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = at < numbers
    x = activated(tl.load(v + d * v_d + at, mask=keep, other=0.0).to(tl.float32), ACT)
    if mask is not None:
        x = tl.where(tl.load(mask + at, mask=keep, other=0) != 0, x, 0.0)
    tl.store(out + d * numbers + at, x.to(out.dtype.element_ty), mask=keep)


@triton.jit
def gate_kernel(h, u, mixed, g, u_gradient, h_d, u_d, numbers, ACT: tl.constexpr, BLOCK: tl.constexpr):
    """From the gradient `h` of act(u) y: those of y, `g`, and of u, for a part of the numbers of one channel."""
    d, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep, place = at < numbers, d * numbers + at
    gradient = tl.load(h + d * h_d + at, mask=keep, other=0.0).to(tl.float32)
    gate = tl.load(u + d * u_d + at, mask=keep, other=0.0).to(tl.float32)
    tl.store(g + place, (gradient * activated(gate, ACT)).to(g.dtype.element_ty), mask=keep)
    y = tl.load(mixed + place, mask=keep, other=0.0).to(tl.float32)
    tl.store(u_gradient + place, (gradient * y * slope(gate, ACT)).to(u_gradient.dtype.element_ty), mask=keep)


@triton.autotune(configs=configs(PRODUCT_SIZES, "ROWS", "COLUMNS"), key=["taps_class", "columns_class", "BACKWARD"])
@triton.jit(do_not_specialize=["first", "taps_class", "columns_class"])
def product_kernel(
    v, taps, out, mask, side, mixed, v_d, taps_d, side_d, batch, length, num_taps, first, taps_class, columns_class,
    ACT: tl.constexpr, ACTIVATE: tl.constexpr, BACKWARD: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Equation (1) for one channel and some columns, with what comes before and after it.

    `taps` has zeros on both sides. `side` is None or the gate u; for `BACKWARD`, the v at which act is
    differentiated.
    """
    d = tl.program_id(0).to(tl.int64)
    blocks = (length + ROWS - 1) // ROWS
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    block, b = column // batch, column % batch  # early blocks of all sequences come first
    row = tl.arange(0, ROWS)
    # Tiles outside the filter, or that meet no block of the sequences, are left out.
    lowest = tl.program_id(1) * COLUMNS // batch
    highest = tl.minimum(blocks - 1, (tl.program_id(1) * COLUMNS + COLUMNS - 1) // batch)
    start = tl.maximum(-((first + ROWS - 1) // ROWS), lowest - (blocks - 1))
    stop = tl.minimum((num_taps - 1 - first + ROWS - 1) // ROWS, highest) + 1
    # A scalar pointer and small offsets: a pointer for each entry would take most registers.
    taps += d * taps_d + MARGIN + first
    v += d * v_d
    at = block[None, :] * ROWS + row[:, None]
    start_of_text = b[None, :] * length
    total = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for j in range(start, stop):
        tile = tl.load(taps + j * ROWS + (row[:, None] - row[None, :]))
        source = at - j * ROWS
        inside = (source >= 0) & (source < length)
        x = tl.load(v + (start_of_text + source), mask=inside, other=0.0)
        if ACTIVATE:
            y = activated(x.to(tl.float32), ACT)
            if mask is not None:
                y = tl.where(tl.load(mask + (start_of_text + source), mask=inside, other=0) != 0, y, 0.0)
            x = y.to(x.dtype)
        total = tl.dot(tile, x, total, input_precision=PRECISION)
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


@triton.autotune(configs=configs(CORRELATION_SIZES, "LOW", "HIGH", "STEP"), key=["taps_class", "columns_class"])
@triton.jit(do_not_specialize=["first", "taps_class", "columns_class"])
def correlation_kernel(
    g, x, out, g_d, x_d, batch, length, num_taps, first, taps_class, columns_class,
    PRECISION: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Equation (2) for one channel and LOW x HIGH taps, Q = LOW."""
    d = tl.program_id(0).to(tl.int64)
    q, p = tl.arange(0, LOW), tl.program_id(1) * HIGH + tl.arange(0, HIGH)
    g += d * g_d
    x += d * x_d
    n = tl.arange(0, STEP)
    steps = (length + LOW + STEP - 1) // STEP  # n runs from -LOW to length - 1
    total = tl.full((LOW, HIGH), 0.0, tl.float32)
    for step in range(0, batch * steps):
        start, text = (step % steps) * STEP - LOW, step // steps * length
        at = start + (n[None, :] + q[:, None])
        later = tl.load(g + text + at, mask=(at >= 0) & (at < length), other=0.0)
        at = start + first + (n[:, None] - p[None, :] * LOW)
        earlier = tl.load(x + text + at, mask=(at >= 0) & (at < length), other=0.0)
        total = tl.dot(later, earlier, total, input_precision=PRECISION)
    tap = p[None, :] * LOW + q[:, None]
    tl.store(out + d * num_taps + tap, total, mask=tap < num_taps)


class TiledConvolution(torch.autograd.Function):
    """The gated convolution above on channel-major views.

    Inputs: `v` `(D, B, L)`; float32 `kernel` `(D, K)`; `u` `(D, B, L)` or None; `mask` `(B, L)` or None; `act` with a
    `function`, or None; `first`.
    """

    @staticmethod
    def forward(ctx, v, kernel, u, mask, act, first: int) -> torch.Tensor:
        mixed = v.new_empty(v.shape) if u is not None and any(ctx.needs_input_grad[:3]) else None
        activate = kernel.shape[1] <= FEW_TAPS and (act is not None or mask is not None)
        x = v if activate else inputs(v, mask, act)
        h = product(x, kernel, first, mask, act, side=u, mixed=mixed, activate=activate)
        ctx.save_for_backward(v, kernel, u, mask, mixed)
        ctx.act, ctx.first = act, first
        return h

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        v, kernel, u, mask, mixed = ctx.saved_tensors
        act, first, taps = ctx.act, ctx.first, kernel.shape[1]
        if must_differentiate(gradient):
            windows = single_window(next_fast_len(v.shape[2] + max(first, taps - 1 - first)), first)
            eager = partial(eager_windows, mask=mask, act=act, windows=windows)
            found = differentiable_gradients(eager, (v, kernel, u), ctx.needs_input_grad, gradient)
            return *found, None, None, None
        want_v, want_kernel, want_u = ctx.needs_input_grad[:3]
        v_gradient = kernel_gradient = u_gradient = None
        g = gradient
        if u is not None:
            g, u_gradient = gate_gradients(gradient, u, mixed, act)
        if want_kernel:
            kernel_gradient = correlation(g, inputs(v, mask, act), taps, first)
        if want_v:
            side = v if function(act) != "none" else None
            v_gradient = product(g, kernel.flip(1), taps - 1 - first, mask, act, side, backward=True)
        return v_gradient, kernel_gradient, u_gradient if want_u else None, None, None, None


def tiled_convolution(v: torch.Tensor, kernel: torch.Tensor, first: int, gate: Gate = NO_GATE) -> torch.Tensor:
    """The `TiledConvolution` of `v` `(B, L, D)`. `v` and the gate may have any memory layout."""
    u = None if gate.u is None else gate.u.permute(2, 0, 1)
    return TiledConvolution.apply(v.permute(2, 0, 1), kernel, u, gate.mask, gate.act, first).permute(1, 2, 0)


def gated_tiles(v: torch.Tensor, kernel: torch.Tensor, first: int, gate: Gate) -> torch.Tensor:
    """The same with any activation: one that the kernels do not have is computed around them."""
    if function(gate.act) is not None:
        return tiled_convolution(v, kernel, first, gate)
    return gate.apply(tiled_convolution(gate.inputs(v), kernel, first), "fused")


def function(act: Activation | None) -> str | None:
    """The name of an activation in the kernels, or None if they do not have it."""
    return FUNCTIONS.get(f"{type(act).__module__}.{type(act).__qualname__}")


def refused(v: torch.Tensor, taps: int, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot compute a product of `v` `(B, L, D)` with so many `taps` in `dtype`, or None."""
    if not runs_on(v.device):
        return f"needs a GPU of NVIDIA of compute capability 8.0 or newer, got {v.device}"
    if dtype is not torch.float32 or v.dtype not in DTYPES:
        return f"takes float32, bfloat16 and float16, got {v.dtype} with a filter of {dtype}"
    if taps > MOST_TAPS:
        return f"takes at most {MOST_TAPS:,} taps, got {taps:,}"
    if v.shape[0] * v.shape[1] > MOST_POSITIONS:
        return f"takes at most {MOST_POSITIONS:,} positions, got {v.shape[0] * v.shape[1]:,}"
    return None


def runs_on(device: torch.device) -> bool:
    """Whether the kernels compute on a device."""
    if device.type == "cuda":
        return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and triton.knobs.runtime.interpret


def inputs(v: torch.Tensor, mask: torch.Tensor | None, act: Activation | None) -> torch.Tensor:
    """mask act(v), `(D, B, L)`; `v` itself if it is the same."""
    if function(act) == "none" and mask is None:
        return v
    v, out = rows(v), v.new_empty(v.shape)
    numbers = v[0].numel()
    with torch.cuda.device_of(v):
        input_kernel[v.shape[0], triton.cdiv(numbers, BLOCK)](
            v, as_bytes(mask), out, v.stride(0), numbers, ACT=function(act), BLOCK=BLOCK
        )
    return out


def gate_gradients(gradient: torch.Tensor, u: torch.Tensor, mixed: torch.Tensor, act: Activation | None):
    """From the gradient of act(u) y, `(D, B, L)`: those of y, in the dtype of `mixed`, and of u."""
    gradient, u, g, u_gradient = rows(gradient), rows(u), torch.empty_like(mixed), u.new_empty(u.shape)
    numbers = mixed[0].numel()
    with torch.cuda.device_of(u):
        gate_kernel[u.shape[0], triton.cdiv(numbers, BLOCK)](
            gradient, u, mixed, g, u_gradient, gradient.stride(0), u.stride(0), numbers,
            ACT=function(act), BLOCK=BLOCK,
        )  # fmt: skip
    return g, u_gradient


def product(v, kernel, first, mask, act, side=None, mixed=None, activate=False, backward=False) -> torch.Tensor:
    """Equation (1) for `v` `(D, B, L)`, with the activations of `product_kernel`; also writes to `mixed`."""
    (channels, batch, length), num_taps = v.shape, kernel.shape[1]
    v, side, out = rows(v), None if side is None else rows(side), v.new_empty(v.shape)
    taps = v.new_zeros(channels, num_taps + 2 * MARGIN)
    taps[:, MARGIN : MARGIN + num_taps] = kernel

    def grid(sizes):
        return channels, triton.cdiv(batch * triton.cdiv(length, sizes["ROWS"]), sizes["COLUMNS"])

    with torch.cuda.device_of(v):
        product_kernel[grid](
            v, taps, out, as_bytes(mask), side, mixed,
            v.stride(0), taps.stride(0), 0 if side is None else side.stride(0), batch, length, num_taps, first,
            size_class(num_taps), size_class(batch * length),
            ACT=function(act), ACTIVATE=activate, BACKWARD=backward, PRECISION=precision(v.dtype),
        )  # fmt: skip
    return out


def correlation(g: torch.Tensor, x: torch.Tensor, num_taps: int, first: int) -> torch.Tensor:
    """Equation (2): the gradient of the taps, float32 `(D, K)`, from `g` and `x`, `(D, B, L)` each."""
    channels, batch, length = x.shape
    g, x, out = rows(g), rows(x), x.new_empty(channels, num_taps, dtype=torch.float32)

    def grid(sizes):
        return channels, triton.cdiv(num_taps, sizes["LOW"] * sizes["HIGH"])

    with torch.cuda.device_of(x):
        correlation_kernel[grid](
            g, x, out, g.stride(0), x.stride(0), batch, length, num_taps, first,
            size_class(num_taps), size_class(batch * length), PRECISION=precision(x.dtype),
        )  # fmt: skip
    return out


def rows(x: torch.Tensor) -> torch.Tensor:
    """`x` `(D, B, L)`, copied unless each channel lies in one piece, as the kernels read it."""
    return x if x[0].is_contiguous() else x.contiguous()


def as_bytes(mask: torch.Tensor | None) -> torch.Tensor | None:
    """A mask `(B, L)` as numbers without gaps."""
    return None if mask is None else mask.contiguous().view(torch.uint8)


def size_class(size: int) -> int:
    """The sizes that share one result of the autotuner: up to the same power of two."""
    return size.bit_length()


def precision(dtype: torch.dtype) -> str:
    """How the tensor cores multiply: float32 as three products, with an error of float32."""
    return "tf32x3" if dtype is torch.float32 else "tf32"
