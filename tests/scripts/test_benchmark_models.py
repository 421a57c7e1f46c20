"""The benchmark of trained models: every figure is of the model, the length and the context that its row names."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Mamba2Config, Mamba2ForCausalLM

from helpers.models import seeded, tiny_config
from modeling_tnn import TnnForCausalLM
from modeling_tnn.cache_tnn import memory_per_sequence
from tnn_scripts.benchmarks import models as suite

LLAMA = LlamaConfig(
    vocab_size=99,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)
MAMBA2 = Mamba2Config(
    vocab_size=99,
    hidden_size=16,
    num_hidden_layers=2,
    num_heads=4,
    head_dim=8,
    state_size=8,
    n_groups=1,
    chunk_size=16,
)


@pytest.fixture
def folders(tmp_path):
    models = {"tnn": seeded(TnnForCausalLM, tiny_config("rpe", True)), "llama": LlamaForCausalLM(LLAMA)}
    models["mamba2"] = Mamba2ForCausalLM(MAMBA2)
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    return {name: str(tmp_path / name) for name in models}


def settings(folders, **changes):
    given = {"model_name_or_path": list(folders), "block_size": 9, "tokens": 30, "bf16": False, "contexts": [5, 70]}
    return SimpleNamespace(**(given | {"batch_size": 2, "repeats": 2, "threads": 1, "device": "cpu"} | changes))


def test_one_row_for_each_model_and_context(folders):
    rows = suite.run(settings(folders.values()))
    assert [(row["model"], row["context"]) for row in rows] == [(f, c) for c in (5, 70) for f in folders.values()]
    for row in rows[::3]:
        assert row["training_time"] == row["decoding_time"] == 1
    assert all(row["ms_per_token"] > 0 and row["training_tokens_per_second"] > 0 for row in rows)
    assert suite.table(rows).count("\n") == 7
    assert suite.table(rows).splitlines()[3].split("|")[2].strip() == "5"


def test_the_state_is_that_of_one_sequence_after_the_context(folders):
    states = {
        (row["model"], row["context"]): row["state_mebibytes"] * 2**20 for row in suite.run(settings(folders.values()))
    }
    for context in (5, 70):
        # keys and values of float32, of 2 heads of 4, in 3 layers
        assert states[folders["llama"], context] == context * 2 * 4 * 2 * 4 * 3
        model = TnnForCausalLM.from_pretrained(folders["tnn"])
        cache = model(torch.zeros(1, context, dtype=torch.long), use_cache=True).past_key_values
        assert states[folders["tnn"], context] == memory_per_sequence(cache)
    # 4 heads of 8 with 8 states, and a convolution of 4 over 32 + 2 x 8 channels, in 2 layers
    assert states[folders["mamba2"], 5] == states[folders["mamba2"], 70] == (4 * 8 * 8 + 4 * 48) * 4 * 2


@pytest.mark.parametrize("bf16", [False, True])
def test_a_training_step_is_a_backward_pass(folders, bf16, monkeypatch):
    """The loss of every row, in the precision that was asked for, and no gradient is left behind."""
    model = TnnForCausalLM.from_pretrained(folders["tnn"])
    seen = {}
    model.model.embed_tokens.weight.register_hook(lambda gradient: seen.update(norm=gradient.norm().item()))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = []

    def loss(model, ids):
        found.append((tuple(ids.shape), torch.is_autocast_enabled("cpu")))
        return same_loss(model, ids)

    same_loss = suite.training_loss
    monkeypatch.setattr(suite, "training_loss", loss)
    suite.training_step(model, settings(folders.values(), bf16=bf16))()
    assert found == [((3, 9), bf16)]
    assert seen["norm"] > 0 and all(parameter.grad is None for parameter in model.parameters())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
