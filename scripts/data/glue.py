"""The nine GLUE tasks, or files and data sets of the same form: columns, classes, splits and metrics."""

from dataclasses import dataclass
from functools import partial

import numpy as np
from datasets import ClassLabel, DatasetDict, Value, get_dataset_config_names, load_dataset
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef, mean_squared_error
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from tnn_programs.cli.model_path import check_path
from tnn_programs.cli.text_files import builder_of
from tnn_programs.data.corpus import is_text, load_file, load_folder

# The columns that hold text.
TASKS = {
    "cola": ("sentence",),
    "mnli": ("premise", "hypothesis"),
    "mrpc": ("sentence1", "sentence2"),
    "qnli": ("question", "sentence"),
    "qqp": ("question1", "question2"),
    "rte": ("sentence1", "sentence2"),
    "sst2": ("sentence",),
    "stsb": ("sentence1", "sentence2"),
    "wnli": ("sentence1", "sentence2"),
}
# The official metrics of a task, if not the accuracy alone, the main one first; the papers give F1 for MRPC.
METRICS = {
    "cola": ("matthews_correlation",),
    "mrpc": ("f1", "accuracy"),
    "qqp": ("accuracy", "f1"),
    "stsb": ("spearmanr", "pearson"),
}
FUNCTIONS = {
    "accuracy": accuracy_score,
    # Of class 1 of two; what a model predicts may be no class of the data.
    "f1": partial(f1_score, labels=[1], average="macro", zero_division=0),
    "matthews_correlation": matthews_corrcoef,
    "mse": mean_squared_error,
    "pearson": lambda references, predictions: pearsonr(references, predictions).statistic,
    "spearmanr": lambda references, predictions: spearmanr(references, predictions).statistic,
}
OF_VALUES = ("mse", "pearson", "spearmanr")
HUB_NAME = "nyu-mll/glue"
# Columns of files that are never sentences.
NO_SENTENCES = ("label", "idx", "id")
# Of the training rows of a data set that has none for validation.
VALIDATION_SHARE = 0.1


@dataclass
class TaskData:
    """One task, ready for a tokenizer."""

    name: str | None  # None for files
    splits: DatasetDict  # `train`, `validation` and further ones, with a column `label` (a number)
    text_columns: tuple[str, ...]  # one or two
    label_names: list[str] | None = None  # None for a regression

    def relabel(self, numbers: dict):
        """Replace labels by numbers, those of rows without a label by -1; a ValueError for a label not among them."""
        for split, rows in self.splits.items():
            given = rows["label"] if "label" in rows.column_names else [None] * len(rows)
            wrong = next((label for label in given if label not in (*numbers, None)), None)
            if wrong is not None:
                raise ValueError(f"A label must be one of those in the training file, {list(numbers)}, got {wrong!r}")
            kept = rows.select_columns([name for name in rows.column_names if name != "label"])
            self.splits[split] = kept.add_column("label", [numbers.get(label, -1) for label in given])

    @property
    def validation_splits(self) -> list[str]:
        """MNLI has two."""
        return [name for name in ("validation", "validation_matched", "validation_mismatched") if name in self.splits]

    @property
    def test_splits(self) -> list[str]:
        return [name for name in ("test", "test_matched", "test_mismatched") if name in self.splits]


def load_task(name: str, path: str | None = None) -> TaskData:
    """A task from the Hub, or from a local folder that `datasets` reads as `load_dataset(path, name)`."""
    data = TaskData(name, load_dataset(path or HUB_NAME, name), TASKS[name])
    if "train" not in data.splits or not data.validation_splits:
        raise ValueError(f"{name} must have the splits train and validation, got {', '.join(data.splits)}")
    _check_columns(name, data)
    label = data.splits["train"].features["label"]
    if isinstance(label, ClassLabel):
        data.label_names = list(label.names)
    elif name != "stsb":
        if label.dtype.endswith("string"):  # their order would be unknown, on which F1 depends
            raise ValueError(f"The labels of {name} must be numbers, got text; give files with --train_file instead")
        _number_classes(name, data)
    return data


def load_files(train: str, validation: str, test: str | None = None, sentence_keys=(), label_key="label") -> TaskData:
    """CSV, JSON or parquet files with a column of labels and one or two columns of text, `sentence_keys`.

    Labels are classes (text or whole numbers), or values to predict (other numbers). Unless given, `find_sentences`
    finds the columns of text. A ValueError says which file or row is not so.
    """
    files = {"train": train, "validation": validation} | ({} if test is None else {"test": test})
    kinds = {split: builder_of(file) for split, file in files.items()}
    if "text" in kinds.values():
        raise ValueError(f"Files must be .csv, .json, .jsonl or .parquet, got {', '.join(files.values())}")
    splits = DatasetDict(train=load_file(train))
    # A column of text in training is read as text: in another file it may look like numbers.
    first = splits["train"]
    texts = {name: lambda cell: cell or None for name in first.column_names if is_text(first, name)}
    for split in [*files][1:]:
        splits[split] = load_file(files[split], **({"converters": texts} if kinds[split] == "csv" else {}))
    return with_columns(TaskData(None, splits, ()), files, sentence_keys, label_key)


def load_set(name: str, task: str | None, sentence_keys: tuple[str, ...] = (), label_key: str = "label") -> TaskData:
    """A data set of the Hub, or a folder of one, with columns and errors as for `load_files`.

    `task` is a configuration, or else a value of the column `task`, whose rows are the data. Without a validation
    split, a tenth of the training rows becomes one, always the same rows.
    """
    check_path(name, "--dataset_name")
    chosen = task if task in get_dataset_config_names(name) else None
    splits = load_folder(name, chosen)
    if "train" not in splits:
        raise ValueError(f"{name} must have the split train, got {', '.join(splits)}")
    if task != chosen:
        known = sorted(set(splits["train"]["task"])) if "task" in splits["train"].column_names else []
        if task not in known:
            found = ", ".join(known) or "none"
            raise ValueError(f"--dataset_config_name must be a configuration or a task of {name}, {found}, got {task}")
        splits = splits.filter(lambda tasks: [one == task for one in tasks], batched=True, input_columns="task")
    if "validation" not in splits:
        parts = splits["train"].train_test_split(test_size=VALIDATION_SHARE, seed=0)
        splits |= {"train": parts["train"], "validation": parts["test"]}
    used = DatasetDict({split: splits[split] for split in ("train", "validation", "test") if split in splits})
    sources = {split: f"the {split} split of {name}" for split in used}
    data = TaskData(task or name.rpartition("/")[2], used, ())
    return with_columns(data, sources, sentence_keys, label_key)


def name_labels(splits: DatasetDict, sources: dict[str, str], key: str):
    """Call the column of labels `label`; a ValueError if a split, but for a test, has none."""
    for split, rows in splits.items():
        names = rows.column_names
        if key not in names and split != "test":
            raise ValueError(
                f"{sources[split]} must have the columns {key} (labels) and text, got {', '.join(names)}. --label_key "
                "names that of the labels, --sentence1_key and, for pairs, --sentence2_key those of text."
            )
        if key in names and key != "label":
            kept = [name for name in names if name != "label"]
            splits[split] = rows.select_columns(kept).rename_column(key, "label")


def with_columns(data: TaskData, sources: dict[str, str], sentence_keys: tuple[str, ...], label_key: str) -> TaskData:
    """Find the columns of text and the classes of data without them; `sources` is what each split is called."""
    splits, train = data.splits, sources["train"]
    name_labels(splits, sources, label_key)
    texts = [name for name in splits["train"].column_names if is_text(splits["train"], name)]
    for number, key in enumerate(sentence_keys, 1):
        if key not in texts:
            found = ", ".join(texts)
            raise ValueError(f"--sentence{number}_key must be a column of text of the file, {found}, got {key}")
    data.text_columns = sentence_keys or find_sentences(train, texts)
    _check_columns(train, data)
    for split, rows in splits.items():
        for column in (*data.text_columns, *(["label"] if split != "test" else [])):
            if None in (values := rows[column][:]):
                where = f"column {column} of {sources[split]}"
                raise ValueError(f"The {where} must have values in all rows, got none in row {values.index(None) + 1}")
    label = splits["train"].features["label"]
    if isinstance(label, ClassLabel):
        data.label_names = list(label.names)
        return data
    if getattr(label, "dtype", "list").startswith(("list", "dict")):
        raise ValueError(f"Labels must be text or numbers, got {label} in {train}")
    if not label.dtype.startswith(("float", "double")):
        _number_classes(train, data)
        return data
    for split in [split for split, rows in splits.items() if "label" in rows.column_names]:
        splits[split] = splits[split].cast_column("label", Value(label.dtype))
    return data


def find_sentences(source: str, texts: list[str]) -> tuple[str, ...]:
    """Of columns of text, those of the sentences: `sentence1` and `sentence2` as in run_glue.py, or of a GLUE task."""
    names = [name for name in texts if name not in NO_SENTENCES]
    if {"sentence1", "sentence2"} <= set(names):
        return "sentence1", "sentence2"
    if task := next((columns for columns in TASKS.values() if set(columns) == set(names)), None):
        return task
    if len(names) != 1:
        options = "--sentence1_key and, for pairs, --sentence2_key"
        found = ", ".join(names) or "none"
        raise ValueError(f"{options} must name the sentences in {source}, got the columns of text {found}")
    return tuple(names)


def tokenize_task(data: TaskData, tokenizer: PreTrainedTokenizerBase, max_length: int, pad: bool) -> DatasetDict:
    """The splits with `input_ids` and the other outputs of the tokenizer."""
    length = min(max_length, tokenizer.model_max_length)

    def tokenize(batch):
        texts = [batch[column] for column in data.text_columns]
        return tokenizer(*texts, truncation=True, max_length=length, padding="max_length" if pad else False)

    return data.splits.map(tokenize, batched=True, desc=f"tokenizing {data.name or 'files'}")


def outputs_of_classes(config: PreTrainedConfig, names: list[str], source: str) -> list[int] | None:
    """The output of a trained classifier for each class of the data, `(C,)`, by name as in run_glue.py.

    `names` are those of the classes of the data, all or some of those of the model, called `source` in messages. Case
    does not count. None where the classes have to get outputs anew: the model is no classifier, or its outputs have
    the names of transformers, LABEL_0 and so on. A ValueError if it is a classifier of other classes.
    """
    own = [str(config.id2label[output]) for output in sorted(config.id2label)]
    outputs = {name.casefold(): output for output, name in enumerate(own)}
    found = [outputs.get(name.casefold()) for name in names]
    if None not in found and len(set(found)) == len(found):
        return found
    heads = config.architectures
    if heads is not None and not any("SequenceClassification" in name for name in heads):
        return None
    if all(name.startswith("LABEL_") for name in own):
        return None  # transformers refuses weights of another number of outputs, which not every config.json says
    raise ValueError(
        f"The labels must be classes of {source}, {', '.join(own)}, got {', '.join(names)}. Rename the labels, give "
        "another model, or draw a new head with --ignore_mismatched_sizes."
    )


def metrics_of(task: str | None, regression: bool = False) -> tuple[str, ...]:
    """The names of the metrics of a task, the main one first; of files, the accuracy or the squared error."""
    return METRICS.get(task, ("mse",) if task is None and regression else ("accuracy",))


def score(names: tuple[str, ...], predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
    """The metrics of these names, of `(N,)` each; not a number unless all predictions are finite."""
    if not np.isfinite(predictions).all():
        return dict.fromkeys(names, float("nan"))
    return {name: float(FUNCTIONS[name](references, predictions)) for name in names}


def _number_classes(source: str, data: TaskData):
    """Name the classes after their labels, and number them in the order of these."""
    names = sorted(set(data.splits["train"]["label"]))
    if len(names) < 2:
        raise ValueError(f"The labels of {source} must have at least two classes, got {names[0]!r} alone")
    data.label_names = list(map(str, names))
    data.relabel({label: number for number, label in enumerate(names)} | ({-1: -1} if data.name else {}))


def _check_columns(source: str, data: TaskData):
    """Check that each split has rows, the columns of text and, but for a test, labels."""
    for split, rows in data.splits.items():
        needed = {*data.text_columns, *([] if split.startswith("test") else ["label"])}
        if missing := needed - set(rows.column_names):
            columns, found = ", ".join(sorted(missing)), ", ".join(rows.column_names)
            raise ValueError(f"The {split} split of {source} must have the columns {columns}, got {found}")
        if len(rows) == 0:
            raise ValueError(f"The {split} split of {source} must have rows, got none")
