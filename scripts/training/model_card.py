"""Render the card of a model from the measurements of the programs. No number in a card is typed by hand.

`render` turns a folder of inputs (`card_inputs.py`) into the text of the card, by `model_cards/TEMPLATE.md`. It leaves
out parts whose file is missing. The same inputs give the same card.
"""

import shutil
from pathlib import Path

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, ModelCard, ModelCardData, eval_result_entries_to_yaml
from huggingface_hub.constants import EVAL_RESULTS_FOLDER
from jinja2 import Environment, StrictUndefined

from modeling_tnn.configuration_tnn import TnnConfig
from tnn_programs.cli.atomic import read_json, write_text
from tnn_programs.cli.tables import format_metric
from tnn_programs.training.card_inputs import DATA_OPTIONS, FIGURES, INPUTS, PIPELINES, RECIPE

# The folder is inside an installed package, or beside it in a clone.
_FOLDERS = [Path(__file__).resolve().parents[level] / "model_cards" for level in (1, 2)]
TEMPLATE = next((folder for folder in _FOLDERS if folder.is_dir()), _FOLDERS[-1]) / "TEMPLATE.md"
# Operators -> their papers in citations.bib.
PAPERS = {"fd": "moreno2023ski", "ski": "moreno2023ski", "rtf": "parnichkun2024rtf", "s4d": "gu2022s4d"}
PAPERS |= {"hyena": "poli2023hyena"}


def results(inputs: dict, kind: str, data: str) -> tuple[list[dict], list[EvalResult]]:
    """The figures of a training as rows of a table, and as metadata. `kind` is text or pictures."""
    metrics, arguments = inputs["metrics"] or {}, inputs["arguments"] or {}
    split, file = metrics.get("split", "validation"), arguments.get("validation_file")
    hub = hub_data(inputs)
    measured_on = {"dataset_type": hub[0] if len(hub) == 1 else kind, "dataset_name": data or kind}
    where = f"{split} part of {data}" if data else f"{split} {kind}"
    if file:
        measured_on, where = {"dataset_type": kind, "dataset_name": file}, f"the {kind} {file}"
    rows, evaluations = [], []
    for key, (name, written, is_evaluation) in FIGURES.items():
        value = metrics.get(key)
        if not isinstance(value, int | float):
            continue
        of_data = is_evaluation or "perplexity" in key
        rows.append({"name": name, "text": written.format(value), "on": where if of_data else "training"})
        if is_evaluation:
            about = {"metric_type": key, "metric_name": name, "metric_value": value, "dataset_split": split}
            evaluations.append(EvalResult(PIPELINES[inputs["model"]["class"]], **measured_on, **about))
    return rows, evaluations


def hub_data(inputs: dict) -> list[str]:
    """The ids of the training data that are on the Hub."""
    named = inputs["card"]["dataset_id"] or (inputs["arguments"] or {}).get("dataset_name") or ""
    return [name for name in named.split() if "/" in name]


def citations(config: dict) -> list[str]:
    """The citations of the TNN paper, and of the paper of the operator if it is another one."""
    text = TEMPLATE.with_name("citations.bib").read_text(encoding="utf-8")
    entries = {entry.partition("{")[2].partition(",")[0]: entry for entry in text.strip().split("\n\n")}
    operators = [config["tno_type"], config["converted_from"]]
    return [entries[key] for key in ("qin2023toeplitz", *(PAPERS[name] for name in operators if name in PAPERS))]


def eval_entries(inputs: dict) -> list[EvalResultEntry]:
    """The figures on one data set of the Hub, as its pages and leaderboards read them."""
    metrics, arguments = inputs["metrics"] or {}, inputs["arguments"] or {}
    of_glue = arguments.get("task_name")
    found = ["nyu-mll/glue"] if of_glue else hub_data(inputs)
    if len(found) != 1 or arguments.get("validation_file"):
        return []
    task, split = of_glue or arguments.get("dataset_config_name") or "default", metrics.get("split", "validation")
    return [
        EvalResultEntry(found[0], task, metrics[key], notes=f"{name}, {split} split")
        for key, (name, _, is_evaluation) in FIGURES.items()
        if is_evaluation and isinstance(metrics.get(key), int | float)
    ]


def read_inputs(folder: Path) -> dict:
    return {name: read_json(folder / file) if (folder / file).is_file() else None for name, file in INPUTS.items()}


def write_card(folder: Path):
    """Write the card, README.md, and figures on data of the Hub, `.eval_results/`, from the inputs in `folder`."""
    write_text(folder / "README.md", render(folder))
    shutil.rmtree(folder / EVAL_RESULTS_FOLDER, ignore_errors=True)
    if entries := eval_entries(read_inputs(folder)):
        (folder / EVAL_RESULTS_FOLDER).mkdir()
        name = f"{entries[0].dataset_id.replace('/', '_')}.yaml"
        text = yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False)
        write_text(folder / EVAL_RESULTS_FOLDER / name, text)


def render(folder: Path) -> str:
    """The text of the card whose inputs are in `folder`."""
    inputs = read_inputs(folder)
    inputs["config"] = TnnConfig.from_dict(inputs["config"]).to_dict()
    card, config, arguments = inputs["card"], inputs["config"], inputs["arguments"] or {}
    name, task = card["repo_id"].split("/")[-1], PIPELINES[inputs["model"]["class"]]
    kind = "pictures" if task == "image-classification" else "text"
    data = card["data"] or " ".join(arguments.get(option, "") for option in DATA_OPTIONS).strip()
    rows, evaluations = results(inputs, kind, data)
    metadata = ModelCardData(
        language=None if kind == "pictures" or config["input_channels"] else card["language"],
        license=card["license"],
        library_name="transformers",
        pipeline_tag=task,
        tags=["tnn", "toeplitz", config["tno_type"], "custom_code"],
        datasets=hub_data(inputs) or None,
        model_name=name,
        eval_results=evaluations or None,
    )
    unused = {"mlm_probability"} if arguments.get("objective") == "clm" else set()
    recipe = {name: arguments[name] for name in RECIPE if arguments.get(name) is not None and name not in unused}
    # Markdown, not HTML: nothing is escaped.
    environment = Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)  # noqa: S701
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    derived = {"card_data": metadata, "name": name, "data": data, "results": rows, "citations": citations(config)}
    text = template.render(inputs | derived | {"arguments": recipe, "format_metric": format_metric})
    return str(ModelCard(text)).strip() + "\n"
