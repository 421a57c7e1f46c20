"""transformers' example scripts for tags and answers, unchanged, on a model whose code comes from its folder.

No release on the package index has the examples. `TRANSFORMERS_EXAMPLES` names the folder `examples/pytorch` of a
checkout; without it their tests are skipped. The scripts load a metric of the Hub. `evaluate` looks for a folder of
that name in the working directory first, where these tests put one.
"""

import json
import os
import sys
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForTokenClassification,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from helpers import processes
from helpers.ecosystem import save_head, sentence_tokenizer
from helpers.models import seeded, tiny_config
from modeling_tnn import TnnForQuestionAnswering, TnnForTokenClassification, TnnModel

FOLDER = os.environ.get("TRANSFORMERS_EXAMPLES")
needs_scripts = pytest.mark.skipif(FOLDER is None, reason="TRANSFORMERS_EXAMPLES names no folder with the scripts")

TAGS = """
import datasets
import evaluate


class Tags(evaluate.Metric):
    def _info(self):
        features = dict.fromkeys(("predictions", "references"), datasets.List(datasets.Value("string")))
        return evaluate.MetricInfo(description="", citation="", features=datasets.Features(features))

    def _compute(self, predictions, references):
        pairs = [pair for rows in zip(predictions, references) for pair in zip(*rows)]
        accuracy = sum(found == wanted for found, wanted in pairs) / len(pairs)
        return {f"overall_{name}": accuracy for name in ("precision", "recall", "f1", "accuracy")}
"""
ANSWERS = """
import datasets
import evaluate


class Answers(evaluate.Metric):
    def _info(self):
        text, number = datasets.Value("string"), datasets.Value("int32")
        given = {"text": datasets.List(text), "answer_start": datasets.List(number)}
        features = {"predictions": {"id": text, "prediction_text": text}, "references": {"id": text, "answers": given}}
        return evaluate.MetricInfo(description="", citation="", features=datasets.Features(features))

    def _compute(self, predictions, references):
        found = {one["id"]: one["prediction_text"] for one in predictions}
        right = [found[one["id"]] in one["answers"]["text"] for one in references]
        return {"exact_match": 100 * sum(right) / len(right), "f1": 0.0}
"""
SENTENCES = ["Ada met Grace", "Grace saw Alan", "we saw Ada", "Alan met us"]


def run(script: str, metric: str, code: str, model: Path, data: dict[str, str], steps: int) -> dict:
    """The results of evaluation after some steps of a script, in a process that does not import the package."""
    here = model.parent
    (here / metric).mkdir()
    (here / metric / f"{metric}.py").write_text(code)
    files = [part for split, text in data.items() for part in (f"--{split}_file", write(here / f"{split}.json", text))]
    arguments = ["--model_name_or_path", model, "--output_dir", here / "out", "--trust_remote_code", "--do_train",
                 "--do_eval", "--max_steps", steps, "--learning_rate", 1e-2, "--report_to", "none", "--use_cpu",
                 "--save_strategy", "no"]  # fmt: skip
    environment = os.environ | {"HF_HOME": str(here / "cache"), "HF_HUB_OFFLINE": "1"}
    processes.run([sys.executable, Path(FOLDER) / script, *arguments, *files], check=True, cwd=here, env=environment)
    return json.loads((here / "out" / "all_results.json").read_text())


def write(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


@pytest.fixture
def model(tmp_path) -> Path:
    return save_head(TnnModel, sentence_tokenizer(), tmp_path / "model")


@pytest.mark.parametrize("causal", [True, False])
def test_predictions_of_answers(causal, tmp_path):
    """`run_qa.py` evaluates without labels, and asks for two arrays: no state, no loss."""
    model = seeded(TnnForQuestionAnswering, tiny_config(causal=causal))
    rows = [{"input_ids": [5, 6, 7, 8], "attention_mask": [1, 1, 1, 0], "example_id": "a"}] * 5
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", per_device_eval_batch_size=2)
    found = Trainer(model, args, data_collator=default_data_collator).predict(Dataset.from_list(rows)).predictions
    assert [part.shape for part in found] == [(5, 4)] * 2


@needs_scripts
def test_run_ner(model):
    """Names, which begin with a capital letter, are found."""
    words = [sentence.split() for sentence in SENTENCES]
    rows = [{"tokens": row, "ner_tags": ["B-PER" if word[0].isupper() else "O" for word in row]} for row in words]
    text = "\n".join(json.dumps(row) for row in rows * 8)
    results = run("token-classification/run_ner.py", "seqeval", TAGS, model, {"train": text, "validation": text}, 30)
    assert results["eval_accuracy"] > 0.9
    tagger = AutoModelForTokenClassification.from_pretrained(model.parent / "out")
    assert type(tagger) is TnnForTokenClassification and tagger.config.id2label == {0: "B-PER", 1: "O"}


@needs_scripts
def test_run_qa(model):
    """The answer is the first word of a text of four sentences."""
    rows = []
    for place, sentence in enumerate(SENTENCES * 8):
        answer = {"text": [sentence.split()[0]], "answer_start": [0]}
        rows.append({"id": str(place), "question": "Who?", "context": sentence, "answers": answer})
    text = json.dumps({"data": rows})
    results = run("question-answering/run_qa.py", "squad", ANSWERS, model, {"train": text, "validation": text}, 40)
    assert results["eval_exact_match"] > 90
    answerer = AutoModelForQuestionAnswering.from_pretrained(model.parent / "out")
    assert type(answerer) is TnnForQuestionAnswering
