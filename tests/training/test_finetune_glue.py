"""Fine-tuning on GLUE and on files: metrics, results, sweeps, labels, and the files that it refuses."""

import json
import math
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer

from helpers.glue import glue_options, rows
from helpers.models import slow
from helpers.scripts import read, run_script, table_rows, tree, write_config
from modeling_tnn import TnnConfig
from modeling_tnn.data.dna import dna_tokenizer
from tnn_programs.data.glue import load_files, load_set, load_task, metrics_of, score
from tnn_programs.training import finetune_glue
from tnn_programs.training.card_inputs import read_metrics
from tnn_programs.training.finetune_glue import Task, check_metric
from tnn_programs.training.processes import StopRequested

load = AutoModelForSequenceClassification.from_pretrained


def finetune(model, output, *more):
    run_script("finetune_glue", *glue_options(model, output), *more)


def use(model, output, *more):
    """Without a training, unless `more` asks for one."""
    run_script("finetune_glue", f"--model_name_or_path {model} --output_dir {output} --report_to none", *more)


@pytest.fixture(scope="module")
def sst2(glue) -> str:
    return f"--task_name sst2 --dataset_path {glue}"


@pytest.fixture(scope="module")
def trained(encoder, sst2, tmp_path_factory):
    """A classifier of the films, with predictions."""
    folder = tmp_path_factory.mktemp("trained")
    finetune(encoder, folder, sst2, "--do_predict --save_strategy no")
    return folder


def predictions(folder) -> list[str]:
    (file,) = folder.glob("predict_results_*.txt")
    heading, *lines = file.read_text().splitlines()
    assert heading == "index\tprediction"
    return [line.split("\t")[1] for line in lines]


def test_one_task(trained):
    results = read(trained)
    assert results["eval_accuracy"] > 0.9 and results["eval_samples"] == 60 and results["train_loss"] > 0
    assert load(trained).config.id2label == {0: "negative", 1: "positive"}
    assert AutoTokenizer.from_pretrained(trained).mask_token == "<mask>"
    expected = [("negative", "positive")[label] for label in rows(20, seed=20)["label"]]
    assert np.mean([one == other for one, other in zip(predictions(trained), expected, strict=True)]) > 0.85


@pytest.mark.slow
def test_sweep_keeps_the_best(encoder, glue, tmp_path):
    run_script("finetune_glue", *glue_options(encoder, tmp_path, "--sweep"),
               f"--task_name sst2 stsb --dataset_path {glue} --num_train_epochs 2",
               "--sweep_learning_rates 1e-2 1e-6 --sweep_seeds 3 4")  # fmt: skip
    sst2, stsb = json.loads((tmp_path / "results.json").read_text())
    assert (sst2["metric"], stsb["metric"]) == ("accuracy", "spearmanr")
    assert sst2["learning_rate"] == 0.01 and sst2["seeds"] == 2 and len(sst2["runs"]) == 4
    scores = {(run["learning_rate"], run["seed"]): run["eval_accuracy"] for run in sst2["runs"]}
    assert sst2["best"] == max(scores.values()) == read(tmp_path / "sst2")["eval_accuracy"]
    assert sst2["mean"] == pytest.approx((scores[0.01, 3] + scores[0.01, 4]) / 2)
    labels = rows(60, seed=60)["label"]
    assert sst2["majority"] in (np.mean(labels), 1 - np.mean(labels)) and stsb["majority"] is None
    report = (tmp_path / "results.md").read_text()
    assert [row[0] for row in table_rows(report)[2:]] == ["sst2", "stsb", "average"]
    load(tmp_path / "stsb")


def test_fields_of_the_configuration_and_random_weights(encoder, sst2, tmp_path):
    """The fields reach the encoder that is trained, and are saved with it; no pretrained weights are left."""
    finetune(encoder, tmp_path, sst2, "--from_scratch --max_steps 1 --learning_rate 1e-12",
             "--config_overrides classifier_pooling=last,classifier_dropout=0.5")  # fmt: skip
    changed = load(tmp_path)
    assert (changed.config.classifier_pooling, changed.config.classifier_dropout) == ("last", 0.5)
    own, given = (model.model.layers[0].mixer.u_proj.weight
                  for model in (changed, AutoModelForMaskedLM.from_pretrained(encoder)))  # fmt: skip
    assert (own - given).abs().max() > 1e-3


def write_files(folder, kind: str, texts: list[str], labels: list) -> str:
    """All splits as files, as options."""
    for split in ("train", "validation", "test"):
        data = Dataset.from_dict({"sentence": texts, "label": labels})
        getattr(data, f"to_{kind}")(str(folder / f"{split}.{kind}"))
    return " ".join(f"--{split}_file {folder}/{split}.{kind}" for split in ("train", "validation", "test"))


def test_files(tmp_path):
    for kind in ("csv", "json", "parquet"):
        write_files(tmp_path, kind, ["a", "b"], ["good", "bad"])
        data = load_files(str(tmp_path / f"train.{kind}"), str(tmp_path / f"validation.{kind}"))
        assert data.label_names == ["bad", "good"] and data.splits["train"]["label"][:] == [1, 0]
    (tmp_path / "values.csv").write_text("a,b,label\nx,y,0.5\nz,w,1.5\n")
    data = load_files(*[str(tmp_path / "values.csv")] * 2, sentence_keys=("a", "b"))
    assert data.label_names is None and data.text_columns == ("a", "b")


def test_columns_of_text(tmp_path):
    """The columns of text in files: the named ones, the only one with text, or those with names of GLUE tasks."""
    file = str(tmp_path / "rows.parquet")

    def found(columns: dict, keys: tuple = ()) -> tuple:
        Dataset.from_list([columns | {"label": 0}, columns | {"label": 1}]).to_parquet(file)
        return load_files(file, file, sentence_keys=keys).text_columns

    assert found({"review": "x", "stars": 3, "id": "a", "idx": "b"}) == ("review",)
    assert found({"idx": 1, "source": "web", "sentence2": "y", "sentence1": "x"}) == ("sentence1", "sentence2")
    assert found({"hypothesis": "y", "number": 7, "premise": "x"}) == ("premise", "hypothesis")
    assert found({"source": "web", "review": "x", "reply": "y"}, ("review", "reply")) == ("review", "reply")
    Dataset.from_dict({"review": ["x", "y"], "kind": ["a", "b"], "label": [[1], [2]]}).to_parquet(file)
    named = load_files(file, file, sentence_keys=("review",), label_key="kind")
    assert named.label_names == ["a", "b"] and named.splits["train"]["label"][:] == [0, 1]
    for columns, keys, message in (
        ({"sentence": "x", "source": "web"}, (), "--sentence1_key .*--sentence2_key must name .* sentence, source"),
        ({"number": 3}, (), "got the columns of text none"),
        ({"review": "x", "stars": 3}, ("review", "stars"), "--sentence2_key must be a column of text .*got stars"),
    ):
        with pytest.raises(ValueError, match=message):
            found(columns, keys)


def test_files_that_are_refused(tmp_path):
    """NA is a word, and an empty cell is none."""
    train, validation = tmp_path / "train.csv", tmp_path / "validation.csv"
    train.write_text("sentence,label\nx,1\ny,0\n")
    for content, message in (
        ("sentence,label\n", "has no rows"),
        ("sentence,class\nx,1\n", "validation.csv must have the columns label .*sentence, class. --label_key names"),
        ("sentence,label\nx,7\n", r"label must be one of those in the training file, \[0, 1\], got 7"),
        ("sentence,label\nx,1\n,0\n", "column sentence of .*validation.csv must have values in all rows, .* row 2"),
    ):
        validation.write_text(content)
        with pytest.raises(ValueError, match=message):
            load_files(str(train), str(validation))
    train.write_text("sentence,label\nNA,1\nnull,1\n")
    with pytest.raises(ValueError, match="must have at least two classes, got 1 alone"):
        load_files(str(train), str(train))
    train.write_text("sentence,label\nNA,null\nnull,NA\n")
    data = load_files(str(train), str(train))
    assert data.label_names == ["NA", "null"] and data.splits["train"]["sentence"][:] == ["NA", "null"]


def test_labels_by_another_name(encoder, tmp_path):
    """Beside a column `label`, which does not count then; weights of classes, and the best epoch."""
    films = rows(60)
    rare = [{"text": t, "topic": "rare" if i < 6 else "often", "label": i} for i, t in enumerate(films["sentence"])]
    Dataset.from_list(rare).to_csv(tmp_path / "rows.csv", index=False)
    given = f"--train_file {tmp_path}/rows.csv --validation_file {tmp_path}/rows.csv --label_key topic"
    options = "--learning_rate 0 --num_train_epochs 3 --class_weights balanced --eval_strategy epoch"
    options += " --save_strategy epoch --load_best_model_at_end true --metric_for_best_model accuracy"
    finetune(encoder, tmp_path / "out", given, options)
    results = read(tmp_path / "out")
    (summary,) = read(tmp_path / "out", "results")
    assert results["epoch"] == 3 and summary["majority"] == 0.9
    model, tokenizer = load(tmp_path / "out"), AutoTokenizer.from_pretrained(tmp_path / "out")
    assert model.config.id2label == {0: "often", 1: "rare"}
    losses = []
    for row in rare:
        labels = torch.tensor([int(row["topic"] == "rare")])
        losses.append(model(**tokenizer(row["text"], return_tensors="pt"), labels=labels).loss.item())
    # Both classes have half of the weight: rows by classes, by rows of the class.
    assert results["eval_loss"] == pytest.approx((np.mean(losses[:6]) + np.mean(losses[6:])) / 2, rel=1e-4)
    options = options.replace("--class_weights balanced", "--resume_from_checkpoint latest")
    with pytest.raises(SystemExit, match="class_weights must be balanced, got None"):
        finetune(encoder, tmp_path / "out", given, options)


def test_text_that_looks_like_numbers(tmp_path):
    """In the other files, as long as the training file has other words too."""
    (tmp_path / "train.csv").write_text("sentence,label\na,1\nb,3+\n")
    (tmp_path / "validation.csv").write_text("sentence,label\n007,1\n1.50,1\n")
    data = load_files(str(tmp_path / "train.csv"), str(tmp_path / "validation.csv"))
    rows = data.splits["validation"]
    assert data.label_names == ["1", "3+"] and rows["sentence"][:] == ["007", "1.50"] and rows["label"][:] == [0, 0]


def test_a_regression(encoder, tmp_path):
    """The error of a regression is not a percentage, in the table and on the card."""
    file = tmp_path / "values.csv"
    Dataset.from_dict(rows(40) | {"label": [3.5 + label for label in rows(40)["label"]]}).to_csv(file)
    finetune(encoder, tmp_path / "out", f"--train_file {file} --validation_file {file} --max_steps 2")
    error = read(tmp_path / "out")["eval_mse"]
    (row,) = [line for line in (tmp_path / "out" / "results.md").read_text().splitlines() if "files" in line]
    shown = [cell.strip() for cell in row.split("|")][2:]
    assert shown[:2] == ["mse", ""] and shown[2] == f"{error:.4g} ± 0" and shown[4] == f"{error:.4g}"
    assert read_metrics({"eval_mse": error}) == {"mse": error}


def test_the_folder_of_a_trained_model(trained, encoder, sst2, tmp_path):
    """An evaluation renews its own figures there, and a prediction adds none. Another training must be asked for.

    An untrained head is evaluated, but not left as if it were a model.
    """
    use(encoder, tmp_path / "untrained", sst2, "--do_eval")
    assert "eval_accuracy" in read(tmp_path / "untrained")
    assert not list((tmp_path / "untrained").glob("*.safetensors"))
    folder = shutil.copytree(trained, tmp_path / "model")
    before, table = read(folder), (folder / "results.md").read_text()
    use(folder, folder, sst2, "--do_predict")
    assert read(folder) == before
    use(folder, folder, sst2, "--do_eval")
    assert read(folder).keys() >= before.keys() and read(folder)["train_loss"] == before["train_loss"]
    assert (folder / "results.md").read_text() == table
    (folder / "predict_results_qqp.txt").touch()
    kept = tree(folder)
    for more in ((sst2,), (sst2, "--sweep")):
        with pytest.raises(SystemExit, match="holds a model. Give --overwrite_output_dir to replace it"):
            run_script("finetune_glue", *glue_options(encoder, folder, *more[1:]), sst2)
    with pytest.raises(SystemExit, match="must not hold the model that is read"):
        finetune(folder, folder, sst2, "--overwrite_output_dir")
    assert tree(folder) == kept
    finetune(encoder, folder, sst2, "--max_steps 1 --overwrite_output_dir")
    assert tree(folder) != kept and not list(folder.glob("predict_results_*")), "predictions of the earlier model go"


def test_a_stopped_run_says_how_to_go_on(encoder, glue, tmp_path, monkeypatch, caplog):
    """Of several tasks, those that have not begun have no checkpoint."""
    monkeypatch.setattr(finetune_glue, "run_all", lambda *_: (_ for _ in ()).throw(StopRequested(143, "stopped.")))
    for tasks, checkpoint in (("sst2", "latest"), ("sst2 stsb", "auto")):
        caplog.clear()
        with pytest.raises(SystemExit):
            finetune(encoder, tmp_path, f"--task_name {tasks} --dataset_path {glue}")
        assert f"stopped. Continue with --resume_from_checkpoint {checkpoint}." in caplog.text


def test_metrics():
    """By hand, from counts: 3 true positives, 1 false positive, 2 false negatives, 4 true negatives."""
    predicted = np.array([1, 1, 1, 1, 0, 0, 0, 0, 0, 0])
    references = np.array([1, 1, 1, 0, 1, 1, 0, 0, 0, 0])
    matthews = (3 * 4 - 1 * 2) / math.sqrt(4 * 5 * 5 * 6)
    for task, expected in (
        ("sst2", {"accuracy": 0.7}),
        ("mrpc", {"f1": 6 / 9, "accuracy": 0.7}),
        ("cola", {"matthews_correlation": matthews}),
    ):
        assert score(metrics_of(task), predicted, references) == pytest.approx(expected)
    values = score(metrics_of("stsb"), np.array([1.0, 2.0, 4.0]), np.array([1.0, 3.0, 2.0]))
    assert values == pytest.approx({"spearmanr": 0.5, "pearson": np.corrcoef([1, 2, 4], [1, 3, 2])[0, 1]})
    assert score(metrics_of(None, regression=True), np.array([1.0, 2.0]), np.array([0.0, 4.0])) == {"mse": 2.5}
    other = score(("f1",), np.where(predicted == 0, -1, 1), references)  # of a model with further classes
    assert other == pytest.approx({"f1": 6 / 9})
    for name, classes in (("accuracy", None), ("f1", ["a", "b", "c"])):
        with pytest.raises(ValueError, match="--metric_name must be"):
            check_metric(name, classes)


def test_a_run_that_diverged_is_not_the_best():
    diverged = score(("mse",), np.array([np.nan, 1.0]), np.array([0.0, 1.0]))["mse"]
    for metric, expected in (("mse", 0.5), ("pearson", 0.7)):
        assert Task.best(SimpleNamespace(main_metric=metric), [diverged, 0.7, diverged, 0.5]) == expected


def write_task(folder, task: str, columns: dict[str, list]) -> str:
    """A data set of one task, without names of its classes."""
    for split in ("train", "validation"):
        Dataset.from_dict(columns).to_parquet(folder / task / f"{split}.parquet")
    configs = {"configs": [{"config_name": task, "data_dir": task}]}
    (folder / "README.md").write_text(f"---\n{json.dumps(configs)}\n---\n")
    return str(folder)


def test_a_copy_of_a_task(tmp_path):
    """Its columns are GLUE's; where its classes have no names, their numbers are GLUE's."""
    with pytest.raises(ValueError, match=r"train split of qnli must have the columns question"):
        load_task("qnli", write_task(tmp_path, "qnli", rows(3)))
    pairs = {"sentence1": ["a", "b"], "sentence2": ["a", "b"]}
    data = load_task("mrpc", write_task(tmp_path / "a", "mrpc", pairs | {"label": [1, 0]}))
    assert data.label_names == ["0", "1"] and data.splits["train"]["label"][:] == [1, 0]
    with pytest.raises(ValueError, match="labels of mrpc must be numbers, got text"):
        load_task("mrpc", write_task(tmp_path / "b", "mrpc", pairs | {"label": ["equivalent", "other"]}))


@pytest.fixture
def exchanged(trained, tmp_path):
    """The trained classifier with outputs in another order than the classes of the data."""
    folder = shutil.copytree(trained, tmp_path / "model")
    model = load(folder)
    for parameter in (model.classifier.out_proj.weight, model.classifier.out_proj.bias):
        parameter.data = parameter.data.flip(0)
    model.config.id2label, model.config.label2id = {0: "positive", 1: "negative"}, {"positive": 0, "negative": 1}
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "kind, labels", [("task", ["negative", "positive"]), *slow(("json", ["Negative", "POSITIVE"]))]
)
def test_a_trained_classifier_keeps_its_labels(kind, labels, exchanged, sst2, tmp_path):
    """In evaluation, prediction and further training, classes of the data are those of the same name."""
    films, out = rows(20, seed=20), tmp_path / "out"
    named = [labels[label] for label in films["label"]]
    data = sst2 if kind == "task" else write_files(tmp_path, kind, films["sentence"], named)
    use(exchanged, out, data, "--do_train --do_eval --do_predict --max_steps 1 --learning_rate 1e-9")
    assert read(out)["eval_accuracy"] > 0.9
    assert np.mean([one == name for one, name in zip(predictions(out), named, strict=True)]) > 0.9
    assert AutoConfig.from_pretrained(out).id2label == AutoConfig.from_pretrained(exchanged).id2label


@pytest.mark.slow
def test_labels_of_another_classifier_are_refused(exchanged, tmp_path):
    """A new head is drawn if that is asked for, even of the same size, which transformers would keep."""
    out = tmp_path / "out"
    for labels in (["bad", "good"], ["bad", "good", "dull"]):
        films = [labels[index % len(labels)] for index in range(9)]
        data = write_files(tmp_path, "csv", rows(9)["sentence"], films)
        with pytest.raises(SystemExit, match="classes of .*, positive, negative, got bad, .*--ignore_mismatched"):
            use(exchanged, out, data, "--do_eval")
        use(exchanged, out, data, "--do_train --max_steps 1 --learning_rate 1e-9 --ignore_mismatched_sizes",
            "--overwrite_output_dir")  # fmt: skip
        old, new = load(exchanged), load(out)
        assert sorted(new.config.id2label.values()) == sorted(labels)
        assert (old.classifier.out_proj.weight - new.classifier.out_proj.weight[:2]).abs().max() > 1e-3
        weights = [head.model.layers[0].mixer.u_proj.weight for head in (old, new)]
        assert (weights[0] - weights[1]).abs().max() < 1e-6


@pytest.mark.slow
def test_what_is_said_of_a_run(encoder, tmp_path, caplog):
    """The rate that was not given, the accuracy beside F1, and what a resumed run takes over."""
    films, out = rows(20), tmp_path / "out"
    pairs = {"sentence1": films["sentence"], "sentence2": films["sentence"], "label": films["label"]}
    given = f"--task_name mrpc --dataset_path {write_task(tmp_path, 'mrpc', pairs)} --max_steps 10 --do_train"
    use(encoder, out, given, "--do_eval --save_steps 5")
    rate = "learning rate 0.001, measured for TNNs up to 256 wide, docs/research/figures/glue-rates.json"
    assert rate in caplog.text
    (row,) = [cells for cells in table_rows((out / "results.md").read_text()) if cells[0] == "mrpc"]
    assert row[1] == "f1" and re.fullmatch(r"accuracy [\d.]+", row[-1])
    options = read(out, "training_args")
    assert options["learning_rate"] == 1e-3 and options["logging_steps"] == 10
    caplog.clear()
    use(encoder, out, given, "--max_steps 12 --resume_from_checkpoint latest")
    assert f"learning rate 0.001, that of {out / 'checkpoint-10'}" in caplog.text


def dna_rows(count: int, seed: int) -> dict[str, list]:
    """Sequences of GC-rich and AT-rich letters."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, 2, count)
    texts = ["".join(draw.choice(list("ACGT"), 30, p=GC_SHARES[label])) for label in labels]
    return {"sequence": texts, "name": ["x"] * count, "label": labels.tolist(), "task": ["gc"] * count}


GC_SHARES = ([0.35, 0.15, 0.15, 0.35], [0.15, 0.35, 0.35, 0.15])


def write_benchmark(folder):
    """A folder in the form of the Nucleotide Transformer's tasks: all in one, by a column, without a validation split.

    The labels of the second task are the opposite ones.
    """
    for split, count in (("train", 200), ("test", 40)):
        first, second = dna_rows(count, count), dna_rows(count, count + 1)
        second |= {"label": [1 - label for label in second["label"]], "task": ["at"] * count}
        both = {name: first[name] + second[name] for name in first}
        Dataset.from_dict(both).to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")
    return folder


@pytest.mark.slow
def test_tasks_of_dna(tmp_path):
    """Both tasks by their names: trained, and tested by the metric that is asked for."""
    data, model = write_benchmark(tmp_path / "benchmark"), tmp_path / "model"
    tokenizer = dna_tokenizer()
    tokenizer.save_pretrained(model)
    config = TnnConfig.from_pretrained(write_config(model, causal=False, vocab_size=len(tokenizer)))
    AutoModelForMaskedLM.from_config(config).save_pretrained(model)
    given = f"--dataset_name {data} --dataset_config_name gc at --sentence1_key sequence --do_predict"
    finetune(
        model, tmp_path / "out", given, "--metric_name matthews_correlation --save_strategy no --max_seq_length 32"
    )
    for task in ("gc", "at"):
        results = read(tmp_path / "out" / task)
        assert results["test_matthews_correlation"] > 0.6 and results["eval_samples"] == 20
        assert len(predictions(tmp_path / "out" / task)) == 40
    table = (tmp_path / "out" / "results.md").read_text()
    assert "| gc " in table and "matthews_correlation" in table
    with pytest.raises(ValueError, match="a configuration or a task of .*, at, gc, got cg"):
        load_set(str(data), "cg", ("sequence",))
    first, again = (load_set(str(data), "gc", ("sequence",)).splits for _ in range(2))
    assert first["train"]["sequence"] == again["train"]["sequence"]
    assert not set(first["train"]["sequence"]) & set(first["validation"]["sequence"])
