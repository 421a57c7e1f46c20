"""The inputs of the card of a model: its configuration, facts about it, measurements of the programs, pictures.

`collect` writes them into a folder, without paths of this machine.
"""

import argparse
import shutil
from functools import partial
from pathlib import Path

from tnn_programs.cli.errors import importing

from transformers import AutoConfig, PreTrainedModel

from modeling_tnn import __version__, modeling_tnn
from modeling_tnn.configuration_tnn import TnnConfig
from modeling_tnn.hub import AUTO_MAP
from modeling_tnn.tools.comparing import plot_by_length, state_bytes_by_length
from tnn_programs.cli import model_path
from tnn_programs.cli.atomic import read_json, write_json
from tnn_programs.cli.model_path import check_model_path

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


def decoding_state(model: PreTrainedModel, length: int) -> list[dict]:
    """The size of the decoding state after texts of the trained length and of eight times as many tokens.

    A model that refuses longer texts than its filter has one row, for the longest.
    """
    config, contexts = model.config, (length, 8 * length)
    if config.tno_types == ["hyena"] and config.hyena_filter_beyond == "error":
        contexts = (max(1, config.hyena_filter_length - 1),)
    rows = state_bytes_by_length(model, contexts)
    return [{"context": row["length"], "mebibytes": row["state"] / 2**20} for row in rows]


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
    named = (*FIGURES, "text", "split")
    return {name: plain[name] for name in named if isinstance(plain.get(name), int | float | str)}


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
    data = arguments.get("dataset_name") or ("nyu-mll/glue" if arguments.get("task_name") else "")
    several = data.split() if data else [None]
    return "en" if data in ENGLISH or set(several) <= set(ENGLISH) else None


def read_evaluation(report: dict, folder: Path | None = None, config: TnnConfig | None = None) -> dict:
    """The perplexities by length of evaluate_lm.py, without a stride, of the model in `folder`."""
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
    plot_by_length({"perplexity": {row["length"]: row["perplexity"] for row in rows}}, axes)
    axes.axvline(trained, color="grey", linestyle=":", label="trained length")
    axes.legend()
    figure.savefig(target / "length_extrapolation.png", dpi=120, metadata={"Software": None})
