"""Convolution along a sequence, a few channels at a time, with spectra computed again in the backward pass.

    y = (k * v)[first .. first + L - 1]

B batch, L length, D channels, K taps, F transform length, C channels of a chunk.

The same product as the plain differentiable one of `toeplitz.py`, which is its oracle. Three things make it faster:
temporaries stay small enough for the processor's cache (large ones are page-faulted on every call), the gradient of a
real transform is a real transform (PyTorch's own backward of rfft is a complex one of twice the work), and no spectrum
is kept: it saves `v` and the kernel alone.
"""

import torch
from torch.autograd.function import once_differentiable

# Numbers in a temporary on the CPU; elsewhere all channels are one chunk.
CHUNK = 2**18


class ChunkedConvolution(torch.autograd.Function):
    """The function above; it cannot be differentiated twice."""

    @staticmethod
    def forward(ctx, v: torch.Tensor, kernel: torch.Tensor, size: int, first: int) -> torch.Tensor:
        ctx.save_for_backward(v, kernel)
        ctx.size, ctx.first = size, first
        y = torch.empty_like(v, memory_format=torch.contiguous_format)
        length = v.shape[1]
        padded = None
        for chosen in chunks(v, size):
            padded = load(padded, v, chosen, size, 0, kernel.dtype)  # (B, C, F)
            product = torch.fft.rfft(padded)  # (B, C, F/2+1)
            product *= torch.fft.rfft(kernel[chosen], n=size)
            y[..., chosen] = torch.fft.irfft(product, n=size)[..., first : first + length].transpose(1, 2)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        v, kernel = ctx.saved_tensors
        size, first = ctx.size, ctx.first
        length, taps = v.shape[1], kernel.shape[1]
        want_v, want_kernel = ctx.needs_input_grad[:2]
        v_gradient = torch.empty_like(v, memory_format=torch.contiguous_format) if want_v else None
        kernel_gradient = torch.empty_like(kernel) if want_kernel else None
        padded_gradient = padded = None
        for chosen in chunks(v, size):
            padded_gradient = load(padded_gradient, gradient, chosen, size, first, kernel.dtype)
            spectrum = torch.fft.rfft(padded_gradient)  # (B, C, F/2+1)
            if want_kernel:
                padded = load(padded, v, chosen, size, 0, kernel.dtype)
                correlation = (torch.fft.rfft(padded).conj_physical_() * spectrum).sum(0)  # (C, F/2+1)
                kernel_gradient[chosen] = torch.fft.irfft(correlation, n=size)[:, :taps]
            if want_v:
                spectrum *= torch.fft.rfft(kernel[chosen], n=size).conj_physical_()
                v_gradient[..., chosen] = torch.fft.irfft(spectrum, n=size)[..., :length].transpose(1, 2)
        return v_gradient, kernel_gradient, None, None


def chunks(v: torch.Tensor, size: int) -> list[slice]:
    """Slices of the channels of `v` `(B, L, D)`."""
    channels = v.shape[2]
    step = max(1, CHUNK // (size * v.shape[0])) if v.device.type == "cpu" else channels
    return [slice(start, min(start + step, channels)) for start in range(0, channels, step)]


def load(buffer: torch.Tensor | None, v: torch.Tensor, chosen: slice, size: int, offset: int, dtype: torch.dtype):
    """Channels of `v` `(B, L, D)` at `offset` of a zero-padded buffer `(B, C, F)`, which is made or used again."""
    count = chosen.stop - chosen.start
    if buffer is None or buffer.shape[1] != count:
        buffer = torch.zeros(v.shape[0], count, size, dtype=dtype, device=v.device)
    buffer[..., offset : offset + v.shape[1]] = v[..., chosen].transpose(1, 2)
    return buffer
