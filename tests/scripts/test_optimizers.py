"""Groups of parameters with a learning rate or weight decay of their own, and optimizers by name."""

import pytest
import torch
from transformers import TrainingArguments

from helpers.models import seeded, tiny_config
from helpers.scripts import pretrain_options, run_script, weights
from modeling_tnn import TnnForCausalLM
from tnn_scripts.common.accelerate_loop import decayed_parameters
from tnn_scripts.common.optimizers import GroupArguments, GroupingTrainer, build_optimizer
from tnn_scripts.common.pretrain_arguments import PretrainArguments


@pytest.fixture
def model():
    return seeded(TnnForCausalLM, tiny_config())


def settings(optimizer: torch.optim.Optimizer, model: TnnForCausalLM) -> dict[str, tuple[float, float]]:
    """Learning rate and weight decay of each parameter."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [(names[id(p)], (group["lr"], group["weight_decay"])) for group in optimizer.param_groups
             for p in group["params"]]  # fmt: skip
    assert len(found) == len(names) == len(dict(found))
    return dict(found)


def by_pretrain(model, tmp_path, weight_decay=0.2, **options):
    args = PretrainArguments(learning_rate=0.1, weight_decay=weight_decay, **options)
    return build_optimizer(model, args, decayed_parameters(model))


def by_trainer(model, tmp_path, weight_decay=0.2, **options):
    args = TrainingArguments(output_dir=str(tmp_path), learning_rate=0.1, weight_decay=weight_decay)
    return GroupingTrainer(model, args, groups=GroupArguments(**options).groups()).create_optimizer()


@pytest.mark.parametrize("build", [by_pretrain, by_trainer])
def test_settings(build, model, tmp_path):
    plain = settings(build(model, tmp_path), model)
    assert set(plain.values()) == {(0.1, 0.2), (0.1, 0.0)}
    groups = ["embed_tokens:learning_rate=0.5", r"rpe\.in_proj:weight_decay=0.3,learning_rate=0.4"]
    changed = settings(build(model, tmp_path, operator_learning_rate=0.01, parameter_groups=groups), model)
    for name, value in changed.items():
        if "embed_tokens" in name:
            assert value == (0.5, plain[name][1])
        elif "rpe.in_proj" in name:
            assert value == (0.4, 0.3 if plain[name][1] else 0.0)
        elif ".tno." in name:
            assert value == (0.01, 0.0)
        else:
            assert value == plain[name]
    kept = settings(build(model, tmp_path, operator_weight_decay=0.3), model)
    assert {value for name, value in kept.items() if ".tno." in name} == {(0.1, 0.3), (0.1, 0.0)}
    alone = settings(build(model, tmp_path, weight_decay=0.0, operator_weight_decay=0.3), model)
    assert alone == {name: value if ".tno." in name else (0.1, 0.0) for name, value in kept.items()}


@pytest.mark.parametrize(
    "group",
    ["embed", "embed:rate=3", "a:weight_decay=x", "(:weight_decay=1", ":weight_decay=1", "a:weight_decay=-1"],
)
def test_groups_that_cannot_be_read(group):
    with pytest.raises(ValueError, match="`parameter_groups` must"):
        GroupArguments(parameter_groups=[group])


def test_a_pattern_that_finds_nothing(model, tmp_path):
    with pytest.raises(ValueError, match="'nowhere', which finds none"):
        by_pretrain(model, tmp_path, parameter_groups=["nowhere:learning_rate=1"])


def test_optimizers_by_name(model, tmp_path):
    options = {"optim": "sgd", "optim_args": "momentum=0.5"}
    assert by_pretrain(model, tmp_path, **options).defaults["momentum"] == 0.5
    with pytest.raises(ValueError, match="optim.* must be one of .*adamw_torch_fused"):
        PretrainArguments(optim="adamv")


def test_operators_stand_still(tmp_path):
    """A rate of 0 for the operators, as an option of the program; resumed with another rate it is another run."""
    options = [*pretrain_options(tmp_path, "clm"), "--output_dir", tmp_path / "out", "--checkpointing_steps", 5]
    run_script("pretrain", *options, "--operator_learning_rate", 0)
    first = weights(tmp_path / "out" / "checkpoint-5")
    last = weights(tmp_path / "out")
    still = {name for name in first if torch.equal(first[name], last[name])}
    assert still == {name for name in first if ".tno." in name}
    with pytest.raises(SystemExit, match="operator_learning_rate must be 0.0, got None"):
        run_script("pretrain", *options, "--resume_from_checkpoint", "latest", "--overwrite_output_dir")
