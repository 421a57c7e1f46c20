"""Fine-tuning on GLUE and on files: metrics, results, sweeps, and what it refuses."""

import json
import math
import re
import shlex
import shutil
from subprocess import run as run_command

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BartConfig,
    BartForSequenceClassification,
)

from helpers.glue import glue_options, rows
from helpers.scripts import ROOT, run_script, table_rows
from tnn_scripts.common.model_card import read_metrics
from tnn_scripts.common.signals import StopRequested
from tnn_scripts.data.glue import TASKS, load_files, load_task
from tnn_scripts.data.glue_metrics import OWN_METRICS, load_metric, main_metric
from tnn_scripts.runs import finetune_glue

SHARED = ROOT.parent / "shared" / "data" / "glue"


def test_one_task(encoder, glue, tmp_path):
    run_script(
        "finetune_glue",
        *glue_options(encoder, tmp_path, "--task_name", "sst2", "--dataset_path", glue, "--do_predict"),
    )
    results = json.loads((tmp_path / "all_results.json").read_text())
    assert results["eval_accuracy"] > 0.9 and results["eval_samples"] == 60 and results["train_loss"] > 0
    trained = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert trained.config.id2label == {0: "negative", 1: "positive"}
    assert AutoTokenizer.from_pretrained(tmp_path).mask_token == "<mask>"
    predicted = (tmp_path / "predict_results_sst2.txt").read_text().splitlines()
    expected = [("negative", "positive")[label] for label in rows(20, seed=20)["label"]]
    agreeing = sum(line.split("\t")[1] == label for line, label in zip(predicted[1:], expected, strict=True))
    assert predicted[0] == "index\tprediction" and agreeing > 17


@pytest.mark.slow
def test_sweep_keeps_the_best(encoder, glue, tmp_path):
    more = ["--task_name", "sst2", "stsb", "--dataset_path", glue, "--num_train_epochs", 2, "--sweep"]
    more += ["--sweep_learning_rates", "1e-2", "1e-6", "--sweep_seeds", "3", "4"]
    run_script("finetune_glue", *glue_options(encoder, tmp_path, *more))
    sst2, stsb = json.loads((tmp_path / "results.json").read_text())
    assert (sst2["metric"], stsb["metric"]) == ("accuracy", "spearmanr")
    assert sst2["learning_rate"] == 0.01 and sst2["seeds"] == 2 and len(sst2["runs"]) == 4
    scores = {(run["learning_rate"], run["seed"]): run["eval_accuracy"] for run in sst2["runs"]}
    assert sst2["best"] == max(scores.values())
    assert sst2["mean"] == pytest.approx((scores[0.01, 3] + scores[0.01, 4]) / 2)
    kept = json.loads((tmp_path / "sst2" / "all_results.json").read_text())
    assert kept["eval_accuracy"] == sst2["best"]
    labels = rows(60, seed=60)["label"]
    assert sst2["majority"] in (np.mean(labels), 1 - np.mean(labels)) and stsb["majority"] is None
    report = (tmp_path / "results.md").read_text()
    assert [row[0] for row in table_rows(report)[2:]] == ["sst2", "stsb", "average"]
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "stsb")


def test_a_model_of_more_outputs(encoder, glue, tmp_path):
    """BART's classifier also returns the states of its encoder."""
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    names = ("attention_heads", "ffn_dim", "layers")
    sizes = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in names}
    special = {"eos_token_id": tokenizer("good")["input_ids"][-1], "pad_token_id": tokenizer.pad_token_id}
    config = BartConfig(
        vocab_size=len(tokenizer), d_model=16, max_position_embeddings=64, num_labels=2, **sizes, **special
    )
    BartForSequenceClassification(config).save_pretrained(tmp_path / "bart")
    tokenizer.save_pretrained(tmp_path / "bart")
    more = ["--task_name", "sst2", "--dataset_path", glue, "--max_steps", 1, "--do_predict"]
    run_script("finetune_glue", *glue_options(tmp_path / "bart", tmp_path / "out", *more))
    assert 0 <= json.loads((tmp_path / "out" / "all_results.json").read_text())["eval_accuracy"] <= 1
    assert len((tmp_path / "out" / "predict_results_sst2.txt").read_text().splitlines()) == 21


def test_fields_of_the_configuration(encoder, glue, tmp_path):
    """They reach the encoder that is trained, and are saved with it."""
    task = ["--task_name", "sst2", "--dataset_path", glue, "--max_steps", 1]
    run_script("finetune_glue", *glue_options(encoder, tmp_path / "a", *task))
    run_script(
        "finetune_glue",
        *glue_options(
            encoder, tmp_path / "b", *task, "--config_overrides", "classifier_pooling=last,classifier_dropout=0.5"
        ),
    )
    plain, changed = (AutoModelForSequenceClassification.from_pretrained(tmp_path / folder).config for folder in "ab")
    assert (plain.classifier_pooling, changed.classifier_pooling) == (None, "last")
    assert changed.classifier_dropout == 0.5 and changed.id2label == {0: "negative", 1: "positive"}


def test_refused_fields_of_the_configuration(encoder, glue, tmp_path):
    more = ["--task_name", "sst2", "--dataset_path", glue, "--config_overrides", "classifier_poling=mean"]
    with pytest.raises(
        SystemExit, match="error: --config_overrides must be fields of TnnConfig, got classifier_poling"
    ):
        run_script("finetune_glue", *glue_options(encoder, tmp_path, *more))


def test_random_weights(encoder, glue, tmp_path):
    """Nothing is left of the pretrained weights; the same seed gives the same ones."""
    tiny = [
        "--task_name",
        "sst2",
        "--dataset_path",
        glue,
        "--from_scratch",
        "--max_train_samples",
        1,
        "--max_steps",
        1,
    ]
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        run_script(
            "finetune_glue",
            *glue_options(encoder, tmp_path / folder, *tiny),
            "--learning_rate",
            1e-12,
            "--seed",
            seed,
        )
    a, b, c = (
        AutoModelForSequenceClassification.from_pretrained(tmp_path / name).model.layers[0].mixer.u_proj.weight
        for name in "abc"
    )
    trained = AutoModelForMaskedLM.from_pretrained(encoder).model.layers[0].mixer.u_proj.weight
    assert (a - b).abs().max() < 1e-9 < 1e-3 < min((a - c).abs().max(), (a - trained).abs().max())


@pytest.mark.parametrize("kind", ["csv", "json", "parquet"])
def test_files(kind, encoder, tmp_path):
    names = ["bad", "good"]
    for split, count in (("train", 160), ("validation", 60)):
        data = rows(count, seed=count)
        data["label"] = [names[label] for label in data["label"]]
        getattr(Dataset.from_dict(data), f"to_{kind}")(str(tmp_path / f"{split}.{kind}"))
    files = ["--train_file", tmp_path / f"train.{kind}", "--validation_file", tmp_path / f"validation.{kind}"]
    run_script("finetune_glue", *glue_options(encoder, tmp_path / "out", *files))
    assert json.loads((tmp_path / "out" / "all_results.json").read_text())["eval_accuracy"] > 0.9
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").config.label2id == {
        "bad": 0,
        "good": 1,
    }


def test_values_in_files(tmp_path):
    file = tmp_path / "values.csv"
    file.write_text("a,b,label\nx,y,0.5\nz,w,1.5\n")
    data = load_files(str(file), str(file), sentence_keys=("a", "b"))
    assert data.label_names is None and data.text_columns == ("a", "b")
    assert main_metric(None, regression=True) == "mse"
    assert load_metric(None, regression=True)(np.array([1.0, 2.0]), np.array([0.0, 4.0])) == {"mse": 2.5}


@pytest.mark.parametrize(
    "columns, keys, expected",
    [
        ({"sentence": "x"}, (), ("sentence",)),
        ({"review": "x", "stars": 3, "weight": 0.5, "id": "a", "idx": "b"}, (), ("review",)),
        ({"idx": 1, "source": "web", "sentence2": "y", "sentence1": "x"}, (), ("sentence1", "sentence2")),
        ({"sentence": "y", "number": 7, "question": "x"}, (), ("question", "sentence")),
        ({"hypothesis": "y", "premise": "x"}, (), ("premise", "hypothesis")),
        ({"source": "web", "review": "x"}, ("review",), ("review",)),
        ({"source": "web", "review": "x", "reply": "y"}, ("review", "reply"), ("review", "reply")),
    ],
)
def test_columns_of_text(columns, keys, expected, tmp_path):
    """The columns of text in files: the named ones, the only one with text, or those with names of GLUE tasks."""
    file = tmp_path / "rows.parquet"
    Dataset.from_list([columns | {"label": 0}, columns | {"label": 1}]).to_parquet(file)
    assert load_files(str(file), str(file), sentence_keys=keys).text_columns == expected


@pytest.mark.parametrize(
    "columns, keys, message",
    [
        (
            {"sentence": "x", "source": "web"},
            (),
            "--sentence1_key .*--sentence2_key must name .* text sentence, source",
        ),
        ({"a": "x", "b": "y", "c": "z"}, (), "columns of text a, b, c"),
        ({"number": 3}, (), "must have a column of text besides label, got number"),
        (
            {"review": "x", "stars": 3},
            ("review", "stars"),
            "--sentence2_key must be a column of text, got stars of .*int64",
        ),
        ({"review": "x"}, ("text",), "--sentence1_key must be a column of the file, one of review, label, got text"),
    ],
)
def test_columns_that_are_not_clear(columns, keys, message, encoder, tmp_path):
    file = tmp_path / "rows.parquet"
    Dataset.from_list([columns | {"label": 0}, columns | {"label": 1}]).to_parquet(file)
    given = [part for number, key in enumerate(keys, 1) for part in (f"--sentence{number}_key", key)]
    with pytest.raises(SystemExit, match=message):
        files = ["--train_file", file, "--validation_file", file]
        run_script("finetune_glue", *glue_options(encoder, tmp_path / "out", *files, *given))


def test_a_regression(encoder, tmp_path, capsys, caplog):
    """The error of a regression is not a percentage, in the table and on the card."""
    file = tmp_path / "values.csv"
    Dataset.from_dict(rows(40) | {"label": [3.5 + label for label in rows(40)["label"]]}).to_csv(file)
    files = ["--train_file", file, "--validation_file", file, "--max_steps", 2]
    run_script("finetune_glue", *glue_options(encoder, tmp_path / "out", *files))
    error = json.loads((tmp_path / "out" / "all_results.json").read_text())["eval_mse"]
    (row,) = [line for line in (tmp_path / "out" / "results.md").read_text().splitlines() if "files" in line]
    shown = [cell.strip() for cell in row.split("|")][2:]
    assert shown[:2] == ["mse", ""] and shown[2] == f"{error:.4g} ± 0" and shown[4] == f"{error:.4g}"
    assert read_metrics({"eval_mse": error}) == {"mse": error}


def test_only_what_is_trained_is_saved(encoder, glue, tmp_path):
    """An untrained head is evaluated, but not left as if it were a model."""
    given = ["--model_name_or_path", encoder, "--task_name", "sst2", "--dataset_path", glue, "--report_to", "none"]
    run_script("finetune_glue", *given, "--output_dir", tmp_path, "--do_eval")
    assert "eval_accuracy" in json.loads((tmp_path / "all_results.json").read_text())
    assert not list(tmp_path.glob("*.safetensors")) and not (tmp_path / "config.json").exists()


def test_reading_a_trained_model_keeps_its_figures(encoder, glue, tmp_path):
    """In the folder of the model, an evaluation renews its own figures, and a prediction adds none."""
    task = ["--task_name", "sst2", "--dataset_path", glue]
    run_script("finetune_glue", *glue_options(encoder, tmp_path, *task, "--learning_rate", "1e-3", "--max_steps", 2))
    trained, table = json.loads((tmp_path / "all_results.json").read_text()), (tmp_path / "results.md").read_text()
    read = ["--model_name_or_path", tmp_path, "--output_dir", tmp_path, "--report_to", "none", *task]
    run_script("finetune_glue", *read, "--do_predict")
    assert json.loads((tmp_path / "all_results.json").read_text()) == trained
    run_script("finetune_glue", *read, "--do_eval")
    found = json.loads((tmp_path / "all_results.json").read_text())
    assert found.keys() >= trained.keys() and found["train_loss"] == trained["train_loss"]
    assert (tmp_path / "results.md").read_text() == table


def test_a_stopped_run_says_how_to_go_on(encoder, glue, tmp_path, monkeypatch, caplog):
    """Of several tasks, those that have not begun have no checkpoint."""
    monkeypatch.setattr(finetune_glue, "run_all", lambda *_: (_ for _ in ()).throw(StopRequested(143, "stopped.")))
    for tasks, checkpoint in ((["sst2"], "latest"), (["sst2", "stsb"], "auto")):
        caplog.clear()
        with pytest.raises(SystemExit):
            run_script(
                "finetune_glue", *glue_options(encoder, tmp_path, "--task_name", *tasks, "--dataset_path", glue)
            )
        assert f"stopped. Continue with --resume_from_checkpoint {checkpoint}." in caplog.text


@pytest.mark.parametrize(
    "more, message",
    [
        ([], "one of --do_train, --do_eval, --do_predict and --sweep must be given"),
        (["--do_eval", "--push_to_hub"], "--push_to_hub must be given with --do_train or --sweep"),
        (["--sweep", "--learning_rate", "1e-3"], "--learning_rate must not be given with --sweep, .* got 0.001"),
        (["--sweep", "--seed", "7"], "--seed must not be given with --sweep, which reads --sweep_seeds, got 7"),
        (["--do_predict", "--train_file", "FILE", "--validation_file", "FILE"],
         "--do_predict must be given with --test_file"),
        (["--sweep", "--sentence1_key", "a"], "--sentence1_key .* must be given with --train_file"),
        (["--do_eval", "--train_file", "FILE", "--validation_file", "FILE", "--sentence2_key", "a"],
         "--sentence2_key must be given with --sentence1_key"),
    ],
)  # fmt: skip
def test_nothing_to_do(more, message, encoder, tmp_path, capsys):
    file = tmp_path / "file.csv"
    Dataset.from_dict(rows(8)).to_csv(file)
    given = ["--model_name_or_path", encoder, "--output_dir", tmp_path / "out", "--report_to", "none"]
    given += [] if "FILE" in more else ["--task_name", "sst2"]
    with pytest.raises(SystemExit) as error:
        run_script("finetune_glue", *given, *(file if part == "FILE" else part for part in more))
    assert re.search(message, str(error.value.code) + capsys.readouterr().err)
    assert not list(tmp_path.glob("out/*.safetensors"))


def test_metrics():
    """By hand, from counts: 3 true positives, 1 false positive, 2 false negatives, 4 true negatives."""
    predictions = np.array([1, 1, 1, 1, 0, 0, 0, 0, 0, 0])
    references = np.array([1, 1, 1, 0, 1, 1, 0, 0, 0, 0])
    assert load_metric("sst2")(predictions, references) == {"accuracy": pytest.approx(0.7)}
    assert OWN_METRICS["mrpc"](predictions, references) == pytest.approx({"accuracy": 0.7, "f1": 6 / 9})
    matthews = (3 * 4 - 1 * 2) / math.sqrt(4 * 5 * 5 * 6)
    assert OWN_METRICS["cola"](predictions, references) == pytest.approx({"matthews_correlation": matthews})
    values = OWN_METRICS["stsb"](np.array([1.0, 2.0, 4.0]), np.array([1.0, 3.0, 2.0]))
    assert values == pytest.approx({"pearson": np.corrcoef([1, 2, 4], [1, 3, 2])[0, 1], "spearmanr": 0.5})


def test_official_metrics_come_first(monkeypatch):
    class Official:
        def compute(self, predictions, references):
            return {"accuracy": float(np.mean(predictions == references)), "from": "evaluate"}

    monkeypatch.setattr("tnn_scripts.data.glue_metrics.evaluate.load", lambda name, task: Official())
    result = load_metric("sst2")(np.array([1, 0]), np.array([1, 1]))
    assert result == {"accuracy": 0.5, "from": "evaluate"}


@pytest.mark.parametrize(
    "given, message",
    [
        (["--task_name", "sst2", "--max_eval_samples", "-1"], "--max_eval_samples must be at least 1, got -1"),
        (["--task_name", "sst2", "--max_seq_length", "0"], "--max_seq_length must be at least 1, got 0"),
        (["--task_name", "sst3"], "--task_name must be all or one of cola, "),
        ([], "either --task_name or both --train_file and --validation_file must be given"),
        (["--train_file", "a.csv"], "either --task_name or both"),
        (["--task_name", "sst2", "--train_file", "a.csv", "--validation_file", "b.csv"], "either --task_name or both"),
    ],
)
def test_refused_options(given, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        run_script("finetune_glue", "--model_name_or_path", "x", "--output_dir", tmp_path, *given)
    assert error.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "does not exist"),
        ("", "is empty"),
        ("sentence,label\n", "has no rows"),
        ("sentence,class\nx,1\n", "must have the columns label"),
        ("text,label\nx,1\n", "must have the columns sentence"),
        ("sentence,label\nx,7\n", r"label must be one of those in the training file, \[0, 1\], got 7"),
        ("sentence,label\nx,1\n,0\n", "column sentence of .*validation.csv must have a value in each row, .* row 2"),
        ("sentence,label\nx,1\ny,\n", "column label of .*validation.csv must have a value in each row, .* row 2"),
        ("sentence,label\nx,1.5\n", "classes or values in all files, got int64 in the train file, float64 in"),
    ],
)
def test_refused_files(content, message, encoder, tmp_path):
    train, validation = tmp_path / "train.csv", tmp_path / "validation.csv"
    train.write_text("sentence,label\nx,1\ny,0\n")
    if content is not None:
        validation.write_text(content)
    files = ["--train_file", train, "--validation_file", validation]
    with pytest.raises(SystemExit, match=message):
        run_script("finetune_glue", *glue_options(encoder, tmp_path / "out", *files))


def test_a_task_with_other_columns(encoder, glue, tmp_path):
    (tmp_path / "qnli").mkdir()
    for split in ("train", "validation"):
        Dataset.from_dict(rows(3)).to_parquet(tmp_path / "qnli" / f"{split}-00000-of-00001.parquet")
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: qnli\n  data_files:\n  - split: train\n    path: qnli/train-*\n"
        "  - split: validation\n    path: qnli/validation-*\n---\n"
    )
    with pytest.raises(SystemExit, match=r"train split of qnli must have the columns question"):
        run_script(
            "finetune_glue",
            *glue_options(encoder, tmp_path / "out", "--task_name", "qnli", "--dataset_path", tmp_path),
        )


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real data are not here")
@pytest.mark.parametrize("task", TASKS)
def test_real_tasks(task):
    data = load_task(task, str(SHARED))
    assert set(data.text_columns) < set(data.splits["train"].column_names)
    expected = {"mnli": 3, "stsb": 0}.get(task, 2)
    assert len(data.label_names or []) == expected
    assert isinstance(data.splits, DatasetDict) and data.validation_splits


def test_classes_of_files(tmp_path):
    """One class is no task; NA is a word, and an empty cell is none."""
    file = tmp_path / "rows.csv"
    file.write_text("sentence,label\nNA,1\nnull,1\n")
    with pytest.raises(ValueError, match="must have at least two classes, got 1 alone"):
        load_files(str(file), str(file))
    file.write_text("sentence,label\nNA,null\nnull,NA\n")
    data = load_files(str(file), str(file))
    assert data.label_names == ["NA", "null"] and data.splits["train"]["sentence"][:] == ["NA", "null"]
    lists = tmp_path / "rows.jsonl"
    lists.write_text('{"sentence": "x", "label": [0]}\n{"sentence": "y", "label": [1]}\n')
    with pytest.raises(ValueError, match="Labels must be text or numbers, got List"):
        load_files(str(lists), str(lists))


def test_a_new_head_for_other_classes(encoder, glue, tmp_path):
    """That of a classifier of other classes goes, if it is asked for."""
    task = ["--task_name", "sst2", "--dataset_path", glue, "--max_steps", 2]
    run_script("finetune_glue", *glue_options(encoder, tmp_path / "two", *task))
    file = tmp_path / "rows.csv"
    file.write_text("sentence,label\nx,a\ny,b\nz,c\n")
    files = ["--train_file", file, "--validation_file", file, "--max_steps", 2]
    with pytest.raises(SystemExit, match="ignore_mismatched_sizes"):
        run_script("finetune_glue", *glue_options(tmp_path / "two", tmp_path / "three", *files))
    options = [*glue_options(tmp_path / "two", tmp_path / "three", *files), "--ignore_mismatched_sizes"]
    run_script("finetune_glue", *options)
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "three").config.num_labels == 3


def write_rows(file, texts: list[str], labels: list):
    rows = Dataset.from_dict({"sentence": texts, "label": labels})
    rows.to_csv(str(file)) if file.suffix == ".csv" else rows.to_json(str(file))


@pytest.fixture(scope="module")
def exchanged(encoder, glue, tmp_path_factory):
    """A trained classifier of the films whose outputs are in another order than the classes of the data."""
    folder = tmp_path_factory.mktemp("exchanged")
    run_script("finetune_glue", *glue_options(encoder, folder, "--task_name", "sst2", "--dataset_path", glue))
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    for parameter in (model.classifier.out_proj.weight, model.classifier.out_proj.bias):
        parameter.data = parameter.data.flip(0)
    model.config.id2label, model.config.label2id = {0: "positive", 1: "negative"}, {"positive": 0, "negative": 1}
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "kind, labels, fields",
    [
        ("task", None, {}),
        ("csv", ["negative", "positive"], {}),
        ("json", ["Negative", "POSITIVE"], {}),
        ("json", [1, 0], {}),  # the outputs themselves
        ("csv", ["negative", "positive"], {"id2label": {0: "LABEL_0", 1: "LABEL_1"}}),  # names in label2id alone
        ("json", ["LABEL_1", "LABEL_0"], {"id2label": None, "label2id": None}),
    ],
)
def test_a_trained_classifier_keeps_its_labels(kind, labels, fields, exchanged, glue, tmp_path):
    """In evaluation, prediction and further training, classes of the data are those of the same name."""
    model, sentences = tmp_path / "model", rows(20, seed=20)
    shutil.copytree(exchanged, model)
    saved = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(saved | fields))
    if kind == "task":
        data, labels = ["--task_name", "sst2", "--dataset_path", glue], ["negative", "positive"]
    else:
        for split in ("train", "validation", "test"):
            named = [labels[label] for label in sentences["label"]]
            write_rows(tmp_path / f"{split}.{kind}", sentences["sentence"], named)
        data = [part for split in ("train", "validation", "test")
                for part in (f"--{split}_file", tmp_path / f"{split}.{kind}")]  # fmt: skip
    given = ["--model_name_or_path", model, "--output_dir", tmp_path / "out", "--report_to", "none", *data]
    run_script("finetune_glue", *given, "--do_eval", "--do_predict")
    assert json.loads((tmp_path / "out" / "all_results.json").read_text())["eval_accuracy"] > 0.9
    (file,) = (tmp_path / "out").glob("predict_results_*.txt")
    predicted = [line.split("\t")[1] for line in file.read_text().splitlines()[1:]]
    assert (
        np.mean([name == str(labels[label]) for name, label in zip(predicted, sentences["label"], strict=True)]) > 0.9
    )
    run_script("finetune_glue", *given, "--do_train", "--do_eval", "--max_steps", 1, "--learning_rate", 1e-9)
    assert json.loads((tmp_path / "out" / "all_results.json").read_text())["eval_accuracy"] > 0.9
    own = AutoConfig.from_pretrained(model)
    assert AutoConfig.from_pretrained(tmp_path / "out").id2label == own.id2label


@pytest.mark.parametrize(
    "labels, fields, message",
    [
        (
            ["bad", "good"],
            {},
            "labels must be classes of .*, positive, negative, got bad, good. .*--ignore_mismatched",
        ),
        ([1, 2], {}, "labels must be classes of .*, positive, negative, got 1, 2"),
        ([0, 1], {"id2label": {0: "1", 1: "2"}, "label2id": {"1": 0, "2": 1}}, "classes of .*, 1, 2, got 0, 1"),
        (
            ["negative", "positive"],
            {"label2id": {"negative": 0, "positive": 1}},
            "id2label and label2id of .* must agr",
        ),
    ],
)
def test_labels_of_another_classifier_are_refused(labels, fields, message, exchanged, tmp_path):
    model, sentences = tmp_path / "model", rows(8)
    shutil.copytree(exchanged, model)
    saved = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(saved | fields))
    write_rows(tmp_path / "rows.csv", sentences["sentence"], [labels[label] for label in sentences["label"]])
    files = ["--train_file", tmp_path / "rows.csv", "--validation_file", tmp_path / "rows.csv"]
    given = ["--model_name_or_path", model, "--output_dir", tmp_path / "out", "--report_to", "none", *files]
    with pytest.raises(SystemExit, match=message):
        run_script("finetune_glue", *given, "--do_eval")
    if not fields:  # of the same size, which transformers would keep
        run_script("finetune_glue", *given, "--do_train", "--max_steps", 1, "--learning_rate", 1e-9,
                   "--ignore_mismatched_sizes")  # fmt: skip
        heads = [AutoModelForSequenceClassification.from_pretrained(f) for f in (model, tmp_path / "out")]
        old, new = (head.classifier.out_proj.weight for head in heads)
        assert (old - new).abs().max() > 1e-3 and heads[1].config.id2label == {0: str(labels[0]), 1: str(labels[1])}
        torch.testing.assert_close(*(head.model.layers[0].mixer.u_proj.weight for head in heads))


@pytest.mark.parametrize("labels", [[0, 1], ["not_equivalent", "equivalent"], ["equivalent", "not_equivalent"]])
def test_a_copy_of_a_task_without_names_of_classes(labels, tmp_path):
    """Its numbers are GLUE's; names are those of GLUE in the order of their numbers, which F1 of MRPC depends on."""
    pairs = {"sentence1": ["a", "b"], "sentence2": ["a", "b"], "label": labels}
    files = [{"split": split, "path": f"{split}.json"} for split in ("train", "validation")]
    for split in ("train", "validation"):
        Dataset.from_dict(pairs).to_json(str(tmp_path / f"{split}.json"))
    known = {"configs": [{"config_name": "mrpc", "data_files": files}]}
    (tmp_path / "README.md").write_text(f"---\n{json.dumps(known)}\n---\n")
    data = load_task("mrpc", str(tmp_path))
    assert data.label_names == ["not_equivalent", "equivalent"]
    assert data.splits["train"]["label"][:] == ([1, 0] if labels[0] == "equivalent" else [0, 1])


def test_what_is_said_of_a_run(encoder, tmp_path, caplog, capsys):
    """The rate that was not given, the loss in the bar, the accuracy beside F1, and how to classify next."""
    for split in ("train", "validation"):
        pairs = rows(20) | {"sentence1": rows(20)["sentence"], "sentence2": rows(20)["sentence"]}
        del pairs["sentence"]
        Dataset.from_dict(pairs).to_json(str(tmp_path / f"{split}.json"))
    files = [{"split": split, "path": f"{split}.json"} for split in ("train", "validation")]
    known = {"configs": [{"config_name": "mrpc", "data_files": files}]}
    (tmp_path / "README.md").write_text(f"---\n{json.dumps(known)}\n---\n")
    given = ["--model_name_or_path", encoder, "--task_name", "mrpc", "--dataset_path", tmp_path, "--max_steps", 10,
             "--output_dir", tmp_path / "out", "--report_to", "none", "--do_train"]  # fmt: skip
    run_script("finetune_glue", *given, "--do_eval", "--save_steps", 5)
    assert (
        "learning rate 0.001, measured for TNNs up to 256 wide, docs/research/figures/glue-rates.json" in caplog.text
    )
    assert re.search(r"loss \d", capsys.readouterr().err)
    (row,) = [cells for cells in table_rows((tmp_path / "out" / "results.md").read_text()) if cells[0] == "mrpc"]
    assert row[1] == "f1" and re.fullmatch(r"accuracy [\d.]+", row[-1])
    command = next(line for line in caplog.text.splitlines() if "text-classification" in line)
    answer = run_command(shlex.split(command), capture_output=True, text=True, check=True).stdout
    assert "equivalent" in answer
    options = json.loads((tmp_path / "out" / "training_args.json").read_text())
    assert options["learning_rate"] == 1e-3 and options["logging_steps"] == 10
    caplog.clear()
    run_script("finetune_glue", *given, "--max_steps", 12, "--resume_from_checkpoint", "latest")
    assert f"learning rate 0.001, that of {tmp_path / 'out' / 'checkpoint-10'}" in caplog.text
