"""First kernels of the experiment log: `docs/starts.py` gives a model other kernels before it is trained."""

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, TrainingArguments

from tnn_scripts.common.arguments import load_config, parse_overrides
from tnn_scripts.common.optimizers import GroupArguments, GroupingTrainer

STARTS = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "starts.py"))
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "max_position_embeddings": 64, "vocab_size": 300}


def model_of(name: str):
    start = STARTS["STARTS"][name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(load_config("tnn-tiny", SMALL, parse_overrides(start.fields)))
    with torch.no_grad():
        start.change(model)
    return model


@pytest.mark.parametrize("name", STARTS["STARTS"])
def test_every_start(name, tmp_path):
    """A model is built, and only what a start says has a rate of its own."""
    groups = list(STARTS["STARTS"][name].groups)
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True, learning_rate=0.01)
    trainer = GroupingTrainer(model_of(name), arguments, groups=GroupArguments(parameter_groups=groups).groups())
    found = {group["lr"] for group in trainer.create_optimizer().param_groups}
    rates = {0.01} if not groups else {0.01, float(groups[0].split("=")[-1])}
    assert found == rates
    assert all(np.isfinite(kernels).all() for kernels in STARTS["kernels_of"](trainer.model))


@pytest.mark.parametrize(
    "name, rank",
    [
        ("free: the identity", (1, 1)),
        ("free: all lags of a channel equal", (1, 1)),
        ("free: noise of norm 1 on the first 8 lags", (5, 8)),
        ("free: one lag for each channel, below 16", (12, 16)),
        ("free: its usual start, noise on all lags", (20, 64)),
    ],
)
def test_free_kernels(name, rank):
    """They are those that the start names, whatever the decay of the operator."""
    for kernels in STARTS["kernels_of"](model_of(name)):
        assert rank[0] - 1e-6 <= STARTS["effective_rank"](kernels) <= rank[1] + 1e-6
        assert "usual" in name or np.linalg.norm(kernels, axis=1) == pytest.approx(1, rel=1e-5)


def test_fitted_kernels():
    """Hat functions have them within 15%; the horizon is that of the kernels."""
    torch.manual_seed(1)
    model, make = model_of("`rpe`, the papers' start"), STARTS["LOCAL"]
    wanted = [make(48, 64).double().numpy() for _ in range(2)]
    kernels = iter(wanted)
    with torch.no_grad():
        STARTS["fitted"](lambda channels, length: torch.from_numpy(next(kernels)), with_hats=True)(model)
    for found, expected in zip(STARTS["kernels_of"](model), wanted, strict=True):
        assert np.linalg.norm(found - expected) < 0.15 * np.linalg.norm(expected)
        assert STARTS["horizon"](found) == pytest.approx(STARTS["horizon"](expected), abs=2)


def test_effective_rank_and_horizon():
    assert STARTS["effective_rank"](np.eye(8)) == pytest.approx(8)
    assert STARTS["effective_rank"](np.ones((8, 5))) == pytest.approx(1)
    assert STARTS["horizon"](np.array([[1.0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1]])) == 3
