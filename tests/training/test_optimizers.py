"""Groups of parameters with a learning rate or weight decay of their own, and optimizers by name."""

import json

import pytest
import torch
from transformers import ModernBertConfig, ModernBertForMaskedLM, TrainingArguments

from helpers.models import seeded, tiny_config
from helpers.scripts import pretrain_options, run_script, weights
from modeling_tnn import TnnForCausalLM
from tnn_programs.cli.training_arguments import GroupArguments, PretrainArguments
from tnn_programs.training.grouping_trainer import GroupingTrainer
from tnn_programs.training.optimizers import build_optimizer, decayed_parameters


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
    for name, parameter in model.named_parameters():
        matrix = parameter.ndim == 2 and "bias" not in name and "norm" not in name
        assert plain[name][1] == (0.2 if matrix else 0.0), "weight decay is for matrices"
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


def test_what_is_refused(model, tmp_path):
    for group in ("embed", "embed:rate=3", "a:weight_decay=x", "(:weight_decay=1", ":weight_decay=1",
                  "a:weight_decay=-1"):  # fmt: skip
        with pytest.raises(ValueError, match="`parameter_groups` must"):
            GroupArguments(parameter_groups=[group])
    with pytest.raises(ValueError, match="'nowhere', which has none"):
        by_pretrain(model, tmp_path, parameter_groups=["nowhere:learning_rate=1"])
    assert by_pretrain(model, tmp_path, optim="sgd", optim_args="momentum=0.5").defaults["momentum"] == 0.5


def test_operators_stand_still(tmp_path):
    """A rate of 0 for the operators, as an option of the program; resumed with another rate it is another run."""
    options = [
        *pretrain_options(tmp_path, "clm"),
        f"--output_dir {tmp_path}/out --checkpointing_steps 5 --max_steps 7",
    ]
    run_script("pretrain", *options, "--operator_learning_rate 0")
    first, last = weights(tmp_path / "out" / "checkpoint-5"), weights(tmp_path / "out")
    still = {name for name in first if torch.equal(first[name], last[name])}
    assert still == {name for name in first if ".tno." in name}
    with pytest.raises(SystemExit, match="operator_learning_rate must be 0.0, got None"):
        run_script("pretrain", *options, "--resume_from_checkpoint latest --overwrite_output_dir")


def test_a_model_without_a_cache_gets_none(tmp_path, caplog, monkeypatch):
    """Trainer gives every configuration a `use_cache`; it is not saved with one that has no such field.

    A CPU without fast products in bfloat16 is named.
    """
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = ModernBertConfig(vocab_size=50, pad_token_id=0, eos_token_id=1, bos_token_id=1, **sizes)
    args = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, bf16=True)
    GroupingTrainer(ModernBertForMaskedLM(config), args).save_model()
    assert "on a CPU: --bf16 false is faster" in caplog.text
    assert "use_cache" not in json.loads((tmp_path / "config.json").read_text())
