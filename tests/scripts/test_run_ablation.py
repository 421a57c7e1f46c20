"""The ablation script: one small run, and that every length scores the same tokens."""

import pytest
import torch
from datasets import Dataset

from helpers.models import seeded, tiny_config
from helpers.scripts import TEXT, read, run, table_rows
from modeling_tnn import TnnForCausalLM, TnnForMaskedLM
from modeling_tnn.training import run_ablation
from modeling_tnn.training.scoring import score_tokens


def test_script(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    shown = run(
        "run_ablation", f"--dataset_name {tmp_path}/text.txt --output_dir {tmp_path}/out --max_steps 2 --longer 70",
        "--config_overrides hidden_size=16,num_hidden_layers=1,max_position_embeddings=16,vocab_size=300",
        "--variants rpe explicit:tno_type=explicit masked:causal=false --eval_tokens 100 --logging_steps 1",
        "--save_strategy no",
    ).stdout  # fmt: skip
    rows = read(tmp_path / "out")["rows"]
    assert [row["variant"] for row in rows] == ["rpe", "explicit", "masked"]
    assert all(list(row["perplexity"]) == ["16", "70"] and row["steps"] == 2 for row in rows)
    assert [row["scored_tokens"] for row in rows][:2] == [99, 99]
    losses = [row["training_loss"] for row in rows]
    assert all(list(loss) == ["1", "2"] and 4 < loss["1"] < 20 for loss in losses)
    assert table_rows(shown)[0][:3] == ["variant", "perplexity at 16", "perplexity at 70"]


def test_every_length_scores_the_same_tokens():
    """Predicted ones: all but the first. Masked ones: the same masks at each length, of rows that are not padded."""
    tokenizer = run_ablation.tokenizer_for(Dataset.from_dict({"text": ["The quick brown fox."]}), 300)
    ids = torch.randint(260, (100,), generator=torch.Generator().manual_seed(0))
    causal, masked = (
        seeded(model, tiny_config(causal=model is TnnForCausalLM, vocab_size=300)).eval()
        for model in (TnnForCausalLM, TnnForMaskedLM)
    )
    for length in (16, 33, 64, 99, 100):
        loss, count = run_ablation.score(causal, ids, tokenizer, length, 40)
        expected = score_tokens(causal, ids, length, None, 1000)
        assert count == len(expected) == 99 and loss == pytest.approx(expected.mean().item(), rel=1e-6)
        found = [run_ablation.score(masked, ids, tokenizer, length, rows * length) for rows in (1, 3)]
        assert found[0] == pytest.approx(found[1], rel=1e-6)
        assert found[0][1] == (run_ablation.mask(ids, tokenizer)[1] != -100).sum() and 5 < found[0][1] < 30
    (hidden, labels), losses = run_ablation.mask(ids, tokenizer), []
    for row in (slice(start, start + 33) for start in range(0, 100, 33)):
        logits = masked(hidden[None, row]).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits, labels[row], reduction="sum").item())
    loss, count = run_ablation.score(masked, ids, tokenizer, 33, 99)
    assert sum(losses) / count == pytest.approx(loss, rel=1e-5)
