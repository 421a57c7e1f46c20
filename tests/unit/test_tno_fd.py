"""The operator `fd`: coefficients from the frequency response."""

import scipy.signal
import torch

from helpers.models import relative_error, seeded, tiny_config
from helpers.operators import OperatorTests, random_operator
from modeling_tnn import TnnForCausalLM


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
    kernel = random_operator("fd", True, fd_resolution=32).coefficients(100)
    assert kernel[:, :32].abs().min() > 0 and kernel[:, 32:].abs().max() == 0


def test_a_finer_grid_has_the_same_response():
    """The encoder at more frequencies: the coarse kernel is the fine one, folded at multiples of 2R."""
    for causal in (True, False):
        coarse, fine = (random_operator("fd", causal, fd_resolution=resolution) for resolution in (32, 128))
        assert relative_error(fine.response_parts()[..., ::4], coarse.response_parts()) < 1e-12
        response = (one.response_parts() for one in (coarse, fine))
        folded, whole = (torch.fft.irfft(one if causal else torch.complex(*one)) for one in response)  # (D, 2R)
        assert relative_error(whole.unflatten(1, (4, 64)).sum(1), folded) < 1e-12
        assert fine.coefficients(100)[:, -20:].abs().max() > 0 == coarse.coefficients(100)[:, -20:].abs().max()


def test_a_trained_model_loads_on_a_finer_grid(tmp_path):
    """With the same weights; saved and loaded again it keeps the grid."""
    model = seeded(TnnForCausalLM, tiny_config("fd", fd_resolution=32))
    model.save_pretrained(tmp_path / "coarse")
    fine = TnnForCausalLM.from_pretrained(tmp_path / "coarse", fd_resolution=128)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), fine.parameters(), strict=True))
    fine.save_pretrained(tmp_path / "fine")
    ids = torch.randint(3, 99, (1, 100), generator=torch.Generator().manual_seed(0))
    expected = fine(ids).logits
    torch.testing.assert_close(TnnForCausalLM.from_pretrained(tmp_path / "fine")(ids).logits, expected)
    # Beyond its R taps, and a little before, because the kernel is no longer folded.
    assert relative_error(model(ids).logits, expected) > 1e-6
    torch.testing.assert_close(fine(ids[:, :50]).logits, expected[:, :50], msg="a prefix sees what it saw")
