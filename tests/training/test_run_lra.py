"""The Long Range Arena: generators, tokens, pairs of passages, the heads for pairs, and the script at a small size."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    ByT5Tokenizer,
    ModernBertConfig,
    pipeline,
)

from helpers.models import relative_error, seeded, tiny_config
from helpers.programs import parse
from helpers.scripts import ROOT, read, run
from modeling_tnn.tools.sequence_pairs import ModernBertForSequencePairClassification, TnnForSequencePairClassification
from tnn_programs.cli.declared import training_options
from tnn_programs.data import lra, pathfinder
from tnn_programs.data.lra import TASKS, byte_tokenizer, encode_split, load_task
from tnn_programs.run_lra import LraArguments
from tnn_programs.training import run_lra


def value_of(source: str) -> int:
    """The value of an expression of ListOps, as Python computes it."""
    calls = re.sub(r"\[(\w+)", r"\1([", source).replace(" ]", " ])").replace(" ", ",").replace("[,", "[")
    functions = {"MIN": min, "MAX": max, "MED": lambda values: int(np.median(values)), "SM": lambda v: sum(v) % 10}
    return eval(calls, functions)  # noqa: S307


def test_generated_listops_keep_the_rules():
    rows = list(lra.listops_samples(60, seed=3))
    assert rows == list(lra.listops_samples(60, seed=3)) and len({row["source"] for row in rows}) == 60
    for row in rows:
        assert value_of(row["source"]) == row["target"]
        assert 500 < row["length"] == len(row["source"].split()) < 2000
        depth = np.cumsum([(token in lra.OPERATORS) - (token == lra.END) for token in row["source"].split()])
        assert depth.max() <= 9
    assert {token for row in rows for token in row["source"].split()} == set(lra.TOKENS)
    assert all(10 < row["length"] < 40 for row in lra.listops_samples(20, seed=0, shorter=10, longer=40))
    long = Dataset.from_dict({"source": ["[MAX 1 2 3 ]"] * 3, "target": [3] * 3})
    with pytest.raises(ValueError, match="--max_length must be at least the length of a sample, got 2"):
        encode_split(replace(TASKS["listops"], max_length=2), long)


@pytest.mark.parametrize("side", [16, 128])
def test_paths_keep_clear_of_each_other(side):
    geometry, rng, pair = pathfinder.GEOMETRIES[side], np.random.default_rng(0), None
    while pair is None:
        pair = pathfinder.two_paths(rng, geometry)
    for path in pair:
        assert path.shape == (3 if side == 16 else 14, 2, 2) and path.min() > 0 and path.max() < side
        np.testing.assert_allclose(np.linalg.norm(path[1:, 0] - path[:-1, 1], axis=1), geometry.gap)
        np.testing.assert_allclose(np.linalg.norm(path[:, 1] - path[:, 0], axis=1), geometry.dash)
    first, second = (pathfinder.points_on(path, geometry) for path in pair)
    assert np.linalg.norm(first[:, None] - second, axis=-1).min() >= geometry.clearance


def test_pathfinder_pictures():
    """Smaller ones have the size that `--max_length` says, for a model of as many positions."""
    assert all(len(row["pixels"]) == 1024 and max(row["pixels"]) == 255 for row in pathfinder.samples(4, 0, 32))
    args, _ = parse([LraArguments, training_options()], "--recipe lra/small-pathfinder --output_dir x")
    task, data = load_task(args.task, None, 20, args.max_length)
    assert task.max_length == run_lra.build_config(args, task).max_position_embeddings == 256
    assert {len(row) for split in data.values() for row in split["input_ids"]} == {256}
    assert data["validation"][0]["input_ids"] == next(pathfinder.samples(1, seed=1, side=16))["pixels"]
    assert TASKS["pathfinder"].max_length == 1024


def test_byte_tokenizer_loads_beside_a_transformer(tmp_path):
    ModernBertConfig().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    texts = ["A film, <br />and  a half.", "", "日本語 é\n\t\x00\x7f"]
    expected = ByT5Tokenizer(extra_ids=0)(texts, truncation=True, max_length=12)
    assert loaded(texts, truncation=True, max_length=12)["input_ids"] == expected["input_ids"]
    assert len(loaded) == 259
    assert loaded.decode(loaded(texts[2])["input_ids"], skip_special_tokens=True) == texts[2]


@pytest.mark.parametrize("kind", ["tnn", "transformer"])
def test_pairs_are_encoded_alone(kind, tmp_path):
    """Padding changes nothing; each text matters; what is saved is what is loaded; the loss is that of the labels."""
    build, config = TnnForSequencePairClassification, tiny_config(causal=False, num_labels=3)
    if kind == "transformer":
        build, sizes = ModernBertForSequencePairClassification, {"num_attention_heads": 2, "num_hidden_layers": 2}
        sizes |= {"vocab_size": 99, "hidden_size": 16, "intermediate_size": 16, "pad_token_id": 0, "num_labels": 3}
        config = ModernBertConfig(**sizes, global_attn_every_n_layers=1)
    model, ids, mask = seeded(build, config), torch.randint(1, 98, (2, 2, 12)), torch.ones(2, 2, 12, dtype=torch.long)
    mask[0, 0, 7:] = mask[1, 1, 2:] = 0
    logits = model(ids, mask).logits
    assert logits.shape == (2, 3) and relative_error(model(ids[1:], mask[1:]).logits, logits[1:]) < 1e-5
    assert relative_error(model(torch.where(mask == 1, ids, 5), mask).logits, logits) < 1e-5
    for side in (0, 1):
        other = ids.clone()
        other[:, side, 0] += 1
        assert (model(other, mask).logits - logits).abs().min() > 0
    loss = model(ids, mask, labels=torch.tensor([2, 0])).loss
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, torch.tensor([2, 0])))
    with pytest.raises(ValueError, match=r"shape \(B, 2, L\).*\(2, 12\)"):
        model(ids[:, 0])
    model.save_pretrained(tmp_path)
    assert torch.equal(build.from_pretrained(tmp_path)(ids, mask).logits, logits)


def test_presets():
    for folder in (ROOT / "configuration" / "lra").iterdir():
        config = AutoConfig.from_pretrained(folder)
        task = next(TASKS[name] for name in TASKS if folder.name.endswith(f"-{name}"))
        assert (config.vocab_size, config.num_labels) == (task.vocab_size, task.num_labels)
        assert config.max_position_embeddings == task.max_length


TINY = "--config_overrides hidden_size=8,num_hidden_layers=1,intermediate_size=8,rpe_dim=4"


def train(output: Path, *more) -> tuple[dict, str]:
    """What the program reports, and what it says."""
    fixed = f"--output_dir {output} --max_steps 2 --per_device_train_batch_size 2 --report_to none"
    written = run("run_lra", fixed, TINY, *more).stdout
    return read(output), written


def test_script_on_generated_listops(tmp_path):
    out = tmp_path / "out"
    results, written = train(out, "--task listops --config_name tnn-listops --max_train_samples 50",
                             "--operator_learning_rate 1e-4")  # fmt: skip
    assert (results["train_rows"], results["steps"], results["model"]) == (50, 2, "rpe")
    assert 0 <= results["test_accuracy"] <= 1 and 0.1 <= results["test_majority"] < 0.5
    assert "listops, rpe, test: accuracy" in written
    assert re.search(rf"saved in {out}\nnext:\n(.*\n)*    .*tnn push {out} --repo_id", written)
    classify = pipeline("text-classification", model=str(out))
    assert classify("[MAX 2 9 ]")[0]["label"].startswith("LABEL_")


@pytest.mark.parametrize("model", ["--config_name tnn-image", "--recipe lra/s4d-image"])
def test_script_on_pictures(model, tmp_path):
    """Of the form of `cifar10_gray`, read as ids or as numbers. Training pictures validate, a tenth of them."""
    rows = {"pixels": np.random.default_rng(0).integers(256, size=(6, 1024)).tolist(), "label": [0, 1, 2, 3, 4, 4]}
    for split in ("train", "test"):
        Dataset.from_dict(rows).to_parquet(tmp_path / "cifar10_gray" / f"{split}.parquet")
    configs = {"configs": [{"config_name": "cifar10_gray", "data_dir": "cifar10_gray"}]}
    (tmp_path / "README.md").write_text(f"---\n{json.dumps(configs)}\n---\n")
    results, _ = train(tmp_path / "out", f"--task image {model} --dataset_path {tmp_path}")
    reads_values = model.startswith("--recipe")
    assert (results["model"], results["grey"]) == (("s4d", [122.6, 61.0]) if reads_values else ("rpe", None))
    assert results["train_rows"] == 5 and results["test_majority"] == pytest.approx(1 / 3)
    trained, task = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out"), TASKS["image"]
    assert trained.main_input_name == ("input_values" if reads_values else "input_ids")
    _, data = load_task("image", str(tmp_path))
    split = [*data["train"]["input_ids"], *data["validation"]["input_ids"]]
    assert sorted(split) == sorted(rows["pixels"]) and data["test"]["input_ids"][:] == rows["pixels"]
    batch = run_lra.collate_values(*task.grey, [data["test"][0]])
    whole = torch.tensor(rows["pixels"][:1])[..., None] / 255
    torch.testing.assert_close(batch["input_values"], (whole - 122.6 / 255) / (61.0 / 255))


def test_script_on_pairs(tmp_path):
    """Of the form of the LRA release; a transformer of the same size."""
    for name in ("train", "eval", "test"):
        lines = [f'{label}\t1\t2\ta "text"\t{"b" * 20}' for label in ("1.0", "0.0", "1.0")]
        (tmp_path / f"new_aan_pairs.{name}.tsv").write_text("\n".join(lines) + "\n")
    results, _ = train(tmp_path / "out", "--task retrieval --config_name tnn-retrieval --max_length 16",
                       f"--dataset_path {tmp_path} --transformer")  # fmt: skip
    assert results["model"] == "transformer" and results["test_majority"] == pytest.approx(2 / 3)
    task, data = load_task("retrieval", str(tmp_path), None, 16)
    assert [len(ids) for ids in data["train"][0]["input_ids"]] == [9, 16] and data["train"]["labels"] == [1, 0, 1]
    assert task.tokenizer().decode(data["train"][0]["input_ids"][0], skip_special_tokens=True) == 'a "text"'


@pytest.mark.slow
def test_passages_of_two_books_are_told_apart(tmp_path):
    """Each book has its own letters. Both passages of a pair have the length that was asked for, less their ends."""
    texts = [(letters * 200)[start : start + 300] for letters in ("abcd ", "wxyz.") for start in (0, 300)]
    books = Dataset.from_dict({"text": texts, "title": ["a", "a", "b", "b"]})
    books.to_parquet(tmp_path / "books" / "train.parquet")
    made = [sys.executable, ROOT / "docs/research/passages.py", tmp_path / "books", "--length", "32", "--rows", "400"]
    subprocess.run([*made, "--output_dir", tmp_path / "pairs"], check=True)
    task, data = load_task("retrieval", str(tmp_path / "pairs"), 400, 32, 50)
    assert {name: len(rows) for name, rows in data.items()} == {"train": 400, "validation": 50, "test": 50}
    texts = [task.tokenizer().decode(ids, skip_special_tokens=True) for ids in data["train"][1]["input_ids"]]
    assert all(len(text) == 31 for text in texts) and len({frozenset(text) for text in texts}) == 1
    results, _ = train(
        tmp_path / "out", f"--recipe lra/small-retrieval --dataset_path {tmp_path}/pairs --max_length 32",
        "--max_steps 80 --max_train_samples 400 --max_eval_samples 100 --per_device_train_batch_size 16",
        "--config_overrides hidden_size=16,num_hidden_layers=1,intermediate_size=16",
    )  # fmt: skip
    assert results["test_accuracy"] > 0.9 > results["test_majority"]
