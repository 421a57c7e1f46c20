"""The options of `pretrain.py`, checked before anything is loaded."""

from dataclasses import dataclass, field
from importlib.util import find_spec

from transformers import SchedulerType

from tnn_scripts.common.arguments import find_config
from tnn_scripts.data.document_ends import DOCUMENTS_HELP

OBJECTIVES = ("clm", "mlm")
TRACKERS = ("none", "tensorboard", "wandb", "trackio")
AT_LEAST_ONE = (
    "max_steps",
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "logging_steps",
    "checkpointing_steps",
    "save_total_limit",
    "eval_steps",
    "max_eval_blocks",
    "block_size",
    "vocab_size",
)
AT_LEAST_ZERO = ("weight_decay", "warmup_steps", "max_grad_norm", "seed")


def option(default, text: str):
    return field(default=default, metadata={"help": text})


@dataclass
class PretrainArguments:
    """What to train, on what, for how long, and where it goes."""

    objective: str = option("clm", "clm (causal) or mlm (masked language model).")
    config_name: str = option(
        "tnn-tiny", "Preset in configuration/, or a folder or Hub id with a config.json of any model."
    )
    config_overrides: str | None = option(None, "Fields of the config: tno_type=fd,rpe_layers=3")
    tokenizer_name: str | None = option(None, "Tokenizer: folder or Hub id; trained on the text unless given.")
    do_lower_case: bool = option(False, "A tokenizer trained on the text makes no difference between A and a.")
    vocab_size: int | None = option(None, "Size of the vocabulary; that of the config unless given.")
    train_file: str | None = option(None, "Text, JSON, parquet or CSV file.")
    validation_file: str | None = option(None, "The same; the end of the training text unless given.")
    dataset_name: str | None = option(None, "Hub data set or local folder, instead of files; else the demo corpus.")
    dataset_config_name: str | None = option(None, "Configuration of the data set.")
    text_column: str = option("text", "The column of the data that holds text.")
    documents: str | None = option(None, DOCUMENTS_HELP)
    block_size: int | None = option(None, "Tokens in a block; max_position_embeddings of the config unless given.")
    mlm_probability: float = option(0.15, "Share of tokens to predict with --objective mlm.")
    output_dir: str = option("outputs/pretrain", "Where checkpoints, the model and metrics.json go.")
    overwrite_output_dir: bool = option(False, "Begin anew although output_dir holds a model or checkpoints of a run.")

    max_steps: int = option(1000, "Optimizer steps.")
    per_device_train_batch_size: int = option(8, "Blocks on a device in a forward pass.")
    per_device_eval_batch_size: int = option(8, "The same in evaluation.")
    gradient_accumulation_steps: int = option(1, "Forward passes in an optimizer step.")
    learning_rate: float = option(5e-4, "Peak of the schedule.")
    lr_scheduler_type: str = option("cosine", "Any of transformers: inverse_sqrt, polynomial, cosine, linear, ...")
    warmup_steps: float = option(0.1, "Steps of linear warmup; below 1, a share of max_steps.")
    weight_decay: float = option(0.1, "For matrices; biases and norms have none.")
    adam_beta1: float = option(0.9, "Of AdamW.")
    adam_beta2: float = option(0.98, "Of AdamW.")
    adam_epsilon: float = option(1e-8, "Of AdamW.")
    max_grad_norm: float = option(1.0, "Gradients are clipped to this norm; 0 for no clipping.")
    max_pole_radius: float | None = option(
        None, "RTF without a constraint: keep poles inside this radius, below 1; else those outside 1 are named."
    )
    seed: int = option(0, "Of the weights, the order of the data, masks and dropout.")

    eval_steps: int | None = option(None, "Evaluate every so many steps; before and after training in any case.")
    max_eval_blocks: int | None = option(None, "Evaluate on the first so many blocks only.")
    logging_steps: int = option(10, "Log loss, learning rate and speed every so many steps.")
    checkpointing_steps: int | None = option(None, "Write checkpoint-STEP every so many steps.")
    save_total_limit: int | None = option(None, "Keep the newest so many checkpoints.")
    resume_from_checkpoint: str | None = option(None, "latest (of the output folder) or the folder of a checkpoint.")
    report_to: str = option("none", "Tracker: tensorboard, wandb, trackio or none.")

    use_cpu: bool = option(False, "Train on the CPU although there is an accelerator.")
    mixed_precision: str | None = option(None, "no, bf16 or fp16; what accelerate was told unless given.")
    gradient_checkpointing: bool = option(False, "Compute activations again in the backward pass, to save memory.")
    torch_compile: bool = option(False, "Compile the model with torch.compile.")
    push_to_hub: bool = option(False, "Upload the final model to the Hub.")
    hub_model_id: str | None = option(None, "Name of the repository; the name of the output folder unless given.")
    hub_private_repo: bool = option(False, "Whether a new repository is private.")

    def __post_init__(self):
        self.config_name = find_config(self.config_name)
        self._require_one_of("objective", OBJECTIVES)
        self._require_one_of("report_to", TRACKERS)
        self._require_one_of("lr_scheduler_type", [kind.value for kind in SchedulerType])
        self._require_one_of("mixed_precision", (None, "no", "bf16", "fp16"))
        radius = self.max_pole_radius
        self._require("max_pole_radius", radius is None or 0 < radius < 1, "in (0, 1)")
        for name in AT_LEAST_ONE:
            self._require(name, getattr(self, name) is None or getattr(self, name) >= 1, "at least 1")
        for name in AT_LEAST_ZERO:
            self._require(name, getattr(self, name) >= 0, "at least 0")
        self._require("learning_rate", self.learning_rate > 0, "above 0")
        self._require("mlm_probability", 0 < self.mlm_probability < 1, "in (0, 1)")
        self._require("dataset_name", self.dataset_name is None or self.train_file is None, "absent with --train_file")
        without_train = self.validation_file is not None and self.train_file is None and self.dataset_name is None
        self._require("validation_file", not without_train, "given together with --train_file or --dataset_name")
        if self.report_to != "none" and find_spec(self.report_to) is None:
            raise ValueError(f"report_to={self.report_to}: pip install {self.report_to} first.")

    @property
    def num_warmup_steps(self) -> int:
        return round(self.warmup_steps * (self.max_steps if self.warmup_steps < 1 else 1))

    def _require_one_of(self, name: str, allowed):
        named = ", ".join(choice for choice in allowed if choice is not None)
        self._require(name, getattr(self, name) in allowed, f"one of {named}")

    def _require(self, name: str, holds: bool, allowed: str):
        if not holds:
            raise ValueError(f"{name}={getattr(self, name)!r} is not possible: it must be {allowed}.")
