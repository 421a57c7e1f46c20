"""The data of the nine GLUE tasks, or of files of the same form: columns, labels, splits."""

from dataclasses import dataclass

from datasets import ClassLabel, Dataset, DatasetDict, load_dataset
from transformers import PreTrainedTokenizerBase

from tnn_scripts.data.files import builder_of, check_file
from tnn_scripts.data.text import is_text, load_file

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
# The names of the classes, in the order of their numbers; STS-B has values.
CLASSES = {
    "cola": ("unacceptable", "acceptable"),
    "mnli": ("entailment", "neutral", "contradiction"),
    "mrpc": ("not_equivalent", "equivalent"),
    "qnli": ("entailment", "not_entailment"),
    "qqp": ("not_duplicate", "duplicate"),
    "rte": ("entailment", "not_entailment"),
    "sst2": ("negative", "positive"),
    "wnli": ("not_entailment", "entailment"),
}
# Words with which pandas marks missing values in CSV files are text here, and an empty cell is missing.
NA_IS_TEXT = {"keep_default_na": False, "na_values": [""]}
HUB_NAME = "nyu-mll/glue"
# Columns of files that are never sentences.
NO_SENTENCES = ("label", "idx", "id")


@dataclass
class TaskData:
    """One task, ready for a tokenizer.

    Attributes:
        name: one of `TASKS`, or None for files.
        splits: `train`, `validation` and further splits, with a column `label` (a number).
        text_columns: names of one or two columns.
        label_names: names of the classes; None for a regression.
    """

    name: str | None
    splits: DatasetDict
    text_columns: tuple[str, ...]
    label_names: list[str] | None

    def relabel(self, numbers: dict):
        """Replace labels by numbers, those of rows without a label by -1, as in the test splits of GLUE.

        Raises:
            ValueError: a label is not among them.
        """
        for split, rows in self.splits.items():
            given = rows["label"] if "label" in rows.column_names else [None] * len(rows)
            wrong = next((label for label in given if label not in (*numbers, None)), None)
            if wrong is not None:
                raise ValueError(f"A label must be one of those in the training file, {list(numbers)}, got {wrong!r}")
            column = [numbers.get(label, -1) for label in given]
            kept = [name for name in rows.column_names if name != "label"]
            self.splits[split] = rows.select_columns(kept).add_column("label", column)

    @property
    def is_pairs(self) -> bool:
        """Whether a row has two texts."""
        return len(self.text_columns) == 2

    @property
    def validation_splits(self) -> list[str]:
        """MNLI has two."""
        return [name for name in ("validation", "validation_matched", "validation_mismatched") if name in self.splits]

    @property
    def test_splits(self) -> list[str]:
        return [name for name in ("test", "test_matched", "test_mismatched") if name in self.splits]


def load_task(name: str, path: str | None = None) -> TaskData:
    """A task from the Hub, or from a local folder that `datasets` reads as `load_dataset(path, name)`.

    Raises:
        ValueError: the columns are not those of the task, or a split is missing.
    """
    splits = load_dataset(path or HUB_NAME, name)
    data = TaskData(name, splits, TASKS[name], None)
    if "train" not in splits or not data.validation_splits:
        raise ValueError(f"{name} must have the splits train and validation, got {', '.join(splits)}")
    _check_columns(name, data)
    label = splits["train"].features["label"]
    if isinstance(label, ClassLabel):
        data.label_names = list(label.names)
    elif name != "stsb":  # a copy without names, or with names in place of numbers
        found, known = set(splits["train"]["label"]), list(CLASSES[name])
        numbered = found <= set(range(len(known)))
        names = known if numbered or found <= set(known) else sorted(found)
        data.label_names = list(map(str, names))
        given = range(len(names)) if numbered else names
        data.relabel({label: number for number, label in enumerate(given)} | {-1: -1})
    return data


def load_files(train: str, validation: str, test: str | None = None, sentence_keys: tuple[str, ...] = ()) -> TaskData:
    """CSV, JSON or parquet files with a column `label` and one or two columns of text.

    Labels are classes (text or whole numbers), or values to predict (other numbers). In CSV files `NA` and its like
    are text, and an empty cell is a missing value.

    Args:
        sentence_keys: names of the columns of text; unless given, `find_sentences` finds them.

    Raises:
        ValueError: a file is missing, empty or of another kind, lacks columns of the training file, or has several
            columns of text and `sentence_keys` is not given. A text is missing, or a label outside the test file;
            labels are of several kinds, of one class alone, or not in the training file.
    """
    files = {"train": train, "validation": validation} | ({} if test is None else {"test": test})
    for file in files.values():
        check_file(file)
        if builder_of(file) == "text":
            raise ValueError(f"Files must be .csv, .json, .jsonl or .parquet, got {file}")
    splits = DatasetDict(
        {split: load_file(file, **(NA_IS_TEXT if builder_of(file) == "csv" else {})) for split, file in files.items()}
    )
    data = TaskData(None, splits, sentence_keys or find_sentences(train, splits["train"]), None)
    for number, key in enumerate(sentence_keys, 1):
        _check_sentences(f"--sentence{number}_key", key, splits["train"])
    _check_columns(train, data)
    for split, rows in splits.items():
        for column in (*data.text_columns, *(["label"] if split != "test" else [])):
            _check_values(files[split], rows, column)
    if not _are_values(splits):
        names = sorted(set(splits["train"]["label"]))
        if len(names) < 2:
            raise ValueError(f"The labels of {train} must have at least two classes, got {names[0]!r} alone")
        data.label_names = list(map(str, names))
        data.relabel({label: number for number, label in enumerate(names)})
    return data


def find_sentences(source: str, rows: Dataset) -> tuple[str, ...]:
    """The columns of text: `sentence1` and `sentence2` as in run_glue.py, columns of a GLUE task, or the only one.

    Raises:
        ValueError: there is no column of text, or several. (run_glue.py would use the first two.)
    """
    names = [name for name in rows.column_names if name not in NO_SENTENCES and is_text(rows, name)]
    if {"sentence1", "sentence2"} <= set(names):
        return "sentence1", "sentence2"
    for columns in TASKS.values():
        if set(columns) == set(names):
            return columns
    if not names:
        raise ValueError(f"{source} must have a column of text besides label, got {', '.join(rows.column_names)}")
    if len(names) > 1:
        raise ValueError(
            f"--sentence1_key and, for pairs, --sentence2_key must name the sentences in {source}, got the columns of "
            f"text {', '.join(names)}"
        )
    return tuple(names)


def tokenize_task(data: TaskData, tokenizer: PreTrainedTokenizerBase, max_length: int, pad: bool) -> DatasetDict:
    """The splits with `input_ids` and the other outputs of the tokenizer."""
    length = min(max_length, tokenizer.model_max_length)

    def tokenize(batch):
        texts = [batch[column] for column in data.text_columns]
        return tokenizer(*texts, truncation=True, max_length=length, padding="max_length" if pad else False)

    return data.splits.map(tokenize, batched=True, desc=f"tokenizing {data.name or 'files'}")


def _check_sentences(option: str, name: str, rows: Dataset):
    if name not in rows.column_names:
        raise ValueError(f"{option} must be a column of the file, one of {', '.join(rows.column_names)}, got {name}")
    if not is_text(rows, name):
        raise ValueError(f"{option} must be a column of text, got {name} of {rows.features[name]}")


def _check_columns(source: str, data: TaskData):
    needed = {*data.text_columns, "label"}
    for split, rows in data.splits.items():
        missing = needed - {"label"} if split.startswith("test") else needed
        missing = missing - set(rows.column_names)
        if missing or not data.text_columns:
            columns = ", ".join(sorted(missing)) or "text"
            found = ", ".join(rows.column_names)
            raise ValueError(f"The {split} split of {source} must have the columns {columns}, got {found}")
        if len(rows) == 0:
            raise ValueError(f"The {split} split of {source} must have rows, got none")


def _check_values(file: str, rows: Dataset, column: str):
    """Check that no text and no label is missing."""
    missing = next((number for number, value in enumerate(rows[column], 1) if value is None), None)
    if missing is not None:
        raise ValueError(f"The column {column} of {file} must have a value in each row, got none in row {missing}")


def _are_values(splits: DatasetDict) -> bool:
    """Whether the labels are values to predict, in all splits that have labels."""
    features = {split: rows.features["label"] for split, rows in splits.items() if "label" in rows.column_names}
    kinds = {split: getattr(feature, "dtype", str(feature)) for split, feature in features.items()}
    for split, kind in kinds.items():
        if not kind.startswith(("float", "double", "int", "uint", "string", "large_string", "bool", "null")):
            raise ValueError(f"Labels must be text or numbers, got {kind} in the {split} file")
    are_values = {split: kind.startswith(("float", "double")) for split, kind in kinds.items() if kind != "null"}
    if len(set(are_values.values())) > 1:
        found = ", ".join(f"{kinds[split]} in the {split} file" for split in are_values)
        raise ValueError(f"Labels must be classes or values in all files, got {found}")
    return are_values["train"]
