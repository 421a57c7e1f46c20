"""Pairs of passages for Retrieval: of one group or of two, of disjoint parts of the texts; and their two models."""

import json
import sys

import pytest
import torch
from datasets import Dataset, DatasetDict
from transformers import ModernBertConfig

from helpers.models import relative_error, seeded
from tnn_scripts.common.sequence_pairs import ModernBertForSequencePairClassification
from tnn_scripts.data import text_pairs
from tnn_scripts.data.lra import load_task
from tnn_scripts.run_lra import main

TEXTS = ["".join(chr(1000 * book + place) for place in range(500)) for book in (1, 2, 3)]


def book_of(passage: str) -> int:
    return ord(passage[0]) // 1000


def places_of(passage: str) -> list[int]:
    return [ord(letter) % 1000 for letter in passage]


def rows_of(texts: list[str], parts: int = 2) -> dict[str, list[str]]:
    """Each text in several rows, with its title."""
    size = len(texts[0]) // parts
    return {
        "text": [text[part * size : (part + 1) * size] for text in texts for part in range(parts)],
        "title": [f"book {index}" for index in range(len(texts)) for _ in range(parts)],
    }


def test_groups():
    """The parts of a text are put together again, from all splits."""
    data = DatasetDict(train=Dataset.from_dict(rows_of(TEXTS)), test=Dataset.from_dict(rows_of(["abcd"])))
    data["test"] = data["test"].map(lambda row: {"title": "book 1"})
    assert text_pairs.group_texts(data, "title") == [TEXTS[0], TEXTS[1] + "abcd", TEXTS[2]]
    with pytest.raises(ValueError, match="--pair_column must have the column author in the train split, got text, ti"):
        text_pairs.group_texts(data, "author")
    with pytest.raises(ValueError, match="--dataset_path must have the column text in the train split, got title"):
        text_pairs.group_texts(DatasetDict(train=data["train"].remove_columns("text")), "title")


@pytest.mark.parametrize("split, first, last", [("train", 0, 399), ("validation", 400, 449), ("test", 450, 499)])
def test_passages(split, first, last):
    """Half of the pairs are of one text; every text and every place of its part occurs, and no other place."""
    parts = tuple(text_pairs.parts_of(TEXTS, split, 10))
    rows = list(text_pairs.samples(1000, 0, parts, 10))
    assert [row["label"] for row in rows[:4]] == [0, 1, 0, 1]
    places, books = set(), []
    for row in rows:
        pair = row["text1"], row["text2"]
        assert (book_of(pair[0]) == book_of(pair[1])) == (row["label"] == 1)
        for passage in pair:
            assert places_of(passage) == list(range(places_of(passage)[0], places_of(passage)[0] + 10))
            places.update(places_of(passage))
            books.append(book_of(passage))
    assert {first, last} <= places <= set(range(first, last + 1))
    assert min(books.count(book) for book in (1, 2, 3)) > 550
    assert rows == list(text_pairs.samples(1000, 0, parts, 10)) != list(text_pairs.samples(1000, 1, parts, 10))


def test_short_texts_are_left_out():
    assert len(text_pairs.parts_of([*TEXTS, "ab"], "test", 50)) == 3
    with pytest.raises(ValueError, match="at least 2 groups with 51 characters for the test split, got 0"):
        text_pairs.parts_of(TEXTS, "test", 51)


def test_the_transformer_encodes_texts_alone(tmp_path):
    """Padding changes nothing, the second text matters to the score, and what is saved is what is loaded."""
    sizes = {"vocab_size": 99, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "num_labels": 3}
    config = ModernBertConfig(**sizes, intermediate_size=16, pad_token_id=0, global_attn_every_n_layers=1)
    model = seeded(ModernBertForSequencePairClassification, config).eval()
    ids, mask = torch.randint(1, 99, (2, 2, 9)), torch.ones(2, 2, 9, dtype=torch.long)
    mask[:, 1, 6:] = 0
    logits = model(ids, mask).logits
    other = ids.clone()
    other[:, 1, 6:] = 5
    assert logits.shape == (2, 3) and relative_error(model(other, mask).logits, logits) < 1e-5
    other[:, 1, 0] += 1
    assert (model(other, mask).logits - logits).abs().min() > 0
    model.save_pretrained(tmp_path)
    assert torch.equal(ModernBertForSequencePairClassification.from_pretrained(tmp_path)(ids, mask).logits, logits)


@pytest.fixture(scope="module")
def books(tmp_path_factory):
    """Two books, each of its own letters, in a folder of Parquet."""
    folder = tmp_path_factory.mktemp("books")
    texts = [(letters * 200)[:600] for letters in ("abcd ", "wxyz.")]
    Dataset.from_dict(rows_of(texts)).to_parquet(folder / "train.parquet")
    return folder


def test_data(books):
    """Both passages of a pair have the length that was asked for, less its end of text."""
    task, data = load_task("retrieval", str(books), 400, 32, 50, pair_column="title")
    assert {name: len(rows) for name, rows in data.items()} == {"train": 400, "validation": 50, "test": 50}
    texts = [task.tokenizer().decode(ids, skip_special_tokens=True) for ids in data["train"][1]["input_ids"]]
    assert all(len(text) == 31 for text in texts) and data["train"]["labels"][:4] == [0, 1, 0, 1]
    assert len({frozenset(text) for text in texts}) == 1


@pytest.mark.parametrize("model", ["rpe", "transformer"])
def test_script(model, books, monkeypatch, tmp_path):
    """Texts of other letters are told apart."""
    options = ["--recipe", "lra/small-retrieval", "--dataset_path", books, "--max_length", 32, "--report_to", "none"]
    options += ["--max_train_samples", 400, "--max_eval_samples", 100]
    options += ["--config_overrides", "hidden_size=16,num_hidden_layers=1,intermediate_size=16,ski_rank=8"]
    options += ["--output_dir", tmp_path / "out", "--max_steps", 80]
    options += ["--transformer"] if model == "transformer" else []
    monkeypatch.setattr(sys, "argv", ["run_lra.py", *map(str, options)])
    main()
    results = json.loads((tmp_path / "out" / "all_results.json").read_text())
    assert results["model"] == model and results["test_accuracy"] > 0.9 > results["test_majority"]


@pytest.mark.parametrize(
    "options, message",
    [
        (["--task", "text", "--pair_column", "title"], "--pair_column must be given for retrieval alone, got text"),
        (["--task", "retrieval", "--pair_column", "title"], "With --pair_column it may be any texts"),
    ],
)
def test_refused(options, message, monkeypatch, capsys, tmp_path):
    fixed = ["--config_name", "tnn-retrieval", "--output_dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["run_lra.py", *fixed, *options])
    with pytest.raises(SystemExit) as error:
        main()
    assert message in str(error.value) + capsys.readouterr().err
