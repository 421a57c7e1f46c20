"""The figures of `tnn benchmark` are of what their rows name."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Mamba2Config, Mamba2ForCausalLM

from helpers.models import seeded, tiny_config
from helpers.scripts import run, table_rows
from modeling_tnn import TnnForCausalLM
from modeling_tnn.cache_tnn import memory_per_sequence

SIZES = {"vocab_size": 99, "hidden_size": 16}
LLAMA = LlamaConfig(
    **SIZES, intermediate_size=16, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
)  # fmt: skip
MAMBA2 = Mamba2Config(
    **SIZES, num_hidden_layers=2, num_heads=4, head_dim=8, state_size=8, n_groups=1, chunk_size=16
)  # fmt: skip


@pytest.fixture
def measure(tmp_path):
    def measure(*options) -> tuple[list[dict], list[list[str]]]:
        """The rows of the file, and of the table that is shown."""
        shown = run("benchmark", *options, "--repeats", 1, "--output_file", tmp_path / "figures.json").stdout
        return json.loads((tmp_path / "figures.json").read_text())["rows"], table_rows(shown)[2:]

    return measure


@pytest.fixture
def folders(tmp_path):
    models = {"tnn": seeded(TnnForCausalLM, tiny_config("rpe", True)), "llama": LlamaForCausalLM(LLAMA)}
    models["mamba2"] = Mamba2ForCausalLM(MAMBA2)
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    return [str(tmp_path / name) for name in models]


def test_models(folders, measure):
    """The state is that of one sequence after the context and a token."""
    options = "--block_size 9 --tokens 30 --contexts 5 70 --batch_size 2"
    rows, shown = measure("models", options, "--model_name_or_path", *folders)
    assert [(row["model"], row["context"]) for row in rows] == [(f, c) for c in (5, 70) for f in folders]
    assert all(row["training_time"] == row["decoding_time"] == 1 for row in rows[::3])
    assert all(row["ms_per_token"] > 0 and row["training_tokens_per_second"] > 0 for row in rows)
    assert [cells[1] for cells in shown] == 3 * ["5"] + 3 * ["70"]
    states = {(row["model"], row["context"]): row["state_mebibytes"] * 2**20 for row in rows}
    model = TnnForCausalLM.from_pretrained(folders[0])
    for context in (5, 70):
        cache, one = None, torch.zeros(1, 1, dtype=torch.long)
        for ids in (one.expand(1, context), one):
            cache = model(ids, past_key_values=cache, use_cache=True).past_key_values
        assert states[folders[0], context] == memory_per_sequence(cache)
        # keys and values of float32, of 2 heads of 4, in 3 layers
        assert states[folders[1], context] == (context + 1) * 2 * 4 * 2 * 4 * 3
        # 4 heads of 8 with 8 states, and a convolution of 4 over 32 + 2 x 8 channels, in 2 layers
        assert states[folders[2], context] == (4 * 8 * 8 + 4 * 48) * 4 * 2
