"""The demo, at a size that takes seconds: corpus, tokenizer, training, saving, sampling."""

import json

import pytest
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers import processes
from helpers.models import exhaustive
from helpers.scripts import SENTENCES, program
from modeling_tnn import TnnConfig
from tnn_scripts.data.text import load_corpus, pack, train_tokenizer


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text("\n".join(SENTENCES * 400))
    return path


@pytest.mark.parametrize("tno_type", ["rpe", *exhaustive("fd", "rtf")])
def test_demo(tno_type, text_file, tmp_path):
    """A model that has seen three sentences 400 times knows them."""
    preset, output = tmp_path / "preset", tmp_path / "output"
    config = TnnConfig(
        vocab_size=400, hidden_size=32, num_hidden_layers=2, max_position_embeddings=32, hidden_dropout_prob=0.0,
        rpe_dim=16, rpe_layers=1, rtf_state_size=4,
    )  # fmt: skip
    config.save_pretrained(preset)
    options = f"--config {preset} --output_dir {output} --dataset {text_file} --tno_type {tno_type} --max_steps 60"
    options += " --batch_size 8 --learning_rate 0.01 --prompt Pack --max_new_tokens 12"
    run = processes.run(program("demo", *options.split()), check=True, cwd=tmp_path)
    metrics = json.loads((output / "metrics.json").read_text())
    assert metrics["perplexity_before"] > 100 > 3 > metrics["perplexity"]
    assert metrics["tokens"] == 60 * 8 * 32
    assert json.loads((output / "training_args.json").read_text())["tno_type"] == tno_type
    assert "Pack my box with five dozen jugs" in metrics["text"]
    assert metrics["text"] in run.stdout + run.stderr
    assert AutoModelForCausalLM.from_pretrained(output).config.tno_type == tno_type
    assert AutoTokenizer.from_pretrained(output).decode([0]) == "<s>"


def test_demo_corpus():
    corpus = load_corpus()
    characters = sum(len(text) for split in corpus.values() for text in split["text"])
    assert characters > 4_000_000
    assert corpus["train"][0]["text"].startswith("In the beginning")
    assert len(corpus["validation"]) == pytest.approx(0.05 * 31_103, rel=0.01)


def test_sources(text_file, tmp_path):
    Dataset.from_dict({"text": SENTENCES, "id": [1, 2, 3]}).to_parquet(tmp_path / "train.parquet")
    Dataset.from_dict({"text": SENTENCES[:1], "id": [4]}).to_parquet(tmp_path / "validation.parquet")
    folder = load_corpus(str(tmp_path))
    assert folder["train"]["text"] == SENTENCES and folder["validation"]["text"] == SENTENCES[:1]
    assert load_corpus(str(text_file))["train"][1]["text"] == SENTENCES[1]


def test_source_without_text(tmp_path):
    Dataset.from_dict({"sentence": SENTENCES}).to_parquet(tmp_path / "train.parquet")
    with pytest.raises(ValueError, match="--text_column must be .* sentence, got text"):
        load_corpus(str(tmp_path))


def test_blocks_hold_the_text(text_file):
    corpus = load_corpus(str(text_file))
    tokenizer = train_tokenizer(corpus["train"], 400)
    blocks = pack(corpus["train"], tokenizer, 32)
    assert {len(block) for block in blocks["input_ids"]} == {32}
    joined = tokenizer.decode([token for block in blocks["input_ids"] for token in block])
    text = "".join(line + "\n" for line in corpus["train"]["text"])
    assert text.startswith(joined) and len(text) - len(joined) < 32 * 20
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1, 2)
