"""Copying, Delay, Recall and Passkey, and ablations: their rows and scores, and both programs at a small size."""

from unittest.mock import patch

import pytest
import torch
from datasets import Dataset
from transformers import Qwen3_5TextConfig

from helpers.models import seeded, tiny_config
from helpers.scripts import TEXT, read, run, table_rows
from modeling_tnn import TnnForCausalLM, TnnForMaskedLM
from modeling_tnn.tools.comparing import score_tokens
from tnn_programs.data.synthetic import (
    BAND,
    IGNORED,
    Copying,
    Delay,
    DelayedTokens,
    Passkey,
    Recall,
    SelectiveCopying,
)
from tnn_programs.run_synthetic import SyntheticArguments
from tnn_programs.training import run_ablation, run_synthetic
from tnn_programs.training.comparing import Task
from tnn_programs.training.peers import start_decays


def test_copying_rows():
    rows = Copying(50, seed=3, memory=4, length=9, num_tokens=6)
    row = rows[7]
    assert len(rows) == 50 and row["input_ids"].tolist()[4:] == [5] * 5
    assert row["labels"].tolist()[:5] == [-100] * 5 and torch.equal(row["labels"][5:], row["input_ids"][:4])
    assert torch.equal(Copying(50, 3, 4, 9, 6)[7]["input_ids"], row["input_ids"])
    assert not torch.equal(Copying(50, 4, 4, 9, 6)[7]["input_ids"], row["input_ids"])
    assert {token for row in rows for token in row["input_ids"].tolist()} == set(range(6))


def test_copying_is_scored_where_the_loss_is():
    """A model that answers each marker right has accuracy 1; one answer too late has not."""
    labels = torch.stack([row["labels"] for row in (Copying(3, 0, 5, 11, 8)[index] for index in range(3))])
    answers = torch.zeros_like(labels)
    answers[:, 5:10] = labels[:, 6:]
    for shift in (0, 1):
        shifted = answers.roll(shift, dims=1)
        assert (run_synthetic.TokenTask.scores(shifted.numpy(), labels.numpy())["accuracy"] == 1) == (shift == 0)


def test_delay_rows():
    row = Delay(5, seed=0, length=100, lag=30)[2]
    assert torch.equal(row["labels"][30:], row["signal"][:70]) and row["labels"][:30].abs().max() == 0
    spectrum = torch.fft.rfft(row["signal"]).abs()
    assert spectrum[int(BAND * 51) :].max() < 1e-4 and spectrum[: int(BAND * 51)].min() > 1e-3
    assert row["signal"].square().mean().item() == pytest.approx(1, rel=1e-5)


def test_recall_rows():
    """Each key is asked for once, somewhere behind the pairs, and the label behind it is its value."""
    rows, places = Recall(200, seed=3, memory=4, length=20, num_tokens=13), set()
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


def test_selective_copying_and_delayed_tokens():
    """The tokens to copy keep their order, at any places; each token comes back when the loss looks for it."""
    places = set()
    for row in SelectiveCopying(200, seed=3, memory=3, length=12, num_tokens=9):
        ids, labels = row["input_ids"].tolist(), row["labels"].tolist()
        assert ids[8:] == [8] * 4 and max(ids[:8]) < 8 and labels[:9] == [IGNORED] * 9
        assert [token for token in ids[:8] if token >= 4] == labels[9:]
        places |= {place for place, token in enumerate(ids[:8]) if token >= 4}
    assert places == set(range(8))
    row = DelayedTokens(5, seed=0, memory=3, length=12, num_tokens=9)[1]
    assert row["labels"].tolist() == [IGNORED] * 4 + row["input_ids"].tolist()[:8]


def test_passkey_rows():
    """The tokens behind the first marker are those to say at the end."""
    rows, starts = Passkey(200, seed=3, memory=3, length=16, num_tokens=9), set()
    for row in rows:
        ids, labels = row["input_ids"].tolist(), row["labels"].tolist()
        start, last = (place for place, token in enumerate(ids) if token == 8)
        assert last == 12 and ids[start : start + 4] == ids[12:] and min(ids[13:]) >= 4
        assert max(ids[:start] + ids[start + 4 : last], default=0) < 4
        assert labels == [IGNORED] * 13 + ids[13:]
        starts.add(start)
    assert starts == set(range(9))


def arguments(**fields):
    given = {"task": ["copying"]} | fields
    by_state = given["task"][0] in ("copying", "delay")
    models = {"state_sizes": [4]} if by_state else {"variants": ["pure"], "memory": 4}
    return SyntheticArguments(**models | given)


def configs(args) -> list:
    return [args.variant_config(variant) for variant in args.compared]


def test_states_and_blocks_of_the_models():
    """States are those of the operator that is chosen. Overrides reach all models, below those of a variant."""
    args = arguments(config_overrides="tno_type=s4d", state_sizes=[4, 6])
    for states, config in zip((4, 6), configs(args), strict=True):
        (operator,) = {type(module) for module in TnnForCausalLM(config).modules() if hasattr(module, "num_modes")}
        assert operator.__name__ == "S4dOperator" and config.s4d_state_size == states
    recall = {"task": ["recall"], "num_tokens": 12, "length": 20}
    for fields in ({}, recall):
        (config,) = configs(arguments(config_overrides="toeplitz_mixer=s4,use_glu=False", **fields))
        assert config.toeplitz_mixer == "s4" and not config.use_glu and config.gtu_expansion == 1
    args = arguments(config_overrides="toeplitz_mixer=s4", variants=["pure:toeplitz_mixer=gtu"], **recall)
    assert configs(args)[0].toeplitz_mixer == "gtu"


def test_refused_arguments():
    for fields, message in (
        ({"memory": 10, "state_sizes": [21]}, "--state_sizes must be at least 1 and at most 20 .*, got 21"),
        ({"task": ["delay"], "memory": 50, "length": 50}, "--length must be at least 51 for delay, got 50"),
        ({"task": ["recall"], "num_tokens": 8}, "--num_tokens must be at least 9 for recall, got 8"),
        ({"task": ["recall"], "length": 12}, "--length must be at least 13 for recall, got 12"),
        ({"task": ["passkey"], "longer": [9]}, "--longer must be at least 10 for passkey, got 9"),
        ({"task": ["recall"], "state_sizes": [4]}, "--state_sizes must be left out for recall, got 4"),
        ({"task": ["recall"], "variants": []}, "--variants must be given for recall, got nothing"),
        ({"task": ["recall"], "variants": ["a:tno_type=x"]}, "--variants a: `tno_type` must be"),
        ({"task": ["recal"]}, "--task must be one of copying, .*, got recal"),
        ({"task": ["recall:memry=4"]}, "--task recall must be fields of TaskOptions, got memry; did you mean memory?"),
        ({"task": ["recall:length=12"], "num_tokens": 12}, "--length must be at least 13 for recall, got 12"),
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
        loss, count = run_ablation.text_loss(causal, ids, tokenizer, length, 40)
        expected = score_tokens(causal, ids, length, None, 1000)
        assert count == len(expected) == 99 and loss == pytest.approx(expected.mean().item(), rel=1e-6)
        found = [run_ablation.text_loss(masked, ids, tokenizer, length, rows * length) for rows in (1, 3)]
        assert found[0] == pytest.approx(found[1], rel=1e-6)
        assert found[0][1] == (run_ablation.mask(ids, tokenizer)[1] != -100).sum() and 5 < found[0][1] < 30
    (hidden, labels), losses = run_ablation.mask(ids, tokenizer), []
    for row in (slice(start, start + 33) for start in range(0, 100, 33)):
        logits = masked(hidden[None, row]).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits, labels[row], reduction="sum").item())
    loss, count = run_ablation.text_loss(masked, ids, tokenizer, 33, 99)
    assert sum(losses) / count == pytest.approx(loss, rel=1e-5)


VARIANTS = (
    "--variants fd:tno_type=fd llama:model=llama-tiny,num_attention_heads=2 "
    "mamba:model=mamba2-tiny,num_heads=2,head_dim=16 "
    "delta:model=transformers.Qwen3_5TextConfig,layer_types=[linear_attention],linear_num_key_heads=2,"
    "linear_num_value_heads=2,linear_key_head_dim=4,linear_value_head_dim=4,num_attention_heads=2,head_dim=4"
)


def test_a_gated_deltanet_starts_with_a_memory():
    """The decay of a token is at most exp(-A / 10), not exp(-1.3 A)."""
    config = Qwen3_5TextConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, layer_types=["linear_attention"])
    layer = start_decays(Task.model(None, config)).model.layers[0].linear_attn
    steps = torch.nn.functional.softplus(layer.dt_bias)
    assert steps.min() >= 0.00099 and steps.max() <= 0.101 and steps.std() > 0.01


def test_other_models_are_compared_at_equal_parameters_and_runs_are_kept(tmp_path):
    """In several tasks, at the best rate with a further seed; what is in the file is not trained again."""
    (tmp_path / "text.txt").write_text(TEXT)
    given = (
        f"--dataset_name {tmp_path}/text.txt --output_dir {tmp_path}/out --max_steps 1 --num_tokens 33 --length 16",
        "--hidden_size 16 --num_hidden_layers 1 --equal_parameters --sweep_learning_rates 1e-3 1e-2 --seeds 0 1",
        "--task recall:memory=3,longer=[20] text:num_tokens=261 --seeds_at_best --max_eval_samples 4 --contexts 5",
        "--config_overrides rpe_dim=4 --eval_tokens 40 --per_device_train_batch_size 2 --use_cpu --save_strategy no",
    )
    with patch("tnn_programs.training.comparing.start_decays", side_effect=start_decays) as started:
        shown = run("run_synthetic", *given, VARIANTS).stdout
    found = read(tmp_path / "out")
    rows = found["rows"]
    names = ["fd", "llama", "mamba", "delta"]
    assert [row["variant"] for row in rows] == [name for name in 2 * names for _ in range(3)]
    assert started.call_count == len(rows)
    for task, metric, lengths in (("recall", "accuracy", ["16", "20"]), ("text", "bits per byte", ["16"])):
        own = [row for row in rows if row["task"] == task]
        assert len(own) == 12 and all(list(row[metric]) == lengths for row in own)
        assert all(abs(row["parameters"] / own[0]["parameters"] - 1) <= 0.05 for row in own)
        for first, second, last in (own[i : i + 3] for i in range(0, 12, 3)):
            assert (first["seed"], second["seed"], last["seed"]) == (0, 0, 1)
            scores = [row[metric]["16"] for row in (first, second)]
            best = scores.index(min(scores) if task == "text" else max(scores))
            assert last["learning_rate"] == (first, second)[best]["learning_rate"]
    assert [row["model"] for row in found["costs"]] == names and all(row["state_bytes"] > 0 for row in found["costs"])
    assert [line[0] for line in table_rows(shown)].count("llama") == 3
    assert (tmp_path / "out/all_results.md").read_text().strip() in shown
    with patch("tnn_programs.training.comparing.Task.trainer", side_effect=AssertionError):
        run("run_synthetic", *given, VARIANTS)
    assert read(tmp_path / "out")["rows"] == rows
    refused = run("run_synthetic", *given, "--variants a b:use_glu=false,gtu_expansion=9", check=False)
    assert refused.returncode and "--equal_parameters: `config` must allow" in refused.stderr
