# %% [markdown]
# # Search in long documents
#
# A bidirectional TNN learns from pairs of passages of the same book, with sentence-transformers. Then it gets a
# passage of a book that it has never seen, and finds other passages of that book. It trains on short passages and
# reads long ones. Install: `pip install ".[training]" sentence-transformers` in a clone.

# %%
import json
import os
import random
import tempfile
from collections import defaultdict
from importlib.util import find_spec

from datasets import Dataset, load_dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.base.sampler import DefaultBatchSampler
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch.utils.data import SequentialSampler
from transformers import AutoModel, set_seed

from modeling_tnn import load_preset
from modeling_tnn.data.text import train_tokenizer

MAX_STEPS = int(os.environ.get("MAX_STEPS", 60))
BOOKS = os.environ.get("BOOKS")  # parquet files with the columns `title`, `part` and `text`
TRAINED, READ = (512, 8192) if BOOKS else (256, 1024)  # tokens of a passage
BATCH = 32 if BOOKS else 16
SEED = int(os.environ.get("SEED", 0))
folder = tempfile.mkdtemp()
set_seed(SEED)

# %% [markdown]
# ## The books
#
# The books of the King James Bible that have several passages; nothing is downloaded. `BOOKS` names others. A third of
# them is held out.

# %%
if BOOKS:
    rows = sorted(load_dataset("parquet", data_files=BOOKS, split="train"), key=lambda row: row["part"])
else:
    package = find_spec("bible").submodule_search_locations[0]
    rows = load_dataset("json", data_files=os.path.join(package, "data", "kjv.jsonl"), split="train")
    rows = rows.rename_column("book", "title")
parts = defaultdict(list)
for row in rows:
    parts[row["title"]].append(row["text"])
books = {title: "\n".join(texts) for title, texts in parts.items()}
books = {title: text for title, text in books.items() if len(text) > 24 * READ}
titles = random.Random(0).sample(sorted(books), len(books))
held_out, known = titles[: len(titles) // 3], titles[len(titles) // 3 :]
print(len(known), "books to train on,", len(held_out), "held out")

# %% [markdown]
# ## Words, pairs and questions
#
# The tokenizer and the pairs are those of the known books. Every batch has each book at most once: another passage of
# the same book would be a wrong negative.

# %%
sample = [books[title][:100_000] for title in known]
tokenizer = train_tokenizer(Dataset.from_dict({"text": sample}), vocab_size=8000, masked=True)
characters = len(sample[0]) / len(tokenizer(sample[0], verbose=False)["input_ids"])  # of a token


def passages(text: str, tokens: int, count: int, draw: random.Random) -> list[str]:
    """Passages of a book that do not overlap."""
    size = int(tokens * characters)
    places = range(0, len(text) - size + 1, size)
    return [text[place : place + size] for place in draw.sample(places, min(count, len(places)))]


def pairs(steps: int) -> Dataset:
    draw, found = random.Random(SEED + 1), []
    for _ in range(steps):
        chosen = draw.sample(known, BATCH)
        found += [passages(books[title], TRAINED, 2, draw) for title in chosen]
    return Dataset.from_dict({"anchor": [first for first, _ in found], "positive": [second for _, second in found]})


def questions(tokens: int) -> InformationRetrievalEvaluator:
    """Two passages of each book ask for up to four others among those of all books."""
    queries, corpus, relevant = {}, {}, {}
    for title in held_out:
        texts = {f"{title} {i}": text for i, text in enumerate(passages(books[title], tokens, 6, random.Random(2)))}
        names = list(texts)
        queries |= {name: texts[name] for name in names[:2]}
        corpus |= {name: texts[name] for name in names[2:]}
        relevant |= {name: set(names[2:]) for name in names[:2]}
    return InformationRetrievalEvaluator(queries, corpus, relevant, batch_size=4, name=str(tokens),
                                         accuracy_at_k=[1], ndcg_at_k=[10])  # fmt: skip


# %% [markdown]
# ## The encoder
#
# `AutoModel` of a bidirectional TNN; sentence-transformers adds the mean over the tokens by itself.

# %%
config = load_preset(
    "tnn-tiny", causal=False, vocab_size=len(tokenizer), num_hidden_layers=2, max_position_embeddings=READ
)
AutoModel.from_config(config).save_pretrained(folder)
tokenizer.save_pretrained(folder)
encoder = SentenceTransformer(folder, device="cpu")
print(encoder)


def scores() -> dict[int, dict[str, float]]:
    """Score the search among passages of each length."""
    found = {}
    for tokens in (TRAINED, READ):
        encoder.max_seq_length = tokens
        every = questions(tokens)(encoder)
        names = {"accuracy": f"{tokens}_cosine_accuracy@1", "ndcg": f"{tokens}_cosine_ndcg@10"}
        found[tokens] = {name: round(float(every[key]), 3) for name, key in names.items()}
    return found


before = scores()
print("random weights", before)

# %% [markdown]
# ## Training

# %%
args = SentenceTransformerTrainingArguments(
    os.path.join(folder, "run"), max_steps=MAX_STEPS, per_device_train_batch_size=BATCH,
    learning_rate=1e-3, warmup_steps=0.1, logging_steps=10, save_strategy="no", report_to="none", use_cpu=True,
    batch_sampler=lambda dataset, **options: DefaultBatchSampler(SequentialSampler(dataset), **options),
)  # fmt: skip
encoder.max_seq_length = TRAINED
loss = MultipleNegativesRankingLoss(encoder)
trainer = SentenceTransformerTrainer(encoder, args, train_dataset=pairs(MAX_STEPS), loss=loss)
trainer.train()
after = scores()
print(json.dumps({"random": before, "trained": after, "seconds": trainer.state.log_history[-1]["train_runtime"]}))

# %% [markdown]
# ## Save and load
#
# The folder has the model with its code, the tokenizer and the pooling.

# %%
encoder.save_pretrained(os.path.join(folder, "encoder"))
loaded = SentenceTransformer(os.path.join(folder, "encoder"), device="cpu")
text = books[held_out[0]][:1000]
assert (loaded.encode(text) == encoder.encode(text)).all()
