"""Convolve along a sequence inside a gate, a few channels at a time.

    h = act(u) * (k * (mask act(v)))[first .. first + L - 1]          (without a gate: act(x) = x, act(u) = 1)

B batch, L length, D channels, K taps, F transform length, S = F - K + 1 new outputs of a window, W windows, C channels
of a chunk.

The oracle is `eager_windows`. This is faster (figures: Benchmarks in the docs): temporaries fit into the processor's
cache, the gradient of a real transform is a real one, and a filter much shorter than the sequence has windows that
overlap by K - 1 (overlap-save). Only u, v, the filter and the mixed values are saved for the backward pass.

In a single window, x begins at entry 0 and the outputs at entry `first`. The part that wraps around does not reach the
outputs if F >= L + max(first, K - 1 - first). Of several windows, each begins S entries after the one before, x begins
K - 1 - first entries into the first one, and the part that wraps around ends before entry K - 1.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import pad

from .numerics import is_fused, is_on_host, is_traced, is_transformed, must_be_eager, next_fast_len

Activation = Callable[[torch.Tensor], torch.Tensor]

# Numbers in a temporary: on the CPU as many as its cache holds, on other devices enough to keep them busy.
CHUNK, LARGE_CHUNK = 2**18, 2**27

# Transforms at a time, at least: one or two long ones at a time take up to 1.5 times as long (measured at 65,536).
ROWS = 8

# The longest transform that is in float32 on the CPU, and the most that a kernel may rise from its NEAR first lags for
# one, and for one in float64, see `rise`. Longer inputs have transforms in any case: sums would take hours.
PRECISE, NEAR, SMALL_RISE, LARGEST_RISE, LONGEST_SUMS = 2**18, 16, 10, 1e8, 2**14

# Ratios to the length of the filter (measured): of the shortest sequence that gets windows, and of a window.
LONG, WINDOW, SHORTEST_WINDOW = 8, 4, 256


class ActivatedProduct(torch.autograd.Function):
    """act(a) * b, with the activation computed again in the backward pass."""

    @staticmethod
    def forward(ctx, a: torch.Tensor, b: torch.Tensor, act: Activation) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.act = act
        return act(a) * b

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        a, b = ctx.saved_tensors
        if must_differentiate(gradient):
            found = differentiable_gradients(lambda a, b: ctx.act(a) * b, (a, b), ctx.needs_input_grad, gradient)
            return *found, None
        value, pull_back = value_and_vjp(ctx.act, a)
        return pull_back(gradient * b), value * gradient, None


def activated_product(a: torch.Tensor, b: torch.Tensor, act: Activation, implementation: str) -> torch.Tensor:
    """act(a) * b for two tensors of one shape; `implementation` as for `toeplitz.toeplitz_matmul`."""
    fused = is_fused(implementation) and torch.is_grad_enabled() and not has_parameters(act)
    return ActivatedProduct.apply(a, b, act) if fused else act(a) * b


class Gate(NamedTuple):
    """The gate of a gated Toeplitz unit around its operator. Without arguments it changes nothing."""

    u: torch.Tensor | None = None  # (B, L, D), the gate before its activation
    act: Activation | None = None  # the elementwise activation of `u` and `v`
    mask: torch.Tensor | None = None  # (B, L), False where `v` is set to zero; None if there is no padding

    is_elementwise = True  # so the product inside can be that of a fused function

    def inputs(self, v: torch.Tensor) -> torch.Tensor:
        """The inputs of the operator, `(B, L, D)`: act(v), zero where the mask is False."""
        v = v if self.act is None else self.act(v)
        return v if self.mask is None else v.masked_fill(~self.mask[..., None], 0)

    def apply(self, mixed: torch.Tensor, implementation: str) -> torch.Tensor:
        """The gated outputs of the operator, `(B, L, D)`; `implementation` as for `activated_product`."""
        return mixed if self.u is None else activated_product(self.u, mixed, self.act, implementation)

    def of_documents(self, multiply: Callable, batches, v: torch.Tensor, implementation: str) -> torch.Tensor:
        """`multiply(v, gate)` for the documents of packed rows, inside the gate, `(B, L, D)`."""

        def product(x: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
            return multiply(x, Gate(None, self.act, real))

        return self.apply(batches.map_documents(product, v), implementation)

    def groups_as_rows(self, size: int) -> "Gate":
        """The gate around `groups_as_rows` of the inputs."""
        u = None if self.u is None else groups_as_rows(self.u, size)
        return Gate(u, self.act, None if self.mask is None else self.mask.repeat(size, 1))


NO_GATE = Gate()


def groups_as_rows(x: torch.Tensor, size: int) -> torch.Tensor:
    """The n = `size` channels of each group as rows, `(B, L, nG)` to `(nB, L, G)`: a view if it is channel-major."""
    return x.permute(2, 0, 1).unflatten(0, (-1, size)).flatten(1, 2).permute(1, 2, 0)


def rows_as_groups(y: torch.Tensor, size: int) -> torch.Tensor:
    """The inverse of `groups_as_rows`, `(nB, L, G)` to `(B, L, nG)`."""
    return y.permute(2, 0, 1).unflatten(1, (size, -1)).flatten(0, 1).permute(1, 2, 0)


def has_parameters(act: Activation) -> bool:
    """Whether the activation learns (as PReLU does), so that autograd must see it."""
    return isinstance(act, nn.Module) and any(True for _ in act.parameters())


def value_and_vjp(act: Activation, x: torch.Tensor) -> tuple[torch.Tensor, Activation]:
    """act(x) and its pull-back, from a gradient of act(x) to a gradient of `x`. For use inside a backward pass."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        value = act(x)
    return value.detach(), lambda gradient: torch.autograd.grad(value, x, gradient)[0]


def must_differentiate(gradient: torch.Tensor) -> bool:
    """Whether a backward pass must be differentiable: with `create_graph=True`, or under a transform of torch.func."""
    return torch.is_grad_enabled() or is_transformed(gradient)


def differentiable_gradients(
    function: Callable, inputs: Sequence[torch.Tensor], needed: Sequence[bool], gradient: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """The gradients by autograd, for a backward pass that can be differentiated again; None for each not `needed`.

    `function(*inputs)` is the forward pass in PyTorch's own operations, and `gradient` that of its result.
    """
    create_graph, needed = torch.is_grad_enabled(), needed[: len(inputs)]
    with torch.enable_grad():
        # One input may be computed from another. A view of each separates its own contribution.
        views = [x.view_as(x) if one else x for x, one in zip(inputs, needed, strict=True)]
        wanted = list(compress(views, needed))
        found = iter(torch.autograd.grad(function(*views), wanted, gradient, create_graph=create_graph))
    return tuple(next(found) if one else None for one in needed)


class Windows(NamedTuple):
    """The layout of a sequence in windows, one transform each, see above."""

    size: int  # F
    step: int  # S
    count: int = 1  # W
    offset: int = 0  # entry of the first window at which x begins
    skip: int = 0  # number of first entries of each window that are not outputs
    rises: bool = False  # whether the kernel rises far beyond its first lags

    @property
    def span(self) -> int:
        """The number of entries that the windows cover together."""
        return self.size + (self.count - 1) * self.step


def windows_of(v: torch.Tensor, kernel: torch.Tensor, first: int, several: bool = True) -> Windows:
    """The windows of `v` `(B, L, D)` for taps `(D, K)`, `several` if they are much shorter; one for a response."""
    length, taps, with_response = v.shape[1], kernel.shape[1], is_response(kernel)
    rises = rise(kernel, first) > SMALL_RISE
    if several and not with_response and length >= LONG * taps and length > SHORTEST_WINDOW:
        size = max(SHORTEST_WINDOW, 1 << (WINDOW * taps - 1).bit_length())
        step = size - taps + 1
        return Windows(size, step, -(-length // step), taps - 1 - first, taps - 1, rises)
    size = 2 * (kernel.shape[2] - 1) if with_response else next_fast_len(length + max(first, taps - 1 - first))
    return Windows(size, size, skip=first, rises=rises)


class GatedConvolution(torch.autograd.Function):
    """The gated convolution above on views `v` and `u` `(D, B, L)`; higher derivatives: those of `eager_windows`."""

    @staticmethod
    def forward(ctx, v, kernel, u, mask, act, windows: Windows) -> torch.Tensor:
        h = torch.empty_like(v)  # (D, B, L)
        mixed = torch.empty_like(v) if u is not None and any(ctx.needs_input_grad[:3]) else None
        dtype, length, parts = kernel.dtype, v.shape[2], chunks(v, windows)
        buffer = kernel.new_zeros(parts[0].stop, v.shape[1], windows.span, dtype=transform_dtype(kernel, windows))
        for chosen in parts:
            x = v[chosen].to(dtype)  # (C, B, L)
            x = mask_out(x if act is None else act(x), mask)
            spectrum = transform(buffer, x, windows)  # (C, B, W, F/2+1)
            spectrum *= response(kernel, chosen, windows, buffer.dtype)
            y = torch.fft.irfft(spectrum, n=windows.size)[..., windows.skip :]  # (C, B, W, S)
            y = y.flatten(2)[..., :length]  # (C, B, L)
            if mixed is not None:
                mixed[chosen] = y
            h[chosen] = y if u is None else act(u[chosen].to(dtype)) * y
        ctx.save_for_backward(v, kernel, u, mask, mixed)
        ctx.act, ctx.windows = act, windows
        return h

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        v, kernel, u, mask, mixed = ctx.saved_tensors
        act, windows = ctx.act, ctx.windows
        if must_differentiate(gradient):
            # `mixed` cannot be used, because it has no graph.
            function = partial(eager_windows, mask=mask, act=act, windows=windows)
            found = differentiable_gradients(function, (v, kernel, u), ctx.needs_input_grad, gradient)
        else:
            found = window_gradients(gradient, v, kernel, u, mask, mixed, act, windows, ctx.needs_input_grad[:3])
        return *found, None, None, None


def window_gradients(gradient, v, kernel, u, mask, mixed, act, windows: Windows, wanted: Sequence[bool]) -> tuple:
    """The gradients of `v`, `kernel` and `u`, each None unless wanted; `mixed` is the result without the gate."""
    want_v, want_kernel, want_u = wanted
    pairs = zip((v, kernel, u), wanted, strict=True)
    v_gradient, kernel_gradient, u_gradient = (torch.empty_like(x) if want else None for x, want in pairs)
    dtype, parts = kernel.dtype, chunks(v, windows)
    wide = {"dtype": transform_dtype(kernel, windows)}
    g_buffer = kernel.new_zeros(parts[0].stop, v.shape[1], windows.count, windows.size, **wide)
    x_buffer = kernel.new_zeros(parts[0].stop, v.shape[1], windows.span, **wide) if want_kernel else None
    for chosen in parts:
        g = gradient[chosen].to(dtype)  # (C, B, L)
        if u is not None:
            gate, pull_back = value_and_vjp(act, u[chosen].to(dtype))
            if want_u:
                u_gradient[chosen] = pull_back(g * mixed[chosen])
            g = gate * g
        spectrum = transform_gradient(g_buffer, g, windows)  # (C, B, W, F/2+1)
        x, pull_back = v[chosen].to(dtype), None
        if act is not None:
            x, pull_back = value_and_vjp(act, x)
        if want_kernel:
            correlation = transform(x_buffer, mask_out(x, mask), windows).conj_physical_()
            correlation = correlation.mul_(spectrum).sum((1, 2))  # (C, F/2+1)
            store_gradient(kernel_gradient, chosen, correlation, windows)
        if want_v:
            spectrum *= response(kernel, chosen, windows, g_buffer.dtype).conj()
            x_gradient = overlap_add(torch.fft.irfft(spectrum, n=windows.size), g.shape[2], windows).to(dtype)
            x_gradient = mask_out(x_gradient, mask)
            v_gradient[chosen] = x_gradient if act is None else pull_back(x_gradient)
    return v_gradient, kernel_gradient, u_gradient


def eager_windows(v, kernel, u, mask, act, windows: Windows) -> torch.Tensor:
    """The result of `GatedConvolution` for the same arguments, by operations that autograd can differentiate."""
    x, length = v.to(kernel.dtype), v.shape[2]
    x = mask_out(x if act is None else act(x), mask)  # (D, B, L)
    if windows.count > 1:
        x = pad(x, (windows.offset, windows.span - windows.offset - length)).unfold(-1, windows.size, windows.step)
    else:
        x = x[:, :, None]
    dtype = transform_dtype(kernel, windows)
    spectrum = response(kernel, slice(None), windows, dtype)  # (D, 1, 1, F/2+1)
    spectrum = torch.fft.rfft(x.to(dtype), n=windows.size) * spectrum  # (D, B, W, F/2+1)
    y = torch.fft.irfft(spectrum, n=windows.size)[..., windows.skip : windows.skip + length]  # (D, B, W, S)
    y = y.flatten(2)[..., :length].to(kernel.dtype)  # (D, B, L)
    return (y if u is None else act(u.to(kernel.dtype)) * y).to(v.dtype)


def fused_convolution(v: torch.Tensor, kernel: torch.Tensor, windows: Windows, gate: Gate = NO_GATE) -> torch.Tensor:
    """The `GatedConvolution` of `v` `(B, L, D)`. `v` and the gate may have any memory layout."""
    u = None if gate.u is None else gate.u.permute(2, 0, 1)
    return GatedConvolution.apply(v.permute(2, 0, 1), kernel, u, gate.mask, gate.act, windows).permute(1, 2, 0)


def chunks(v: torch.Tensor, windows: Windows) -> list[slice]:
    """Slices of the channels of `v` `(D, B, L)` that are computed together."""
    channels, rows = v.shape[0], windows.count * max(1, v.shape[1])  # transforms of a channel
    step = max(-(-ROWS // rows), (CHUNK if is_on_host(v) else LARGE_CHUNK) // (windows.size * rows))
    return [slice(start, min(start + step, channels)) for start in range(0, channels, step)]


def transform_dtype(kernel: torch.Tensor, windows: Windows) -> torch.dtype:
    """The precision of the transforms: on the CPU float64 for long windows and rising kernels, else the kernel's.

    Rounding is relative to the largest outputs. With a kernel that does not fade, these are at the end of a million
    positions, and the first ones, a thousand times smaller, would lose three digits.
    """
    wide = not is_traced() and is_on_host(kernel) and (windows.rises or windows.size > PRECISE)
    return torch.float64 if wide else kernel.dtype


def rise(kernel: torch.Tensor, first: int) -> float:
    """Ratio of a channel's largest tap to those at the first lags; 1 if unknown.

    It is known for taps `(D, K)` on the CPU. Of each channel 64 taps or more are read, the last one among them, so it
    costs less than 1% of the product.
    """
    if must_be_eager() or is_response(kernel) or kernel.shape[1] <= NEAR or not is_on_host(kernel):
        return 1.0
    kernel, last = kernel.detach(), kernel.shape[1] - 1
    near, sample = kernel[:, max(0, first - NEAR) : first + NEAR], kernel[:, last % (every := last // 64 + 1) :: every]
    start, largest = near.abs().amax(dim=1), sample.abs().amax(dim=1)  # (D,)
    return torch.where(start > 0, largest / start, 1).max().item() if len(kernel) else 1.0


def mask_out(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """`x` `(C, B, L)`, set to zero where the mask `(B, L)` is False."""
    return x if mask is None else x.masked_fill(~mask, 0)


def response(kernel: torch.Tensor, chosen: slice, windows: Windows, dtype: torch.dtype) -> torch.Tensor:
    """The frequency response of some channels, `(C, 1, 1, F/2 + 1)`, of taps by a transform in `dtype`."""
    if is_response(kernel):
        spectrum = complex_response(kernel[:, chosen])
    else:
        spectrum = torch.fft.rfft(kernel[chosen].to(dtype), n=windows.size)
    return spectrum[:, None, None]


def is_response(kernel: torch.Tensor) -> bool:
    """Whether `kernel` is a response `(2, D, F/2 + 1)` (real and imaginary part) and not taps `(D, K)`."""
    return kernel.dim() == 3


def complex_response(parts: torch.Tensor) -> torch.Tensor:
    """The complex response `(C, F/2 + 1)` of real taps from `parts` `(2, C, F/2 + 1)`. It is real at both ends."""
    return torch.complex(parts[0], pad(parts[1][:, 1:-1], (1, 1)))


def transform(buffer: torch.Tensor, x: torch.Tensor, windows: Windows) -> torch.Tensor:
    """The spectra `(C, B, W, F/2 + 1)` of the windows over `x` `(C, B, L)`. The rest of the buffer stays zero."""
    buffer = buffer[: len(x)]
    buffer[..., windows.offset : windows.offset + x.shape[2]] = x
    return torch.fft.rfft(buffer.unfold(-1, windows.size, windows.step))


def transform_gradient(buffer: torch.Tensor, g: torch.Tensor, windows: Windows) -> torch.Tensor:
    """The spectra `(C, B, W, F/2 + 1)` of the gradients `g` `(C, B, L)`, laid out in the windows, as `transform`."""
    buffer = buffer[: len(g)]
    if windows.count > 1:
        g = pad(g, (0, windows.count * windows.step - g.shape[2])).unflatten(-1, (windows.count, windows.step))
        buffer[..., windows.skip :] = g
    else:
        buffer[:, :, 0, windows.skip : windows.skip + g.shape[2]] = g
    return torch.fft.rfft(buffer)


def overlap_add(parts: torch.Tensor, length: int, windows: Windows) -> torch.Tensor:
    """The sum `(C, B, L)` of overlapping windows `(C, B, W, F)`."""
    if windows.count == 1:
        total = parts[:, :, 0]
    else:
        total = parts.new_zeros(*parts.shape[:2], windows.count + 1, windows.step)
        total[:, :, :-1] = parts[..., : windows.step]
        total[:, :, 1:, : windows.size - windows.step] += parts[..., windows.step :]
        total = total.flatten(2)
    return total[..., windows.offset : windows.offset + length]


def store_gradient(gradient: torch.Tensor, chosen: slice, correlation: torch.Tensor, windows: Windows):
    """Write the gradient of the `chosen` channels of a filter, from the summed correlation spectra `(C, F/2 + 1)`."""
    if not is_response(gradient):
        gradient[chosen] = torch.fft.irfft(correlation, n=windows.size)[:, : gradient.shape[1]]
        return
    correlation /= windows.size
    correlation[:, 1:-1] *= 2  # these frequencies stand for their mirror images as well
    gradient[0, chosen], gradient[1, chosen] = correlation.real, correlation.imag
    gradient[1, chosen, :: windows.size // 2] = 0
