"""The tasks of the Long Range Arena: the sources of their data, and the conversion to tokens.

ListOps and Pathfinder are generated unless data are given. `datasets` caches generated and tokenized data.
"""

import math
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from datasets import Dataset, DatasetDict, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tnn_programs.data import pathfinder

GREY_WEIGHTS = (0.299, 0.587, 0.114)  # ITU-R 601
# Rows of the official splits, and of generated ones unless given.
LISTOPS_ROWS = {"train": 96_000, "validation": 2_000, "test": 2_000}
PATHFINDER_ROWS = {"train": 160_000, "validation": 20_000, "test": 20_000}
# Smallest number of rows of a generated split.
FEWEST_ROWS = 100
AAN_COLUMNS = ["label", "id1", "id2", "text1", "text2"]
# ListOps.
OPERATORS = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}
END = "]"
TOKENS = (*map(str, range(10)), *OPERATORS, END)
OPERATOR_PROBABILITY, MOST_DEPTH, MOST_ARGUMENTS = 0.25, 10, 10
SHORTER, LONGER = 500, 2000


class TooLongError(Exception):
    """The error for a tree that is too long for a sample."""


def random_tree(rng: random.Random, tokens: list[str], longer: int = LONGER, depth: int = 1) -> int:
    """Append the tokens of a random node to `tokens` and return its value, or raise if there are `longer` or more."""
    if depth >= MOST_DEPTH or rng.random() >= OPERATOR_PROBABILITY:
        tokens.append(str(rng.randrange(10)))
        return int(tokens[-1])
    name = rng.choice(tuple(OPERATORS))
    tokens.append(name)
    values = [random_tree(rng, tokens, longer, depth + 1) for _ in range(rng.randint(2, MOST_ARGUMENTS))]
    tokens.append(END)
    if len(tokens) >= longer:
        raise TooLongError
    return OPERATORS[name](values)


def listops_samples(count: int, seed: int, shorter: int = SHORTER, longer: int = LONGER) -> Iterator[dict]:
    """`count` different samples of ListOps by the rules of the Long Range Arena (Nangia and Bowman, 2018).

    A node at depth d (the root has depth 1) is an operator with probability 0.25 if d < 10, otherwise a digit. MIN,
    MAX, MED (the integer part of the median) and SM (the sum modulo 10) are equally likely. Each has 2 to 10
    arguments, nodes at depth d + 1, and is written `[OP arg .. arg ]`. A sample has more than `shorter` tokens and
    fewer than `longer`: `source`, with spaces between them, its `target` and its `length`.
    """
    rng, seen = random.Random(seed), set()  # noqa: S311
    while len(seen) < count:
        tokens: list[str] = []
        try:
            target = random_tree(rng, tokens, longer)
        except TooLongError:
            continue
        source = " ".join(tokens)
        if len(tokens) > shorter and source not in seen:
            seen.add(source)
            yield {"source": source, "target": target, "length": len(tokens)}


@dataclass(frozen=True)
class Task:
    """One task.

    `load` gives the raw splits, from a source (a Hub id or a folder; None for the usual one), the number of generated
    rows (None for the official one) and the largest number of tokens. `encode` gives `input_ids` (two lists a row for
    pairs) and `labels` of raw rows of a batch.
    """

    load: Callable[..., DatasetDict]
    encode: Callable[[dict, "Task"], dict]
    max_length: int  # in tokens
    num_labels: int
    tokenizer: Callable[[], PreTrainedTokenizerBase] | None = None  # of a text; the values of pixels are the ids
    grey: tuple[float, float] | None = None  # mean and deviation of S4's code, by which real values are read
    held_out: float = 0.0  # share of training rows that validates if there is no split for it; 0: the test rows do
    smaller: tuple[int, ...] = ()  # numbers of pixels of other pictures of the task; a picture cannot be cut

    @property
    def vocab_size(self) -> int:
        return 256 if self.tokenizer is None else len(self.tokenizer())


def listops_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one id for each of the 15 tokens of ListOps."""
    vocabulary = {"<pad>": 0} | {token: index + 1 for index, token in enumerate(TOKENS)}
    words = Tokenizer(models.WordLevel(vocabulary))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>")  # noqa: S106


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with the ids of `ByT5Tokenizer`, which no `AutoTokenizer` loads beside a ModernBERT."""
    letters = bytes_to_unicode()
    tokens = ["<pad>", "</s>", "<unk>", *(letters[byte] for byte in range(256))]
    words = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words.decoder = decoders.ByteLevel()
    words.post_processor = processors.TemplateProcessing("$A </s>", "$A </s> $B </s>", [("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")  # noqa: S106


def load_listops(source: str | None, rows: int | None, max_length: int) -> DatasetDict:
    """Samples of 500 to 2,000 tokens. Generated samples have `max_length` / 4 to `max_length` if that is shorter."""
    if source is not None:
        return load_dataset(source, "listops")
    lengths = {} if max_length >= LONGER else {"shorter": max_length // 4, "longer": max_length}
    return generate(listops_samples, LISTOPS_ROWS, rows, **lengths)


def load_text(source: str | None, rows: int | None, max_length: int) -> DatasetDict:
    return load_dataset("stanfordnlp/imdb") if source is None else load_dataset(source, "imdb")


def load_retrieval(source: str | None, rows: int | None, max_length: int) -> DatasetDict:
    """The files of the LRA release: `new_aan_pairs.{train,eval,test}.tsv`, or a data set with their columns."""
    if source is None:
        needed = "the folder of the LRA release with new_aan_pairs.*.tsv, or of other pairs, for retrieval"
        raise ValueError(f"--dataset_path must be {needed}, got none")
    names = {"train": "train", "validation": "eval", "test": "test"}
    files = {split: str(Path(source) / f"new_aan_pairs.{name}.tsv") for split, name in names.items()}
    if not Path(files["train"]).is_file():
        return load_dataset(source)
    return load_dataset("csv", data_files=files, delimiter="\t", column_names=AAN_COLUMNS, quoting=3)


def load_image(source: str | None, rows: int | None, max_length: int) -> DatasetDict:
    """The pictures of CIFAR-10 in grey, 1,024 pixels in row order."""
    if source is not None:
        return load_dataset(source, "cifar10_gray")
    data = load_dataset("uoft-cs/cifar10")

    def to_grey(batch: dict) -> dict:
        pixels = [np.asarray(image, dtype=np.float64) @ GREY_WEIGHTS for image in batch["img"]]
        return {"pixels": [grey.round().astype(np.uint8).ravel().tolist() for grey in pixels]}

    return data.map(to_grey, batched=True, remove_columns=["img"])


def load_pathfinder(source: str | None, rows: int | None, max_length: int) -> DatasetDict:
    """Pictures of `max_length` pixels."""
    side = math.isqrt(max_length)
    if source is not None:
        return load_dataset(source, f"pathfinder{side}")
    return generate(pathfinder.samples, PATHFINDER_ROWS, rows, side=side)


def generate(samples: Callable, sizes: dict[str, int], rows: int | None, **options) -> DatasetDict:
    """The splits of generated `samples`, each by a seed: `rows` for training, the others in proportion.

    `options` are arguments of `samples`.
    """
    share, data = 1 if rows is None else rows / sizes["train"], DatasetDict()
    for seed, (split, size) in enumerate(sizes.items()):
        count = max(FEWEST_ROWS, round(share * size))
        data[split] = Dataset.from_generator(samples, gen_kwargs={"count": count, "seed": seed} | options)
    return data


def encode_listops(batch: dict, task: Task) -> dict:
    """The encoded samples. Samples that are too long are left out, because a part of a sample has no value."""
    ids = task.tokenizer()(batch["source"])["input_ids"]
    kept = [index for index, tokens in enumerate(ids) if len(tokens) <= task.max_length]
    return {"input_ids": [ids[index] for index in kept], "labels": [batch["target"][index] for index in kept]}


def encode_text(batch: dict, task: Task) -> dict:
    return {"input_ids": encode_bytes(batch["text"], task), "labels": batch["label"]}


def encode_pair(batch: dict, task: Task) -> dict:
    pairs = zip(*(encode_bytes(batch[name], task) for name in ("text1", "text2")), strict=True)
    return {"input_ids": [list(pair) for pair in pairs], "labels": [int(label) for label in batch["label"]]}


def encode_bytes(texts: list[str], task: Task) -> list[list[int]]:
    """The first tokens of each text. Only the necessary part of a text is tokenized."""
    beginnings = [text[: task.max_length] for text in texts]
    return task.tokenizer()(beginnings, truncation=True, max_length=task.max_length)["input_ids"]


def encode_pixels(batch: dict, task: Task) -> dict:
    return {"input_ids": batch["pixels"], "labels": batch["label"]}


TASKS = {
    "listops": Task(load_listops, encode_listops, 2048, 10, listops_tokenizer),
    "text": Task(load_text, encode_text, 4096, 2, byte_tokenizer),
    "retrieval": Task(load_retrieval, encode_pair, 4000, 2, byte_tokenizer),
    "image": Task(load_image, encode_pixels, 1024, 10, grey=(122.6, 61.0), held_out=0.1),
    "pathfinder": Task(load_pathfinder, encode_pixels, 32**2, 2, grey=(127.5, 127.5), smaller=(16**2,)),
    "path-x": Task(load_pathfinder, encode_pixels, 128**2, 2, grey=(127.5, 127.5)),
}


def load_task(
    name: str, source: str | None, rows: int | None = None, max_length: int | None = None, eval_rows: int | None = None
) -> tuple[Task, DatasetDict]:
    """A task, and its encoded splits train, validation and test by the options of `tnn lra`; see `Task.held_out`."""
    task = TASKS[name]
    if max_length is not None:
        sizes = (task.max_length, *task.smaller)
        if task.tokenizer is None and max_length not in sizes:
            known = " or ".join(map(str, sizes))
            raise ValueError(f"--max_length must be {known}, the pixels of {name}, got {max_length}")
        task = replace(task, max_length=max_length)
    raw = task.load(source, rows, task.max_length)
    if task.held_out and "validation" not in raw:
        raw["train"], raw["validation"] = raw["train"].train_test_split(test_size=task.held_out, seed=0).values()
    counts = {"train": rows, "validation": eval_rows, "test": eval_rows}
    encoded = {split: encode_split(task, limit(raw[split], counts[split])) for split in counts if split in raw}
    return task, DatasetDict({"validation": encoded["test"]} | encoded)


def limit(rows: Dataset, count: int | None) -> Dataset:
    """A random but fixed choice of `count` rows, or all rows if there are fewer."""
    return rows if count is None or count >= len(rows) else rows.shuffle(seed=0).select(range(count))


def encode_split(task: Task, rows: Dataset) -> Dataset:
    """The `input_ids` and `labels` of raw rows; a ValueError if all rows are too long."""
    encoded = rows.map(task.encode, batched=True, fn_kwargs={"task": task}, remove_columns=rows.column_names)
    if len(encoded) == 0:
        raise ValueError(f"--max_length must be at least the length of a sample, got {task.max_length}")
    return encoded
