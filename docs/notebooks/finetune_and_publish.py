# %% [markdown]
# # Fine-tune a classifier, evaluate it, publish it
#
# A bidirectional TNN learns to tell two kinds of sentences apart. The data are made here, so nothing is downloaded;
# `tnn finetune-glue` does the same for GLUE and for files. Install: `pip install ".[training]"` in a clone.

# %%
import os
import random
import tempfile

import numpy as np
import torch
from datasets import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    pipeline,
    set_seed,
)

from modeling_tnn import load_preset
from modeling_tnn.data.text import train_tokenizer

MAX_STEPS = int(os.environ.get("MAX_STEPS", 60))
folder = tempfile.mkdtemp()
set_seed(0)

# %% [markdown]
# ## The data
#
# One word decides the label. Its place and the words around it vary.

# %%
WORDS = {"good": 1, "great": 1, "fine": 1, "bad": 0, "awful": 0, "dull": 0}
AROUND = ["It was a", "He saw a", "They made a", "We all found it a"]


def rows(count: int, seed: int) -> dict[str, list]:
    draw = random.Random(seed)
    words = [draw.choice(list(WORDS)) for _ in range(count)]
    texts = [f"{draw.choice(AROUND)} {word} film, {draw.choice(['she said', 'or so'])}." for word in words]
    return {"text": texts, "labels": [WORDS[word] for word in words]}


data = {split: Dataset.from_dict(rows(count, seed)) for split, count, seed in (("train", 400, 0), ("test", 100, 1))}
tokenizer = train_tokenizer(data["train"], vocab_size=320, masked=True)
data = {split: part.map(lambda row: tokenizer(row["text"]), remove_columns="text") for split, part in data.items()}
print(tokenizer.decode(data["train"][0]["input_ids"]), data["train"][0]["labels"])

# %% [markdown]
# ## The model and the training
#
# Padding changes nothing: a text gives the same logits in any batch.

# %%
config = load_preset(
    "tnn-tiny", causal=False, vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_labels=2,
    pad_token_id=tokenizer.pad_token_id, id2label={0: "negative", 1: "positive"},
)  # fmt: skip
model = AutoModelForSequenceClassification.from_config(config)


def accuracy(predicted) -> dict[str, float]:
    return {"accuracy": float(np.mean(predicted.predictions.argmax(axis=1) == predicted.label_ids))}


arguments = TrainingArguments(
    folder, max_steps=MAX_STEPS, per_device_train_batch_size=16, learning_rate=3e-3, save_strategy="no",
    report_to="none", disable_tqdm=True, dataloader_pin_memory=torch.cuda.is_available(),
)  # fmt: skip
trainer = Trainer(
    model=model, args=arguments, train_dataset=data["train"], eval_dataset=data["test"], processing_class=tokenizer,
    data_collator=DataCollatorWithPadding(tokenizer), compute_metrics=accuracy,
)  # fmt: skip
trainer.train()
metrics = trainer.evaluate()
print(f"accuracy {metrics['eval_accuracy']:.2f}")
assert metrics["eval_accuracy"] > 0.9 or MAX_STEPS < 60

# %% [markdown]
# ## Use it

# %%
trainer.save_model(folder)
classify = pipeline("text-classification", model=folder)
print(classify("They made a dull film, or so."))

# %% [markdown]
# ## Publish it
#
# The folder holds the weights, the tokenizer and the code of the model. It loads where this package is not installed,
# with `trust_remote_code=True`. With an account on the Hub (`hf auth login`), this command publishes it with a card:
#
# ```bash
# tnn push FOLDER --repo_id USER/NAME
# ```

# %%
print(sorted(name for name in os.listdir(folder) if not name.endswith(".py")))
assert {"config.json", "model.safetensors", "modeling_tnn.py", "tokenizer.json"} <= set(os.listdir(folder))
