"""Render the card of a model from the measurements of the programs. No number in a card is typed by hand.

`collect` gathers a folder of inputs: the configuration, facts about the model, the JSON files of the programs, and
pictures. `render` turns such a folder into the text of the card, by `model_cards/TEMPLATE.md`. It leaves out parts
whose file is missing. The same inputs give the same card.
"""

import argparse
import json
import shutil
from functools import partial
from pathlib import Path

from tnn_programs.cli.errors import importing

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from jinja2 import Environment, StrictUndefined
from transformers import AutoConfig, PreTrainedModel

from modeling_tnn import __version__, modeling_tnn
from modeling_tnn.cache_tnn import CACHE, memory_per_sequence
from modeling_tnn.configuration_tnn import TnnConfig
from modeling_tnn.history import ROOM
from modeling_tnn.hub import AUTO_MAP
from tnn_programs.cli import model_path
from tnn_programs.cli.atomic import write_json
from tnn_programs.cli.model_path import check_model_path
from tnn_programs.cli.tables import format_metric

# The folder is inside an installed package, or beside it in a clone.
_FOLDERS = [Path(__file__).resolve().parents[level] / "model_cards" for level in (1, 2)]
TEMPLATE = next((folder for folder in _FOLDERS if folder.is_dir()), _FOLDERS[-1]) / "TEMPLATE.md"
# Names of inputs -> their files in the folder of a card.
INPUTS = {name: f"{name}.json" for name in (
    "card", "config", "model", "metrics", "evaluation", "glue", "conversion", "decoding", "kernels"
)} | {"arguments": "training_args.json"}  # fmt: skip
PICTURES = ("kernels.png", "length_extrapolation.png")
CARD_OPTIONS = ("repo_id", "description", "data", "dataset_id", "license", "language", "published")
PIPELINES = {
    "TnnForCausalLM": "text-generation",
    "TnnForMaskedLM": "fill-mask",
    "TnnForSequenceClassification": "text-classification",
    "TnnForTokenClassification": "token-classification",
    "TnnForQuestionAnswering": "question-answering",
    "TnnForMultipleChoice": "multiple-choice",
    "TnnForImageClassification": "image-classification",
    "TnnForAudioClassification": "audio-classification",
    "TnnForTimeSeriesPrediction": "time-series-forecasting",
    "TnnModel": "feature-extraction",
}
# The options of a training that belong to its recipe, and those that name its data.
RECIPE = (
    "objective", "tno_type", "block_size", "max_steps", "num_train_epochs", "batch_size",
    "per_device_train_batch_size", "gradient_accumulation_steps", "mlm_probability", "learning_rate",
    "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay", "operator_learning_rate",
    "operator_weight_decay", "adam_beta1", "adam_beta2", "max_grad_norm", "mixed_precision", "seed",
)  # fmt: skip
# Data sets that are English.
ENGLISH = ("the King James Bible", "wikitext", "Salesforce/wikitext", "nyu-mll/glue")
DATA_OPTIONS = ("dataset_name", "dataset_config_name", "task_name", "dataset", "dataset_config", "train_file")
# The files of figures that trainings write; the first existing one counts.
METRICS_FILES = ("metrics.json", "all_results.json", "results.json")
# Names of measured figures -> title, format, and whether they are an evaluation.
FIGURES = {
    "perplexity_before": ("perplexity before training", "{:,.1f}", False),
    "perplexity": ("perplexity", "{:,.2f}", True),
    "best_perplexity": ("best perplexity", "{:,.2f}", False),
    "accuracy": ("accuracy", "{:.4f}", True),
    "f1": ("F1", "{:.4f}", True),
    "matthews_correlation": ("Matthews correlation", "{:.4f}", True),
    "pearson": ("Pearson correlation", "{:.4f}", True),
    "spearmanr": ("Spearman correlation", "{:.4f}", True),
    "mse": ("mean squared error", "{:.4g}", True),
    "steps": ("optimizer steps", "{:,}", False),
    "tokens": ("tokens seen in training", "{:,}", False),
    "train_seconds": ("seconds of training", "{:,.0f}", False),
}
# Operators -> their papers in citations.bib.
PAPERS = {"fd": "moreno2023ski", "ski": "moreno2023ski", "rtf": "parnichkun2024rtf", "s4d": "gu2022s4d"}
PAPERS |= {"hyena": "poli2023hyena"}


def read_json(path: Path) -> dict:
    """The contents of a JSON file; ValueError if the file is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as a JSON file: {error}") from error


def check_folder(target: Path, folder: Path):
    """Refuse, by a ValueError, to write a card into the folder of a model: some files have the same names."""
    if target.resolve() == folder.resolve() or any(target.glob("*.safetensors")):
        raise ValueError(f"The folder of the card must not be that of a model, got {target}")


def load(folder: Path) -> PreTrainedModel:
    """The model in `folder`, by the class that it was saved with; ValueError if it holds no complete one of ours."""
    check_model_path(folder, "folder")
    config = model_path.load(AutoConfig, folder)
    heads = config.architectures or ["TnnModel"]
    name = str(heads[0] if isinstance(heads, list) else heads)
    if config.model_type != "tnn" or name not in PIPELINES:
        found = f"{config.model_type} {name} in {folder}"
        raise ValueError(f"The model must be a {' or '.join(PIPELINES)}, got {found}")
    model, info = model_path.load(getattr(modeling_tnn, name), folder, output_loading_info=True)
    if problems := {kind: sorted(names)[:5] for kind, names in info.items() if names}:
        raise ValueError(f"The weights in {folder} must be those of a {name}, got {problems}")
    return model.eval()


def facts(model: PreTrainedModel, length: int) -> dict:
    """The facts about a model for its card. `length` is the number of tokens of its training sequences."""
    name = type(model).__name__
    autos = {reference.split(".")[1]: auto for auto, reference in AUTO_MAP.items()}
    return {
        "class": name,
        "auto_class": autos[name],
        "parameters": model.num_parameters(),
        "channels": model.config.gtu_dim,
        "trained_length": length,
        "state": decoding_state(model, length) if model.config.causal else [],
        "version": __version__,
    }


@torch.no_grad()
def decoding_state(model: PreTrainedModel, length: int) -> list[dict]:
    """The size of the decoding state after texts of the trained length and of eight times as many tokens.

    A model that refuses longer texts than its filter has one row, for the longest.
    A cache keeps the end of a prompt for `crop` until its free places are filled: as many tokens are decoded first.
    """
    rows, config, contexts = [], model.config, (length, 8 * length)
    if config.tno_type == "hyena" and config.hyena_filter_beyond == "error":
        contexts = (max(1, config.hyena_filter_length - ROOM - 1),)
    for context in contexts:
        embeds = torch.zeros(1, context, config.hidden_size, dtype=model.dtype, device=model.device)
        past = model.base_model(inputs_embeds=embeds, use_cache=True)[CACHE]
        for _ in range(ROOM + 1):
            past = model.base_model(inputs_embeds=embeds[:, :1], use_cache=True, **{CACHE: past})[CACHE]
        rows.append({"context": context, "mebibytes": memory_per_sequence(past) / 2**20})
    return rows


def collect(args: argparse.Namespace, model: PreTrainedModel, target: Path):
    """Write the inputs of a card to `target`: the needed parts of the JSON files, without paths of this machine."""
    target.mkdir(parents=True, exist_ok=True)
    for name in (*INPUTS.values(), *PICTURES):  # of an earlier card
        (target / name).unlink(missing_ok=True)
    config, files = model.config, sources(args)
    length = read_json(files["arguments"]).get("block_size") if "arguments" in files else None
    length = length or config.max_position_embeddings
    inputs = {"card": {name: getattr(args, name) for name in CARD_OPTIONS}}
    inputs["config"] = {name: value for name, value in config.to_diff_dict().items() if name != "auto_map"}
    inputs["model"] = facts(model, length)
    readers = READERS | {"evaluation": partial(read_evaluation, folder=args.folder, config=config)}
    for name, path in files.items():
        try:
            inputs[name] = readers[name](read_json(path))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a JSON file that the card can read as {name}: {error!r}") from error
    inputs["card"]["language"] = args.language or language_of(inputs.get("arguments", {}))
    for name, found in inputs.items():
        write_json(target / INPUTS[name], found)
    if args.kernels is not None:
        shutil.copyfile(args.kernels / "overview.png", target / "kernels.png")
    if args.evaluation is not None:
        plot_lengths(inputs["evaluation"]["rows"], length, target)


def sources(args: argparse.Namespace) -> dict[str, Path]:
    """The files of results: those in the folder of the model, and those of the options."""
    files = {name: args.folder / INPUTS[name] for name in ("arguments", "conversion")}
    files["metrics"] = metrics_file(args.folder)
    files = {name: path for name, path in files.items() if path.is_file()}
    named = {name: getattr(args, name) for name in ("evaluation", "glue", "decoding", "conversion")}
    named["kernels"] = args.kernels and args.kernels / "kernels.json"
    return files | {name: path for name, path in named.items() if path is not None}


def metrics_file(folder: Path) -> Path:
    """The file of figures that the training wrote into `folder`, or else the first name that it may have."""
    files = [folder / name for name in METRICS_FILES]
    return next((file for file in files if file.is_file()), files[0])


def read_metrics(report: dict) -> dict:
    """The figures of a training. Those of Trainer begin with `eval_`, those of classifiers with the split."""
    plain = {name.removeprefix("eval_"): value for name, value in report.items()}
    for split in ("validation", "test"):
        if f"{split}_accuracy" in report:
            plain |= {"accuracy": report[f"{split}_accuracy"], "split": split}
    return {
        name: plain[name] for name in (*FIGURES, "text", "split") if isinstance(plain.get(name), int | float | str)
    }


def read_training_arguments(report: dict) -> dict:
    """The options of the training, with the name of the data but not its folder."""

    def without_folder(source: str) -> str:
        return Path(source).name if Path(source).is_absolute() or Path(source).exists() else source

    found = {name: report[name] for name in RECIPE if report.get(name) is not None}
    for name in (*DATA_OPTIONS, "validation_file"):
        if given := report.get(name):  # a text in reports of other programs; of pretrain.py, sources
            found[name] = " ".join(map(without_folder, [given] if isinstance(given, str) else given))
    return found


def language_of(arguments: dict) -> str | None:
    """The language of the training data, if it is known; a task without a data set is one of GLUE."""
    data = arguments.get("dataset_name") or ("nyu-mll/glue" if arguments.get("task_name") else None)
    return "en" if data in ENGLISH else None


def read_evaluation(report: dict, folder: Path | None = None, config: TnnConfig | None = None) -> dict:
    """The perplexities by length of evaluate_lm.py, without a stride; of several models, those of the one in `folder`.

    Raises a ValueError if `folder` is none of them, or if they are another kind of language model than `config`.
    """
    settings, rows = report["settings"], report["results"]
    masked = settings.get("objective") == "mlm"
    if config is not None and masked == config.causal:
        raise ValueError(f"`causal` of its models must be {config.causal}, got {not masked}")
    models = sorted({row["model"] for row in rows if "model" in row})
    if folder is not None and len(models) > 1:  # of a single one the folder may have been moved since
        rows = [row for row in rows if Path(row["model"]).resolve() == folder.resolve()]
        if not rows:
            raise ValueError(f"it must have {folder} among its models, got {', '.join(models)}")
    file = settings["validation_file"]
    of = f"the text {Path(file).name}" if file else f"the {settings['split']} part of the data"
    figures = ("length", "perplexity", "bits_per_byte", "tokens")
    rows = sorted((row for row in rows if row["stride"] is None), key=lambda row: row["length"])
    found = {"of": of, "rows": [{name: row[name] for name in figures if row.get(name) is not None} for row in rows]}
    return found | ({"mlm_probability": settings["mlm_probability"]} if masked else {})


def read_kernels(report: dict) -> dict:
    """The horizon of each layer."""
    rows = []
    for row in report["layers"]:
        bound = {"lower_bound": True} if "horizon_median" in row["lower_bounds"] else {}
        rows.append(chosen(row, "label", "horizon_median") | bound)
    return {"layers": rows}


def chosen(report: dict, *names: str) -> dict:
    return {name: report[name] for name in names}


# Names of inputs -> what is read of the JSON file of a program.
SCORES = ("task", "metric", "majority", "mean", "std", "seeds", "learning_rate")
READERS = {
    "metrics": read_metrics,
    "arguments": read_training_arguments,
    "glue": lambda report: {"tasks": [chosen(row, *SCORES) for row in report]},
    "decoding": lambda report: chosen(report, "tokens_per_second", "new_tokens", "device", "torch_threads"),
    "conversion": lambda report: chosen(report, "converted_from", "comparison"),
    "kernels": read_kernels,
}


def plot_lengths(rows: list[dict], trained: int, target: Path):
    """Draw perplexity over length, with a mark at the length of the training."""
    with importing("scripts"):
        from matplotlib.figure import Figure  # of the few cards that have a picture

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot([row["length"] for row in rows], [row["perplexity"] for row in rows], marker="o")
    axes.axvline(trained, color="grey", linestyle=":", label="trained length")
    axes.set(xscale="log", xlabel="tokens in a text", ylabel="perplexity")
    axes.set_xticks([row["length"] for row in rows], [f"{row['length']:,}" for row in rows])
    axes.minorticks_off()
    axes.legend()
    figure.savefig(target / "length_extrapolation.png", dpi=120, metadata={"Software": None})


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


def render(folder: Path) -> str:
    """The text of the card whose inputs are in `folder`."""
    inputs = {name: read_json(folder / file) if (folder / file).is_file() else None for name, file in INPUTS.items()}
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
