"""The options of `pretrain.py`, checked before anything is loaded."""

import json
from dataclasses import dataclass, field
from importlib.util import find_spec

from tnn_scripts.common.errors import importing

from tnn_scripts.common.model_path import check_path
from tnn_scripts.common.names import find_config
from tnn_scripts.common.nearest import nearest
from tnn_scripts.common.optimizer_arguments import MUON, OPTIMIZERS, SCHEDULES, GroupArguments
from tnn_scripts.data.files import check_file, check_source

OBJECTIVES = ("clm", "mlm")
DEFAULT_PRESETS = {"clm": "tnn-tiny", "mlm": "tnn-bidirectional-small"}
TRACKERS = ("none", "tensorboard", "wandb", "trackio")
AT_LEAST_ONE = (
    "max_steps",
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "global_batch_tokens",
    "logging_steps",
    "checkpointing_steps",
    "save_total_limit",
    "eval_steps",
    "max_eval_blocks",
    "block_size",
    "vocab_size",
    "ddp_timeout",
    "preprocessing_num_workers",
    "shuffle_buffer_size",
    "num_shards",
)
# The blocks of a forward pass, unless given or found by what fits a GPU.
DEFAULT_BLOCKS = 8
# The schedule of a learning rate that was given.
DEFAULT_SCHEDULE = {"lr_scheduler_type": "cosine", "warmup_steps": 0.1}
AT_LEAST_ZERO = ("weight_decay", "warmup_steps", "max_grad_norm", "seed", "dataloader_num_workers")


def option(default, text: str):
    return field(default=default, metadata={"help": text})


@dataclass(kw_only=True)
class PretrainArguments(GroupArguments):
    """The options of a pretraining run."""

    objective: str = "clm"
    config_name: str | None = None
    config_overrides: str | None = None
    tokenizer_name: str | None = option(None, "Tokenizer: folder or Hub id; trained on the text unless given.")
    do_lower_case: bool = option(False, "Let a tokenizer trained on the text ignore case.")
    vocab_size: int | None = option(None, "Size of the vocabulary; that of the config unless given.")
    train_file: str | None = None
    validation_file: str | None = None
    dataset_name: list[str] = field(default_factory=list)
    dataset_config_name: list[str] = field(default_factory=list)
    streaming: bool = option(
        False,
        "Read and tokenize the text while training, without a copy of it. A tokenizer that is not given is trained on "
        "the first 10000 rows.",
    )
    interleave_probabilities: list[float] = field(
        default_factory=list,
        metadata={"help": "With --streaming, the share of the rows of each source; in turns unless given."},
    )
    shuffle_buffer_size: int = option(1000, "With --streaming, blocks of text that are shuffled at a time.")
    num_shards: int = option(
        8, "With --streaming, parts of the text that are read side by side, by all processes and their workers."
    )
    text_column: str = "text"
    documents: str | None = None
    block_size: int | None = None
    preprocessing_num_workers: int | None = option(
        None, "Processes that tokenize the text; follow from its rows and the cores unless given."
    )
    mlm_probability: float = 0.15
    output_dir: str = "outputs/pretrain"
    overwrite_output_dir: bool = False

    dry_run: bool = False
    max_steps: int = 1000
    global_batch_tokens: int | None = option(
        None,
        "Tokens in a step of the optimizer, over all devices. The rows of a forward pass are then what fits a GPU (8 "
        "on a CPU) unless given, and the number of passes follows.",
    )
    per_device_train_batch_size: int | None = None
    per_device_eval_batch_size: int = 8
    gradient_accumulation_steps: int | None = None
    learning_rate: float | None = None
    lr_scheduler_type: str | None = None
    lr_scheduler_kwargs: str | None = None
    warmup_steps: float | None = None
    weight_decay: float = 0.1
    optim: str = "adamw_torch_fused"
    optim_args: str | None = None
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    max_pole_radius: float | None = None
    seed: int = 0

    eval_steps: int | None = None
    max_eval_blocks: int | None = option(
        None,
        "Evaluate on the first so many blocks only. With --streaming and no validation data, "
        "so many blocks are held out; 100 unless given.",
    )
    logging_steps: int = 10
    checkpointing_steps: int | None = option(None, "Write checkpoint-STEP every so many steps.")
    save_total_limit: int | None = None
    resume_from_checkpoint: str | None = None
    report_to: str = "none"

    use_cpu: bool = False
    ddp_timeout: int = 1800
    dataloader_num_workers: int | None = None
    mixed_precision: str | None = None
    gradient_checkpointing: bool = False
    torch_compile: bool | None = field(default=None, metadata={"nargs": "?", "const": True})
    cuda_graph: bool = option(True, "On one GPU, start all kernels of a forward and backward pass at once.")
    push_to_hub: bool = False
    hub_model_id: str | None = None
    hub_private_repo: bool = False

    def __post_init__(self):
        super().__post_init__()
        self._require_one_of("objective", OBJECTIVES)
        self.config_name = find_config(self.config_name or DEFAULT_PRESETS[self.objective])
        if self.tokenizer_name is not None:
            check_path(self.tokenizer_name, "--tokenizer_name")
        self._require_one_of("report_to", TRACKERS)
        self._require_one_of("optim", OPTIMIZERS)
        self._require("optim_args", self.optim_args is None or self.optim != MUON, f"absent with --optim {MUON}")
        self._require_one_of("lr_scheduler_type", (None, *SCHEDULES))
        self._require_one_of("mixed_precision", (None, "no", "bf16", "fp16"))
        radius = self.max_pole_radius
        self._require("max_pole_radius", radius is None or 0 < radius < 1, "in (0, 1)")
        for name in AT_LEAST_ONE:
            self._require(name, getattr(self, name) is None or getattr(self, name) >= 1, "at least 1")
        for name in AT_LEAST_ZERO:
            self._require(name, getattr(self, name) is None or getattr(self, name) >= 0, "at least 0")
        self._require("learning_rate", self.learning_rate is None or self.learning_rate > 0, "above 0")
        if self.lr_scheduler_kwargs is not None:  # they belong to a schedule
            self.lr_scheduler_type = self.lr_scheduler_type or DEFAULT_SCHEDULE["lr_scheduler_type"]
        self._require("mlm_probability", 0 < self.mlm_probability < 1, "in (0, 1)")
        self._check_batch()
        self._check_sources()
        if self.report_to != "none" and find_spec(self.report_to) is None:
            raise ValueError(f"--report_to must be an installed tracker, got {self.report_to}. Install it with pip.")
        for file in filter(None, (self.train_file, self.validation_file)):
            check_file(file, whole=False)
        for source in self.dataset_name:
            check_source(source)
        self.check_schedule()

    def _check_batch(self):
        """Fill in the numbers that were not given, unless they follow from the global batch."""
        if self.global_batch_tokens is None:
            self.per_device_train_batch_size = self.per_device_train_batch_size or DEFAULT_BLOCKS
            self.gradient_accumulation_steps = self.gradient_accumulation_steps or 1
        else:
            passes = self.gradient_accumulation_steps
            self._require("gradient_accumulation_steps", passes is None, "absent with --global_batch_tokens")

    def _check_sources(self):
        streaming, names = self.streaming, self.dataset_name
        self._require("dataset_name", not names or self.train_file is None, "absent with --train_file")
        self._require("dataset_name", len(names) <= 1 or streaming, "one source without --streaming")
        without_train = self.validation_file is not None and self.train_file is None and not names
        self._require("validation_file", not without_train, "given together with --train_file or --dataset_name")
        configs, weights = self.dataset_config_name, self.interleave_probabilities
        self._require("dataset_config_name", len(configs) in (0, max(len(names), 1)), "one for each --dataset_name")
        self._require(
            "streaming", not streaming or names or self.train_file, "given with --train_file or --dataset_name"
        )
        self._require("interleave_probabilities", len(weights) in (0, len(names)), "one for each --dataset_name")
        self._require("interleave_probabilities", streaming or not weights, "absent without --streaming")
        self._require("interleave_probabilities", all(weight > 0 for weight in weights), "above 0")
        self._require(
            "documents", not streaming or self.documents in (None, "rows", "lines"), "rows or lines with --streaming"
        )

    @property
    def num_warmup_steps(self) -> int:
        warmup = DEFAULT_SCHEDULE["warmup_steps"] if self.warmup_steps is None else self.warmup_steps
        return round(warmup * (self.max_steps if warmup < 1 else 1))

    def check_schedule(self):
        """Refuse a schedule that cannot be built, and fewer steps than warm-up and decay need.

        With fewer, the rate would jump down when the warm-up ends.

        Raises:
            ValueError: see above.
        """
        if self.lr_scheduler_type is not None:
            with importing("training"):
                import torch

                from tnn_scripts.common.optimizers import build_scheduler
            # Some schedules compare their end with the learning rate.
            build_scheduler(self, torch.optim.SGD([torch.zeros(1)], lr=self.learning_rate or 1.0))
        further = json.loads(self.lr_scheduler_kwargs or "{}")
        decay = 0 if "num_stable_steps" in further else further.get("num_decay_steps", 0)
        needed = self.num_warmup_steps + decay
        holds = not self.num_warmup_steps < self.max_steps < needed
        self._require("max_steps", holds, f"at least {needed}, for warm-up and decay")

    def _require_one_of(self, name: str, allowed):
        named, value = [choice for choice in allowed if choice is not None], getattr(self, name)
        if value not in allowed:
            hint = nearest(value, named, f"--{name} ")
            first = f"{hint[2:]} " if hint != "." else ""  # the list may be long
            raise ValueError(f"{first}--{name} must be one of {', '.join(named)}, got {value}")

    def _require(self, name: str, holds: bool, allowed: str):
        if not holds:
            value = getattr(self, name)
            given = " ".join(map(str, value)) if isinstance(value, list) else value
            raise ValueError(f"--{name} must be {allowed}, got {given}")
