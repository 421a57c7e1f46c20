"""What all tests share: small configurations of every variant, and the table of parity errors at the end."""

import pytest
import torch
from hypothesis import HealthCheck, settings

from modeling_tnn import TnnConfig, TnnForCausalLM
from modeling_tnn.tno_auto import OPERATORS

# The examples are the same in every run, unless asked for more of them: --hypothesis-profile thorough.
for profile, count in {"quick": 25, "thorough": 500}.items():
    settings.register_profile(
        profile,
        max_examples=count,
        deadline=None,
        derandomize=profile == "quick",
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
settings.load_profile("quick")

# What `make test-hf` runs.
collect_ignore = ["hf"]

CAUSAL = [name for name, cls in OPERATORS.items() if cls.supports_causal]
BIDIRECTIONAL = [name for name, cls in OPERATORS.items() if cls.supports_bidirectional]
VARIANTS = [(tno_type, True) for tno_type in CAUSAL] + [(tno_type, False) for tno_type in BIDIRECTIONAL]


def tiny_config(tno_type="rpe", causal=True, **fields) -> TnnConfig:
    """A model of two layers in which nothing is at its trivial value."""
    defaults = {
        "vocab_size": 99,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "gtu_expansion": 2,
        "max_position_embeddings": 64,
        "rpe_dim": 16,
        "rpe_layers": 2,
        "ski_rank": 9,
        "ski_filter_size": 5,
        "rtf_state_size": 8,
        "num_modes": 5,
        "modal_window": 3,
        "rtf_num_denominators": 4,
        "rtf_constraint": "l1_montel",
        "rtf_initializer": "montel",
    }
    return TnnConfig(tno_type=tno_type, causal=causal, **defaults | fields)


def exhaustive(*values) -> list:
    """Parameters that `make test-exhaustive` adds to those of the usual tests."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.exhaustive)
        for value in values
    ]


def seeded(build, *args, **kwargs):
    """`build(*args, **kwargs)` in evaluation mode, with the same random weights every time."""
    torch.manual_seed(0)
    return build(*args, **kwargs).eval()


def lively_language_model(**fields) -> TnnForCausalLM:
    """A float64 model whose next token depends on the text: untied and with a loud mixer, it does not repeat one."""
    config = tiny_config(eos_token_id=None, tie_word_embeddings=False, **fields)
    model = seeded(TnnForCausalLM, config).double()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.gtu.v_proj.weight.mul_(4)
            layer.gtu.o_proj.weight.mul_(4)
    return model


def checkpoint_activations(model, options: dict | None = None):
    """By the name that the installed transformers has for it; 5.17 knows the old one only."""
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)(options)


def relative_error(actual: torch.Tensor, expected: torch.Tensor, scale: float = 0.0) -> float:
    """Largest absolute difference over the largest absolute entry of `expected`, or over `scale`."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} instead of {tuple(expected.shape)}"
    scale = scale or expected.abs().max().double().item() or 1.0
    return (actual.double() - expected.double()).abs().max().item() / scale


@pytest.fixture(params=VARIANTS, ids=lambda variant: f"{variant[0]}-{'causal' if variant[1] else 'bidirectional'}")
def variant(request):
    return request.param


@pytest.fixture
def operator(request):
    """Of a subclass of `operators.OperatorTests`, in the direction `request.param`."""
    return request.instance.build(request.param)


@pytest.fixture
def decoded(request):
    """A causal operator of a subclass of `operators.OperatorTests`."""
    return request.instance.build(causal=True)


def pytest_terminal_summary(terminalreporter):
    """The worst error against the released implementations, per family and precision."""
    worst = {}
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            if name.startswith("parity "):
                worst[name] = max(value, worst.get(name, 0.0))
    for name in sorted(worst):
        terminalreporter.write_line(f"{name}: {worst[name]:.1e}")
