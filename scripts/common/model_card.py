"""Render the card of a model from the measurements of the programs. No number in a card is typed by hand.

`collect` gathers a folder of inputs: the configuration, facts about the model, the JSON files of the programs, and
pictures. `render` turns such a folder into the text of the card, by `model_cards/TEMPLATE.md`. It leaves out parts
whose file is missing. The same inputs give the same card.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure
from transformers import AutoConfig, PreTrainedModel

import modeling_tnn
from modeling_tnn.cache_tnn import CACHE, memory_per_sequence
from modeling_tnn.history import ROOM
from modeling_tnn.hub import AUTO_MAP
from tnn_scripts.common import loading
from tnn_scripts.common.atomic import write_json
from tnn_scripts.common.model_path import check_model_path
from tnn_scripts.common.tables import format_metric

# The folder is inside an installed package, or beside it in a clone.
_FOLDERS = [Path(__file__).resolve().parents[level] / "model_cards" for level in (1, 2)]
TEMPLATE = next((folder for folder in _FOLDERS if folder.is_dir()), _FOLDERS[-1]) / "TEMPLATE.md"
# Names of inputs -> their files in the folder of a card.
INPUTS = {
    "card": "card.json",
    "config": "config.json",
    "model": "model.json",
    "metrics": "metrics.json",
    "arguments": "training_args.json",
    "evaluation": "evaluation.json",
    "glue": "glue.json",
    "conversion": "conversion.json",
    "decoding": "decoding.json",
    "kernels": "kernels.json",
}
PICTURES = ("kernels.png", "length_extrapolation.png")
CARD_OPTIONS = ("repo_id", "description", "data", "dataset_id", "license", "language")
PIPELINES = {
    "TnnForCausalLM": "text-generation",
    "TnnForMaskedLM": "fill-mask",
    "TnnForSequenceClassification": "text-classification",
    "TnnForTokenClassification": "token-classification",
    "TnnForQuestionAnswering": "question-answering",
    "TnnForMultipleChoice": "multiple-choice",
    "TnnForImageClassification": "image-classification",
    "TnnModel": "feature-extraction",
}
# The options of a training that belong to its recipe.
RECIPE = (
    "objective", "tno_type", "block_size", "max_steps", "num_train_epochs", "batch_size",
    "per_device_train_batch_size", "gradient_accumulation_steps", "mlm_probability", "learning_rate",
    "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay", "operator_learning_rate",
    "operator_weight_decay", "adam_beta1", "adam_beta2", "max_grad_norm", "mixed_precision", "seed",
)  # fmt: skip
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
CITATIONS = {
    "rpe": """@inproceedings{qin2023toeplitz,
  title={Toeplitz Neural Network for Sequence Modeling},
  author={Qin, Zhen and Han, Xiaodong and Sun, Weixuan and He, Bowen and Li, Dong and Li, Dongxu and Dai, Yuchao and
    Kong, Lingpeng and Zhong, Yiran},
  booktitle={International Conference on Learning Representations},
  year={2023}
}""",
    "ski": """@article{moreno2023ski,
  title={{SKI} to go Faster: Accelerating Toeplitz Neural Networks via Asymmetric Kernels},
  author={Moreno, Alexander and Mei, Jonathan and Walters, Luke},
  journal={arXiv preprint arXiv:2305.09028},
  year={2023}
}""",
    "rtf": """@inproceedings{parnichkun2024rtf,
  title={State-Free Inference of State-Space Models: The Transfer Function Approach},
  author={Parnichkun, Rom N. and Massaroli, Stefano and Moro, Alessandro and Smith, Jimmy T.H. and others},
  booktitle={International Conference on Machine Learning},
  year={2024}
}""",
    "s4d": """@inproceedings{gu2022s4d,
  title={On the Parameterization and Initialization of Diagonal State Space Models},
  author={Gu, Albert and Gupta, Ankit and Goel, Karan and R{\\'e}, Christopher},
  booktitle={Advances in Neural Information Processing Systems},
  year={2022}
}""",
}


def read_json(path: Path) -> dict:
    """The contents of a JSON file.

    Raises:
        ValueError: the file is missing or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as a JSON file: {error}") from error


def check_folder(target: Path, folder: Path):
    """Refuse to write a card into the folder of a model, because some files have the same names.

    Raises:
        ValueError: `target` is the folder of this or of another model.
    """
    if target.resolve() == folder.resolve() or any(target.glob("*.safetensors")):
        raise ValueError(f"The folder of the card must not be that of a model, got {target}")


def load(folder: Path) -> PreTrainedModel:
    """The model in `folder`, by the class that it was saved with.

    Raises:
        ValueError: the folder holds no complete model of this package.
    """
    check_model_path(folder, "folder")
    config = loading.load(AutoConfig, folder)
    name = (config.architectures or ["TnnModel"])[0]
    if config.model_type != "tnn" or name not in PIPELINES:
        found = f"{config.model_type} {name} in {folder}"
        raise ValueError(f"The model must be a {' or '.join(PIPELINES)}, got {found}")
    model, info = loading.load(getattr(modeling_tnn, name), folder, output_loading_info=True)
    if problems := {kind: sorted(names)[:5] for kind, names in info.items() if names}:
        raise ValueError(f"The weights in {folder} must be those of a {name}, got {problems}")
    return model.eval()


def trained_length(folder: Path, config: modeling_tnn.TnnConfig) -> int:
    """The length of the training sequences of the model in `folder`, or else the length that it is made for."""
    arguments = folder / "training_args.json"
    if arguments.is_file() and (fault := loading.fault_of(arguments)):
        raise ValueError(f"{arguments} cannot be read: {fault}")
    recipe = read_json(arguments) if arguments.is_file() else {}
    return recipe.get("block_size") or config.max_position_embeddings


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
        "version": modeling_tnn.__version__,
    }


@torch.no_grad()
def decoding_state(model: PreTrainedModel, length: int) -> list[dict]:
    """The size of the decoding state after texts of the trained length and of eight times as many tokens.

    A cache keeps the end of a prompt for `crop` until its free places are filled: so many tokens are decoded first.
    """
    rows = []
    for context in (length, 8 * length):
        ids = torch.zeros(1, context, dtype=torch.long, device=model.device)
        past = model.base_model(ids, use_cache=True)[CACHE]
        for _ in range(ROOM + 1):
            past = model.base_model(ids[:, :1], use_cache=True, **{CACHE: past})[CACHE]
        rows.append({"context": context, "mebibytes": memory_per_sequence(past) / 2**20})
    return rows


def collect(args: argparse.Namespace, model: PreTrainedModel, target: Path):
    """Write the inputs of a card to `target`: the needed parts of the JSON files, without paths of this machine.

    Raises:
        ValueError: a file is missing, not JSON, or not written by the program.
    """
    target.mkdir(parents=True, exist_ok=True)
    for name in (*INPUTS.values(), *PICTURES):  # of an earlier card
        (target / name).unlink(missing_ok=True)
    card = {
        name: getattr(args, name) for name in ("repo_id", "description", "data", "dataset_id", "license", "language")
    }
    write_json(target / INPUTS["card"], card | {"published": args.published})
    config = {name: value for name, value in model.config.to_diff_dict().items() if name != "auto_map"}
    write_json(target / INPUTS["config"], config)
    length = trained_length(args.folder, model.config)
    write_json(target / INPUTS["model"], facts(model, length))
    for name, path in sources(args).items():
        try:
            report = read_json(path)
            report = of_model(report, args.folder, model.config) if name == "evaluation" else report
            write_json(target / INPUTS[name], READERS[name](report))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a JSON file that the card can read as {name}: {error!r}") from error
    if args.kernels is not None:
        shutil.copyfile(args.kernels / "overview.png", target / "kernels.png")
    if args.evaluation is not None:
        rows = read_json(target / INPUTS["evaluation"])["rows"]
        plot_lengths(rows, length, target)


def sources(args: argparse.Namespace) -> dict[str, Path]:
    """The files of results: those of the options, and those in the folder of the model."""
    named = {name: getattr(args, name) for name in ("evaluation", "glue", "decoding", "conversion")}
    named["kernels"] = args.kernels and args.kernels / "kernels.json"
    left = {"arguments": "training_args.json", "conversion": "conversion.json"}
    left["metrics"] = metrics_file(args.folder).name
    for name, file in left.items():
        if named.get(name) is None and file and (args.folder / file).is_file():
            named[name] = args.folder / file
    return {name: path for name, path in named.items() if path is not None}


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
    recipe = {name: report[name] for name in RECIPE if report.get(name) is not None}
    # A text in reports of other programs; of pretrain.py, sources.
    given = {name: report[name] for name in (*DATA_OPTIONS, "validation_file") if report.get(name)}
    data = {name: [value] if isinstance(value, str) else value for name, value in given.items()}
    return recipe | {name: " ".join(map(_without_folder, values)) for name, values in data.items()}


def _without_folder(source: str) -> str:
    return Path(source).name if Path(source).is_absolute() or Path(source).exists() else source


def of_model(report: dict, folder: Path, config: modeling_tnn.TnnConfig) -> dict:
    """The report of evaluate_lm.py with the rows of one of its models, the one in `folder` if there are several.

    Raises:
        ValueError: `folder` is none of them, or the report is of another kind of language model.
    """
    masked = report["settings"].get("objective") == "mlm"
    if masked == config.causal:
        raise ValueError(f"`causal` of its models must be {config.causal}, got {not masked}")
    models = sorted({row["model"] for row in report["results"] if "model" in row})
    if len(models) < 2:  # the folder may have been moved since
        return report
    own = [name for name in models if Path(name).resolve() == folder.resolve()]
    if not own:
        raise ValueError(f"it must have {folder} among its models, got {', '.join(models)}")
    return report | {"results": [row for row in report["results"] if row["model"] in own]}


def read_evaluation(report: dict) -> dict:
    """The perplexities by length of evaluate_lm.py, without a stride."""
    file, split = report["settings"]["validation_file"], report["settings"]["split"]
    whole = [row for row in report["results"] if row["stride"] is None]
    figures = ("length", "perplexity", "bits_per_byte", "tokens")
    rows = [{name: row[name] for name in figures if row.get(name) is not None} for row in whole]
    found = {"of": f"the text {Path(file).name}" if file else f"the {split} part of the data", "rows": rows}
    if report["settings"].get("objective") == "mlm":
        found["mlm_probability"] = report["settings"]["mlm_probability"]
    return found


def read_glue(report: list[dict]) -> dict:
    """The scores of finetune_glue.py on the validation sets, without its single runs."""
    figures = ("task", "metric", "majority", "mean", "std", "seeds", "learning_rate")
    return {"tasks": [{name: row[name] for name in figures} for row in report]}


def read_decoding(report: dict) -> dict:
    return {name: report[name] for name in ("tokens_per_second", "new_tokens", "device", "torch_threads")}


def read_conversion(report: dict) -> dict:
    return {name: report[name] for name in ("converted_from", "comparison")}


def read_kernels(report: dict) -> dict:
    rows = [
        {name: row[name] for name in ("label", "horizon_median")}
        | ({"lower_bound": True} if "horizon_median" in row["lower_bounds"] else {})
        for row in report["layers"]
    ]
    return {"layers": rows}


READERS = {
    "metrics": read_metrics,
    "arguments": read_training_arguments,
    "evaluation": read_evaluation,
    "glue": read_glue,
    "decoding": read_decoding,
    "conversion": read_conversion,
    "kernels": read_kernels,
}


def plot_lengths(rows: list[dict], trained: int, target: Path):
    """Draw perplexity over length, with a mark at the length of the training."""
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot([row["length"] for row in rows], [row["perplexity"] for row in rows], marker="o")
    axes.axvline(trained, color="grey", linestyle=":", label="trained length")
    axes.set(xscale="log", xlabel="tokens in a text", ylabel="perplexity")
    axes.set_xticks([row["length"] for row in rows], [f"{row['length']:,}" for row in rows])
    axes.minorticks_off()
    axes.legend()
    figure.savefig(target / "length_extrapolation.png", dpi=120, metadata={"Software": None})


def data_name(inputs: dict) -> str:
    """The name of the training data, for the text of the card."""
    if inputs["card"]["data"]:
        return inputs["card"]["data"]
    return " ".join((inputs["arguments"] or {}).get(option, "") for option in DATA_OPTIONS).strip()


def results(inputs: dict, data: str) -> list[dict]:
    """The figures of a training as rows of a table."""
    metrics = inputs["metrics"] or {}
    split = metrics.get("split", "validation")
    validation = f"{split} part of {data}" if data else f"{split} {inputs_name(inputs)}"
    if file := (inputs["arguments"] or {}).get("validation_file"):
        validation = f"the {inputs_name(inputs)} {file}"
    rows = []
    for key, (name, written, evaluation) in FIGURES.items():
        if isinstance(metrics.get(key), int | float):
            where = validation if evaluation or "perplexity" in key else "training"
            row = {"key": key, "name": name, "value": metrics[key], "text": written.format(metrics[key])}
            rows.append(row | {"evaluation": evaluation, "on": where})
    return rows


def card_data(inputs: dict, rows: list[dict], data: str) -> ModelCardData:
    """The metadata for the Hub."""
    card, task = inputs["card"], PIPELINES[inputs["model"]["class"]]
    arguments = inputs["arguments"] or {}
    named = inputs["card"]["dataset_id"] or arguments.get("dataset_name") or ""
    hub_data = [name for name in named.split() if "/" in name]
    kind = inputs_name(inputs)
    split = (inputs["metrics"] or {}).get("split", "validation")
    measured_on = {
        "dataset_type": hub_data[0] if len(hub_data) == 1 else kind,
        "dataset_name": data or kind,
        "dataset_split": split,
    }
    if file := arguments.get("validation_file"):
        measured_on |= {"dataset_type": kind, "dataset_name": file}
    evaluations = [
        EvalResult(task, **measured_on, metric_type=row["key"], metric_name=row["name"], metric_value=row["value"])
        for row in rows
        if row["evaluation"]
    ]
    return ModelCardData(
        language=None if kind == "pictures" else card["language"],
        license=card["license"],
        library_name="transformers",
        pipeline_tag=task,
        tags=["tnn", "toeplitz", inputs["config"]["tno_type"], "custom_code"],
        datasets=hub_data or None,
        model_name=short_name(inputs),
        eval_results=evaluations or None,
    )


def inputs_name(inputs: dict) -> str:
    return "pictures" if inputs["model"]["class"] == "TnnForImageClassification" else "text"


def short_name(inputs: dict) -> str:
    return inputs["card"]["repo_id"].split("/")[-1]


def citations(config: dict) -> list[str]:
    """The citations of the TNN paper, and of the paper of the operator if it is another one."""
    papers = {"fd": "ski", "ski": "ski", "rtf": "rtf", "s4d": "s4d"}
    operators = [config["tno_type"], config["converted_from"]]
    return [CITATIONS["rpe"]] + [CITATIONS[papers[name]] for name in operators if name in papers]


def render(folder: Path) -> str:
    """The text of the card whose inputs are in `folder`."""
    inputs = {name: read_json(folder / file) if (folder / file).is_file() else None for name, file in INPUTS.items()}
    inputs["config"] = modeling_tnn.TnnConfig.from_dict(inputs["config"]).to_dict()
    data = data_name(inputs)
    rows = results(inputs, data)
    arguments = inputs["arguments"] or {}
    unused = {"mlm_probability"} if arguments.get("objective") == "clm" else set()
    recipe = {name: arguments[name] for name in RECIPE if arguments.get(name) is not None and name not in unused}
    derived = {"name": short_name(inputs), "data": data, "results": rows, "citations": citations(inputs["config"])}
    # Markdown, not HTML: nothing is escaped.
    template = Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined).from_string(  # noqa: S701
        TEMPLATE.read_text(encoding="utf-8")
    )
    derived |= {"arguments": recipe, "format_metric": format_metric}
    text = template.render(card_data=card_data(inputs, rows, data), **inputs | derived)
    return str(ModelCard(text)).strip() + "\n"
