"""Copying, Delay, Recall and Passkey, and ablations: their rows and scores, and both programs at a small size."""

import pytest
import torch
from datasets import Dataset

from helpers.models import seeded, tiny_config
from helpers.scripts import TEXT, read, run, table_rows
from modeling_tnn import TnnForCausalLM, TnnForMaskedLM
from tnn_programs.data.synthetic import BAND, IGNORED, Copying, Delay, Passkey, Recall
from tnn_programs.run_synthetic import SyntheticArguments
from tnn_programs.training import run_ablation, run_synthetic
from tnn_programs.training.scoring import score_tokens


def test_copying_rows():
    rows = Copying(50, seed=3, memory=4, num_tokens=6)
    row = rows[7]
    assert len(rows) == 50 and row["input_ids"].tolist()[4:] == [5] * 5
    assert row["labels"].tolist()[:5] == [-100] * 5 and torch.equal(row["labels"][5:], row["input_ids"][:4])
    assert torch.equal(Copying(50, 3, 4, 6)[7]["input_ids"], row["input_ids"])
    assert not torch.equal(Copying(50, 4, 4, 6)[7]["input_ids"], row["input_ids"])
    assert {token for row in rows for token in row["input_ids"].tolist()} == set(range(6))


def test_copying_is_scored_where_the_loss_is():
    """A model that answers each marker right has accuracy 1; one answer too late has not."""
    labels = torch.stack([row["labels"] for row in (Copying(3, 0, 5, 8)[index] for index in range(3))])
    answers = torch.zeros_like(labels)
    answers[:, 5:10] = labels[:, 6:]
    for shift in (0, 1):
        shifted = answers.roll(shift, dims=1)
        assert (run_synthetic.token_accuracy(shifted.numpy(), labels.numpy())["accuracy"] == 1) == (shift == 0)


def test_delay_rows():
    row = Delay(5, seed=0, length=100, lag=30)[2]
    assert torch.equal(row["labels"][30:], row["signal"][:70]) and row["labels"][:30].abs().max() == 0
    spectrum = torch.fft.rfft(row["signal"]).abs()
    assert spectrum[int(BAND * 51) :].max() < 1e-4 and spectrum[: int(BAND * 51)].min() > 1e-3
    assert row["signal"].square().mean().item() == pytest.approx(1, rel=1e-5)


def test_recall_rows():
    """Each key is asked for once, somewhere behind the pairs, and the label behind it is its value."""
    rows, places = Recall(200, seed=3, pairs=4, length=20, num_tokens=13), set()
    for row in rows:
        ids, labels = row["input_ids"].tolist(), row["labels"].tolist()
        pairs = dict(zip(ids[:8:2], ids[1:8:2], strict=True))
        assert len(pairs) == 4 and max(pairs) < 6 <= min(pairs.values()) and max(pairs.values()) < 12
        asked = [place for place in range(8, 20) if ids[place] != 12]
        assert sorted(ids[place] for place in asked) == sorted(pairs)
        answers = {place: label for place, label in enumerate(labels) if label != IGNORED}
        assert answers == {place + 1: pairs[ids[place]] for place in asked}
        places |= set(asked)
    assert places == set(range(8, 19))


def test_passkey_rows():
    """The tokens behind the first marker are those to say at the end."""
    rows, starts = Passkey(200, seed=3, digits=3, length=16, num_tokens=9), set()
    for row in rows:
        ids, labels = row["input_ids"].tolist(), row["labels"].tolist()
        start, last = (place for place, token in enumerate(ids) if token == 8)
        assert last == 12 and ids[start : start + 4] == ids[12:] and min(ids[13:]) >= 4
        assert max(ids[:start] + ids[start + 4 : last], default=0) < 4
        assert labels == [IGNORED] * 13 + ids[13:]
        starts.add(start)
    assert starts == set(range(9))


def arguments(**fields):
    given = {"task": "copying"} | fields
    models = {"variants": ["pure"], "memory": 4} if given["task"] in ("recall", "passkey") else {"state_sizes": [4]}
    return SyntheticArguments(**models | given)


def test_states_and_blocks_of_the_models():
    """States are those of the operator that is chosen. Overrides reach all models, below those of a variant."""
    args = arguments(config_overrides="tno_type=s4d", state_sizes=[4, 6])
    for states, config in args.models().items():
        (operator,) = {type(module) for module in TnnForCausalLM(config).modules() if hasattr(module, "num_modes")}
        assert operator.__name__ == "S4dOperator" and config.s4d_state_size == states
    recall = {"task": "recall", "num_tokens": 12, "length": 20}
    for fields in ({}, recall):
        (config,) = arguments(config_overrides="toeplitz_mixer=s4,use_glu=False", **fields).models().values()
        assert config.toeplitz_mixer == "s4" and not config.use_glu and config.gtu_expansion == 1
    args = arguments(config_overrides="toeplitz_mixer=s4", variants=["pure:toeplitz_mixer=gtu"], **recall)
    assert args.models()["pure"].toeplitz_mixer == "gtu"


def test_refused_arguments():
    for fields, message in (
        ({"memory": 10, "state_sizes": [21]}, "--state_sizes must be at least 1 and at most 20 .*, got 21"),
        ({"task": "delay", "memory": 50, "length": 50}, "--length must be at least 51 for delay, got 50"),
        ({"task": "recall", "num_tokens": 8}, "--num_tokens must be at least 9 for recall, got 8"),
        ({"task": "recall", "length": 12}, "--length must be at least 13 for recall, got 12"),
        ({"task": "passkey", "longer": [9]}, "--longer must be at least 10 for passkey, got 9"),
        ({"task": "recall", "state_sizes": [4]}, "--state_sizes must be left out for recall, got 4"),
        ({"task": "recall", "variants": []}, "--variants must be given for recall, got nothing"),
        ({"task": "recall", "variants": ["a:tno_type=x"]}, "--variants a: `tno_type` must be"),
    ):
        with pytest.raises(ValueError, match=message):
            arguments(**fields)


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
