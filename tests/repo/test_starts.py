"""First kernels of the experiment log: `docs/research/starts.py` gives a model other kernels before it is trained."""

import runpy

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, TrainingArguments

from helpers.scripts import ROOT
from modeling_tnn.training.grouping_trainer import GroupingTrainer
from tnn_cli.parser import load_config, parse_overrides
from tnn_cli.training_arguments import GroupArguments

STARTS = runpy.run_path(str(ROOT / "docs" / "research" / "starts.py"))
FAMILIES, kernels_of, effective_rank, horizon = (
    STARTS[name] for name in ("FAMILIES", "kernels_of", "effective_rank", "horizon")
)
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "max_position_embeddings": 64, "vocab_size": 300}
# The recipes of the families have these.
RECIPES = {"kernels": {}, "ski": {"tno_type": "ski", "causal": False}, "fd": {"tno_type": "fd"}}


def model_of(name: str, family: str = "kernels"):
    start, fields = FAMILIES[family][name], SMALL | RECIPES[family]
    torch.manual_seed(0)
    auto_class = AutoModelForMaskedLM if family == "ski" else AutoModelForCausalLM
    model = auto_class.from_config(load_config("tnn-tiny", fields, parse_overrides(start.fields)))
    with torch.no_grad():
        start.change(model)
    return model


@pytest.mark.parametrize("family", RECIPES)
def test_every_start(family, tmp_path):
    """A model is built, and only what a start says has a rate of its own."""
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True, learning_rate=0.01)
    for name, start in FAMILIES[family].items():
        groups = GroupArguments(parameter_groups=start.groups(0.01)).groups()
        trainer = GroupingTrainer(model_of(name, family), arguments, groups=groups)
        found = {group["lr"] for group in trainer.create_optimizer().param_groups}
        assert found == ({0.01} if start.rate is None else {0.01, start.rate[1] * 0.01}), name
        assert all(np.isfinite(kernels).all() for kernels in kernels_of(trainer.model)), name


def test_options():
    """Groups of the command line stay beside those of a start, which is one that the family has."""
    number = list(FAMILIES["kernels"]).index("the same, encoder at 5 times the rate")
    args = STARTS["StartArguments"](variants=["rpe"], parameter_groups=["embed:learning_rate=1e-5"])
    given = STARTS["with_start"](args, number, 0.01).parameter_groups
    assert len(given) == 2 and given[1] == "embed:learning_rate=1e-5"
    with pytest.raises(ValueError, match="--starts must be from 0 to 4 with --family fd, got 3 5"):
        STARTS["StartArguments"](variants=["rpe"], family="fd", starts=[3, 5])
    assert STARTS["StartArguments"](variants=["rpe"], family="fd", starts=[4]).starts == [4]


RANKS = {
    "free: the identity": (1, 1),
    "free: all lags of a channel equal": (1, 1),
    "free: noise of norm 1 on the first 8 lags": (5, 8),
    "free: one lag for each channel, below 16": (12, 16),
    "free: its usual start, noise on all lags": (20, 64),
}


def test_kernels_are_those_that_the_start_names():
    """Free ones whatever the decay of the operator; time constants of 0.1 to 16 lags, of norm 1; identities."""
    for name, (least, most) in RANKS.items():
        for kernels in kernels_of(model_of(name)):
            assert least - 1e-6 <= effective_rank(kernels) <= most + 1e-6, name
            assert "usual" in name or np.linalg.norm(kernels, axis=1) == pytest.approx(1, rel=1e-5), name
    spread = model_of("`rpe`, learned decays of 0.1 to 16 lags")
    for operator, kernels in zip(STARTS["operators"](spread), kernels_of(spread), strict=True):
        assert np.linalg.norm(kernels, axis=1) == pytest.approx(1, rel=1e-4)
        rates = operator._decay_rate(torch.float32)[:, 0].detach().numpy()
        assert rates[[0, -1]] == pytest.approx(np.exp([-10, -1 / 16]), abs=1e-4) and (np.diff(rates) > 0).all()
    for kernels in kernels_of(model_of("the identity alone", "ski")):
        assert kernels == pytest.approx(np.eye(1, 127, 63).repeat(len(kernels), axis=0), abs=1e-6)
    usual, more = (kernels_of(model_of(name, "fd")) for name in ("output x 3", "plus the identity"))
    for first, second in zip(usual, more, strict=True):
        assert second - first / 3 == pytest.approx(np.eye(1, 64).repeat(len(first), axis=0), abs=1e-5)


def test_fitted_kernels():
    """Hat functions have them within 15%; the horizon is that of the kernels."""
    torch.manual_seed(1)
    model, make = model_of("`rpe`, the papers' start"), STARTS["LOCAL"]
    wanted = [make(48, 64).double().numpy() for _ in range(2)]
    kernels = iter(wanted)
    with torch.no_grad():
        STARTS["fitted"](lambda channels, length: torch.from_numpy(next(kernels)), with_hats=True)(model)
    for found, expected in zip(kernels_of(model), wanted, strict=True):
        assert np.linalg.norm(found - expected) < 0.15 * np.linalg.norm(expected)
        assert horizon(found) == pytest.approx(horizon(expected), abs=2)


def test_effective_rank_and_horizon():
    assert effective_rank(np.diag(np.arange(1.0, 9.0))) == pytest.approx(8), "whatever their norms"
    assert effective_rank(np.ones((8, 5))) == pytest.approx(1)
    assert horizon(np.array([[1.0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1]])) == 3
    assert horizon(np.array([[0.0, 0, 1, 0, 0], [0, 1, 1, 1, 0], [1, 0, 0, 0, 0]])) == 1
