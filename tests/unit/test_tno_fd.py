"""The operator `fd`: coefficients from the frequency response."""

import scipy.signal
import torch

from helpers.operators import OperatorTests, random_operator


class TestFd(OperatorTests):
    tno_type = "fd"


class TestFdWithShortGrid(OperatorTests):
    tno_type = "fd"
    fields = {"fd_resolution": 32, "fd_input": "cos"}


def test_fd_causal_kernel_has_the_hilbert_transform_as_imaginary_part():
    """The response of the causal kernel is the analytic signal of the even one."""
    operator = random_operator("fd", True)
    size = 2 * operator.resolution
    real = operator.response_parts()
    even = torch.fft.irfft(real, n=size)
    even[:, operator.resolution] = 0  # the lag of both signs, which we drop
    full = torch.fft.fft(even).real.detach().numpy()
    kernel = operator.coefficients(operator.resolution).detach()
    response = torch.fft.fft(kernel, n=size).numpy()
    assert abs(response - scipy.signal.hilbert(full, axis=-1).conj()).max() < 1e-12


def test_fd_kernel_ends_with_its_grid():
    operator = random_operator("fd", True, fd_resolution=32)
    kernel = operator.coefficients(100)
    assert kernel[:, :32].abs().min() > 0 and kernel[:, 32:].abs().max() == 0
