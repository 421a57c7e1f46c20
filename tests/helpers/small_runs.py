"""The smallest runs of the training programs, on generated data: options for each, without an output folder."""

import numpy as np
from datasets import ClassLabel, Dataset, Features, Image
from PIL.Image import fromarray

from helpers.scripts import write_config, write_text

SMALL = "hidden_size=16,num_hidden_layers=1,intermediate_size=16,rpe_dim=4"


def demo_options(folder):
    preset, text = write_config(folder / "preset"), write_text(folder / "text.txt", copies=60)
    return [
        "--config_name",
        preset,
        "--dataset_name",
        text,
        "--max_steps",
        2,
        "--batch_size",
        4,
        "--max_new_tokens",
        2,
    ]


def small_pretrain_options(folder):
    preset, text = write_config(folder / "preset"), write_text(folder / "text.txt", copies=60)
    return ["--config_name", preset, "--train_file", text, "--max_steps", 2, "--per_device_train_batch_size", 4]


def listops_options(folder):
    overrides = ["--config_overrides", SMALL, "--max_length", 600, "--max_train_samples", 50, "--max_eval_samples", 4]
    return ["--task", "listops", "--config_name", "tnn-listops", *overrides, "--max_steps", 1, "--report_to", "none"]


def image_options(folder):
    pixels = np.random.default_rng(0).integers(256, size=(12, 8, 8, 3), dtype=np.uint8)
    features = Features({"image": Image(), "label": ClassLabel(names=["a", "b"])})
    rows = [{"image": fromarray(picture), "label": i % 2} for i, picture in enumerate(pixels)]
    for split in ("train", "test"):
        Dataset.from_list(rows, features=features).to_parquet(folder / "data" / f"{split}.parquet")
    overrides = f"{SMALL},image_size=8,patch_size=4,max_position_embeddings=4"
    return ["--config_name", "tnn-image-tiny", "--config_overrides", overrides, "--dataset_name", folder / "data",
            "--max_steps", 2, "--per_device_train_batch_size", 4, "--report_to", "none"]  # fmt: skip


def ablation_options(folder):
    text = write_text(folder / "text.txt", copies=60)
    small = f"{SMALL},max_position_embeddings=16,vocab_size=300"
    return ["--dataset_name", text, "--config_overrides", small, "--variants", "one", "--max_steps", 2,
            "--save_strategy", "no", "--report_to", "none"]  # fmt: skip


def synthetic_options(folder):
    return ["--task", "delay", "--state_sizes", 2, "--memory", 4, "--length", 20, "--hidden_size", 2,
            "--max_train_samples", 20, "--max_eval_samples", 5, "--max_steps", 2, "--save_strategy", "no",
            "--report_to", "none"]  # fmt: skip
