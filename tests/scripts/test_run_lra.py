"""The Long Range Arena: generators, tokens, the head for pairs, and the script at a size that takes seconds."""

import json
import random
import re
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
from modeling_tnn import TnnConfig
from tnn_scripts.common.arguments import parse_arguments, training_options
from tnn_scripts.common.sequence_pairs import TnnForSequencePairClassification
from tnn_scripts.data import listops, pathfinder
from tnn_scripts.data.lra import TASKS, byte_tokenizer, encode_split, load_task
from tnn_scripts.run_lra import main
from tnn_scripts.runs import run_lra

ROOT = Path(__file__).parents[2]

PRESETS = sorted((ROOT / "configuration" / "lra").iterdir())
RECIPES = sorted((ROOT / "configuration" / "recipes" / "lra").glob("*.yaml"))


@pytest.mark.parametrize(
    "source, value",
    [
        ("7", 7),
        ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9),
        ("[MED 1 2 ]", 1),
        ("[MED 9 1 [SM 9 9 ] ]", 8),
        ("[SM 8 5 [MIN 6 6 1 ] [MED 0 1 4 8 6 ] ]", 8),
    ],
)
def test_value_of_an_expression(source, value):
    assert listops.evaluate(source) == value


@pytest.mark.parametrize("source", ["[MAX 1 2", "1 2", "[MAX ]", "[SUM 1 2 ]", "]", ""])
def test_what_is_no_expression(source):
    with pytest.raises(ValueError):
        listops.evaluate(source)


def test_generated_listops_keep_the_rules():
    rows = list(listops.samples(60, seed=3))
    assert rows == list(listops.samples(60, seed=3)) and len({row["source"] for row in rows}) == 60
    for row in rows:
        assert listops.evaluate(row["source"]) == row["target"]
        assert 500 < row["length"] == len(row["source"].split()) < 2000
        depth = np.cumsum([(token in listops.OPERATORS) - (token == listops.END) for token in row["source"].split()])
        assert depth.max() <= 9
    assert {token for row in rows for token in row["source"].split()} == set(listops.TOKENS)
    assert all(10 < row["length"] < 40 for row in listops.samples(20, seed=0, shorter=10, longer=40))


def test_listops_that_are_all_too_long(tmp_path):
    rows = Dataset.from_dict({"source": ["[MAX 1 2 3 ]"] * 3, "target": [3] * 3})
    with pytest.raises(ValueError, match="--max_length must be at least the length of a sample, got 2"):
        encode_split(replace(TASKS["listops"], max_length=2), rows)


def test_share_of_operators_in_listops():
    rng, operators, nodes = random.Random(0), 0, 0
    for _ in range(3000):
        tokens = []
        listops.random_tree(rng, tokens, depth=9)
        operators += sum(token in listops.OPERATORS for token in tokens[:1])
        nodes += 1
    assert operators / nodes == pytest.approx(0.25, abs=0.03)


@pytest.mark.parametrize("side", [16, 32, 128])
def test_paths_keep_clear_of_each_other(side):
    geometry, rng, pair = pathfinder.GEOMETRIES[side], np.random.default_rng(0), None
    while pair is None:
        pair = pathfinder.two_paths(rng, geometry)
    for path in pair:
        assert path.shape == (3 if side == 16 else 14, 2, 2) and path.min() > 0 and path.max() < side
        gaps = np.linalg.norm(path[1:, 0] - path[:-1, 1], axis=1)
        np.testing.assert_allclose(gaps, geometry.gap)
        np.testing.assert_allclose(np.linalg.norm(path[:, 1] - path[:, 0], axis=1), geometry.dash)
    first, second = (pathfinder.points_on(path, geometry) for path in pair)
    assert np.linalg.norm(first[:, None] - second, axis=-1).min() >= geometry.clearance


def test_circles_say_the_label(monkeypatch):
    """They mark both ends of one path, or one end of each."""
    drawn = []
    monkeypatch.setattr(pathfinder, "render", lambda geometry, paths, circles: drawn.append((paths, circles)))
    for label in (0, 1) * 4:
        pathfinder.draw_sample(np.random.default_rng(len(drawn)), pathfinder.GEOMETRIES[128], label)
        (first, second, *_), (start, end) = drawn[-1]
        of_start = 0 if np.array_equal(start, first[0, 0]) else 1
        of_end = 0 if np.array_equal(end, first[-1, 1]) else 1
        assert (of_start == of_end) == bool(label)
        assert np.array_equal(end, (first, second)[of_end][-1, 1])


def test_pathfinder_pictures():
    rows = list(pathfinder.samples(4, seed=0, side=32))
    assert rows == list(pathfinder.samples(4, seed=0, side=32))
    assert all(len(row["pixels"]) == 1024 and max(row["pixels"]) == 255 for row in rows)
    with pytest.raises(ValueError, match="`side` must be one of 16, 32, 128, got 31"):
        next(pathfinder.samples(1, seed=0, side=31))


def test_smaller_pathfinder(monkeypatch):
    """Pictures of the size that `--max_length` says, for a model of as many positions."""
    monkeypatch.setattr(sys, "argv", ["run_lra.py", "--recipe", "lra/small-pathfinder"])
    args, _ = parse_arguments([run_lra.LraArguments, training_options()], "")
    task, data = load_task(args.task, None, 20, args.max_length)
    assert task.max_length == run_lra.build_config(args, task).max_position_embeddings == 256
    assert {len(row) for split in data.values() for row in split["input_ids"]} == {256}
    assert data["validation"][0]["input_ids"] == next(pathfinder.samples(1, seed=1, side=16))["pixels"]
    assert TASKS["pathfinder"].max_length == 1024


def pair_inputs(lengths: list[tuple[int, int]], longest: int) -> dict[str, torch.Tensor]:
    ids, mask = torch.randint(99, (len(lengths), 2, longest)), torch.zeros(len(lengths), 2, longest, dtype=torch.long)
    for row, pair in enumerate(lengths):
        for side, length in enumerate(pair):
            mask[row, side, :length] = 1
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("config", [TnnConfig(), ModernBertConfig()], ids=["tnn", "transformer"])
def test_byte_tokenizer_loads_beside_any_model(config, tmp_path):
    config.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    texts = ["A film, <br />and  a half.", "", "日本語 é\n\t\x00\x7f"]
    expected = ByT5Tokenizer(extra_ids=0)(texts, truncation=True, max_length=12)
    assert loaded(texts, truncation=True, max_length=12)["input_ids"] == expected["input_ids"]
    assert len(loaded) == 259
    assert loaded.decode(loaded(texts[2])["input_ids"], skip_special_tokens=True) == texts[2]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_pairs_are_encoded_alone(causal, tmp_path):
    """Padding changes nothing; each text matters; what is saved is what is loaded."""
    model = seeded(TnnForSequencePairClassification, tiny_config(causal=causal, num_labels=3))
    inputs = pair_inputs([(7, 12), (12, 1)], 12)
    logits = model(**inputs).logits
    alone = model(inputs["input_ids"][1:, :, :12], inputs["attention_mask"][1:, :, :12]).logits
    assert logits.shape == (2, 3) and relative_error(alone, logits[1:]) < 1e-6
    for side in (0, 1):
        other = inputs["input_ids"].clone()
        other[:, side, 0] = (other[:, side, 0] + 1) % 99
        assert (model(other, inputs["attention_mask"]).logits - logits).abs().min() > 0
    padding = inputs["input_ids"].clone()
    padding[0, 0, 7:] = 5
    assert relative_error(model(padding, inputs["attention_mask"]).logits, logits) < 1e-6
    model.save_pretrained(tmp_path)
    assert torch.equal(TnnForSequencePairClassification.from_pretrained(tmp_path)(**inputs).logits, logits)


def test_loss_of_pairs():
    model, inputs = seeded(TnnForSequencePairClassification, tiny_config(num_labels=3)), pair_inputs([(7, 12)] * 2, 12)
    labels = torch.tensor([2, 0])
    outputs = model(**inputs, labels=labels)
    torch.testing.assert_close(outputs.loss, torch.nn.functional.cross_entropy(outputs.logits, labels))
    with pytest.raises(ValueError, match=r"shape \(B, 2, L\).*\(2, 12\)"):
        model(inputs["input_ids"][:, 0])


@pytest.mark.parametrize("folder", PRESETS, ids=lambda folder: folder.name)
def test_preset(folder):
    fields = json.loads((folder / "config.json").read_text())
    assert not set(fields) - {*TnnConfig().to_dict(), *TnnConfig.__annotations__}
    config = AutoConfig.from_pretrained(folder)
    task = next(TASKS[name] for name in TASKS if folder.name.endswith(f"-{name}"))
    assert (config.vocab_size, config.num_labels) == (task.vocab_size, task.num_labels)
    assert config.max_position_embeddings == task.max_length
    build = AutoModelForSequenceClassification.from_config
    if config.architectures == ["TnnForSequencePairClassification"]:
        build = TnnForSequencePairClassification
    with torch.device("meta"):
        count = build(config).num_parameters()
    readme = (ROOT / "configuration" / "README.md").read_text()
    assert f"| `lra/{folder.name}` | {count:,} |" in readme


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_recipe_is_read(recipe, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run_lra.py", "--recipe", str(recipe), "--max_steps", "7"])
    args, training = parse_arguments([run_lra.LraArguments, training_options()], "")
    assert args.task in recipe.stem and training.max_steps == 7
    config = run_lra.build_config(args, TASKS[args.task])
    with torch.device("meta"):
        run_lra.build_model(args, config)


def test_overrides_beside_those_of_the_recipe(monkeypatch):
    """Each field of the command line goes before that of the recipe, and the others stay."""
    options = ["--recipe", "lra/small-listops", "--config_overrides", "tno_type=rtf,hidden_size=32"]
    monkeypatch.setattr(sys, "argv", ["run_lra.py", *options])
    args, _ = parse_arguments([run_lra.LraArguments, training_options()], "")
    config = run_lra.build_config(args, TASKS[args.task])
    assert (config.tno_type, config.hidden_size, config.rtf_state_size, config.num_hidden_layers) == ("rtf", 32, 16, 2)


def run(monkeypatch, output: Path, *arguments) -> dict:
    options = ["--output_dir", output, "--max_steps", 2, "--per_device_train_batch_size", 2, "--report_to", "none"]
    monkeypatch.setattr(sys, "argv", ["run_lra.py", *map(str, [*arguments, *options])])
    main()
    return json.loads((output / "all_results.json").read_text())


TINY = "hidden_size=8,num_hidden_layers=1,intermediate_size=8,rpe_dim=4"


def test_script_on_generated_listops(monkeypatch, tmp_path, capsys):
    arguments = [
        "--task",
        "listops",
        "--config_name",
        "tnn-listops",
        "--config_overrides",
        TINY,
        "--max_train_samples",
        50,
    ]
    arguments += ["--operator_learning_rate", 1e-4]
    results = run(monkeypatch, tmp_path / "out", *arguments)
    assert (results["train_rows"], results["steps"], results["model"]) == (50, 2, "rpe")
    assert 0 <= results["test_accuracy"] <= 1 and 0.1 <= results["test_majority"] < 0.5
    written = capsys.readouterr().out
    assert "listops, rpe, test: accuracy" in written
    assert re.search(
        rf"saved in {tmp_path / 'out'}\nnext:\n(.*\n)*    .*tnn push {tmp_path / 'out'} --repo_id", written
    )
    classify = pipeline("text-classification", model=str(tmp_path / "out"))
    assert classify("[MAX 2 9 ]")[0]["label"].startswith("LABEL_")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """A data set of the form of `cifar10_gray`."""
    folder = tmp_path_factory.mktemp("lra")
    rows = {"pixels": np.random.default_rng(0).integers(256, size=(6, 1024)).tolist(), "label": [0, 1, 2, 3, 4, 4]}
    configs = ["---", "configs:", "- config_name: cifar10_gray", "  data_files:"]
    for split in ("train", "test"):
        Dataset.from_dict(rows).to_parquet(folder / "cifar10_gray" / f"{split}.parquet")
        configs += [f"  - split: {split}", f"    path: cifar10_gray/{split}.parquet"]
    (folder / "README.md").write_text("\n".join([*configs, "---", ""]))
    return folder


@pytest.mark.parametrize("model", ["rpe", "transformer"])
def test_script_on_pictures(model, pictures, monkeypatch, tmp_path):
    arguments = [
        "--task",
        "image",
        "--config_name",
        "tnn-image",
        "--config_overrides",
        TINY,
        "--dataset_path",
        pictures,
    ]
    arguments += ["--transformer"] if model == "transformer" else []
    results = run(monkeypatch, tmp_path / "out", *arguments)
    assert results["model"] == model and results["test_majority"] == pytest.approx(1 / 3)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert loaded.config.model_type == ("modernbert" if model == "transformer" else "tnn")


def test_script_on_pairs(monkeypatch, tmp_path):
    for name in ("train", "eval", "test"):
        lines = [f'{label}\t1\t2\ta "text"\t{"b" * 20}' for label in ("1.0", "0.0", "1.0")]
        (tmp_path / f"new_aan_pairs.{name}.tsv").write_text("\n".join(lines) + "\n")
    arguments = ["--task", "retrieval", "--config_name", "tnn-retrieval", "--config_overrides", TINY]
    results = run(monkeypatch, tmp_path / "out", *arguments, "--dataset_path", tmp_path, "--max_length", 16)
    assert results["test_majority"] == pytest.approx(2 / 3)
    task, data = load_task("retrieval", str(tmp_path), None, 16)
    assert [len(ids) for ids in data["train"][0]["input_ids"]] == [9, 16] and data["train"]["labels"] == [1, 0, 1]
    assert task.tokenizer().decode(data["train"][0]["input_ids"][0], skip_special_tokens=True) == 'a "text"'


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--task", "listop"], "invalid choice: 'listop' (choose from"),
        (["--task", "image", "--max_length", "500"], "--max_length must be 1024, the pixels of image, got 500"),
        (["--task", "pathfinder", "--max_length", "9"], "--max_length must be 1024 or 256, the pixels of pathfinder"),
        (["--task", "retrieval"], "--dataset_path must be the folder of the LRA release"),
        (
            ["--task", "listops", "--max_train_samples", "50", "--config_overrides", "width=3"],
            "must be fields of TnnConfig, got width",
        ),
    ],
)
def test_script_refuses(arguments, message, monkeypatch, capsys, tmp_path):
    options = ["--config_name", "tnn-listops", "--output_dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["run_lra.py", *options, *arguments])
    with pytest.raises(SystemExit) as error:
        main()
    assert message in str(error.value) + capsys.readouterr().err
