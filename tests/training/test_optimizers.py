"""Groups of parameters with a learning rate or weight decay of their own, and optimizers by name."""

import copy
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


def by_muon(model, tmp_path, **options):
    return by_pretrain(model, tmp_path, optim="muon", **options)


def by_trainer(model, tmp_path, weight_decay=0.2, **options):
    args = TrainingArguments(output_dir=str(tmp_path), learning_rate=0.1, weight_decay=weight_decay)
    return GroupingTrainer(model, args, groups=GroupArguments(**options).groups()).create_optimizer()


@pytest.mark.parametrize("build", [by_pretrain, by_muon, by_trainer])
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


def with_gradients(model) -> TnnForCausalLM:
    for seed, parameter in enumerate(model.parameters()):
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    return model


def is_for_muon(name: str, parameter: torch.Tensor) -> bool:
    return parameter.ndim == 2 and not any(part in name for part in (".tno.", "embed_tokens", "lm_head"))


@pytest.mark.parametrize("tied", [True, False])
def test_muon_is_for_matrices_of_hidden_layers(tied, tmp_path):
    """Its steps and those of AdamW for the rest are PyTorch's own, with the same rate; so are they when resumed."""
    model = with_gradients(seeded(TnnForCausalLM, tiny_config(tie_word_embeddings=tied)))
    other = with_gradients(copy.deepcopy(model))
    optimizer = by_muon(model, tmp_path)
    named, decayed = dict(other.named_parameters()), decayed_parameters(other)
    matrices = [name for name in named if is_for_muon(name, named[name])]
    assert matrices and all("proj" in name for name in matrices)
    expected = [
        torch.optim.Muon([named[n] for n in matrices], 0.1, 0.2, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [
                {"params": [named[n] for n in sorted(decayed - set(matrices))], "weight_decay": 0.2},
                {"params": [p for n, p in named.items() if n not in decayed], "weight_decay": 0.0},
            ],
            0.1, (0.9, 0.98), fused=True,
        ),
    ]  # fmt: skip
    for step in range(3):
        if step == 2:
            saved, optimizer = copy.deepcopy(optimizer.state_dict()), by_muon(model, tmp_path)
            optimizer.load_state_dict(saved)
        for one in (optimizer, *expected):
            one.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, named[name]), name


def test_muon_skips_a_step(model, tmp_path):
    """By a flag on the device: neither weights nor state change, in the first step and in a later one."""
    optimizer = by_muon(with_gradients(model), tmp_path)
    for flag in (1.0, 0.0, 1.0):
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
        optimizer.found_inf = torch.tensor(flag)
        optimizer.step()
        after = model.state_dict(), optimizer.state_dict()["state"]
        same = [torch.equal(after[0][name], value) for name, value in before[0].items()]
        assert all(same) if flag else not any(same)
        if flag and before[1]:
            torch.testing.assert_close(after[1], before[1], rtol=0, atol=0)
    assert optimizer.step(lambda: 7) == 7
    optimizer.grad_scale = torch.tensor(2.0)
    with pytest.raises(ValueError, match="`grad_scale` must be None"):
        optimizer.step()


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
