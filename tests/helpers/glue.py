"""GLUE in two small tasks, a model to fine-tune on them, and the options for it."""

import json
from pathlib import Path

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, Value
from transformers import AutoModelForMaskedLM

import modeling_tnn
from helpers.scripts import write_config
from modeling_tnn.data.text import train_tokenizer

WORDS = {"good": 1, "great": 1, "fine": 1, "bad": 0, "awful": 0, "dull": 0}


def rows(count: int, seed: int = 0) -> dict[str, list]:
    """Sentences that one word decides."""
    choices = np.random.default_rng(seed).choice(list(WORDS), size=count)
    return {"sentence": [f"It was a {word} film." for word in choices], "label": [WORDS[word] for word in choices]}


def save_encoder(folder: Path) -> Path:
    """A masked model that was not trained, with a tokenizer for the films."""
    tokenizer = train_tokenizer(Dataset.from_dict({"text": rows(100)["sentence"]}), 300, masked=True)
    tokenizer.save_pretrained(folder)
    config = modeling_tnn.TnnConfig.from_pretrained(write_config(folder, causal=False, vocab_size=len(tokenizer)))
    AutoModelForMaskedLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def glue(tmp_path_factory) -> Path:
    """A folder that `load_dataset(folder, task)` reads as the Hub's, with two tasks."""
    folder, configs = tmp_path_factory.mktemp("glue"), []
    features = Features({"sentence": Value("string"), "label": ClassLabel(names=["negative", "positive"])})
    pairs = rows(60) | {"sentence2": ["He said so."] * 60}
    pairs["sentence1"] = pairs.pop("sentence")
    pairs["label"] = [float(label * 4 + 0.5) for label in pairs["label"]]
    for split, count in (("train", 160), ("validation", 60), ("test", 20)):
        films = rows(count, seed=count) | ({"label": [-1] * count} if split == "test" else {})
        Dataset.from_dict(films, features=features).to_parquet(folder / "sst2" / f"{split}.parquet")
        Dataset.from_dict(pairs).to_parquet(folder / "stsb" / f"{split}.parquet")
    for task in ("sst2", "stsb"):
        files = [{"split": s, "path": f"{task}/{s}.parquet"} for s in ("train", "validation", "test")]
        configs.append({"config_name": task, "data_files": files})
    (folder / "README.md").write_text(f"---\n{json.dumps({'configs': configs})}\n---\n")
    return folder


def glue_options(model, output, *more) -> list:
    rate = [] if "--sweep" in more else ["--learning_rate", 0.01]  # a sweep has its own
    return ["--model_name_or_path", model, "--output_dir", output, "--do_train", "--do_eval", "--num_train_epochs", 4,
            *rate, "--per_device_train_batch_size", 16, "--report_to", "none", *more]  # fmt: skip
