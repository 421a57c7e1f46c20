"""Options of training, checked before PyTorch is imported, and the rates that presets were trained with.

`configuration/training.yaml` says what was measured of each preset. A pretraining whose options name no learning rate
takes that of its preset, or that of a rule.
"""

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tnn_programs.cli.declared import NAMES
from tnn_programs.cli.model_path import check_path, configuration_folder, did_you_mean, find_config
from tnn_programs.cli.parser import check_counts, load_config, option, require
from tnn_programs.cli.text_files import check_file, check_source, is_fasta

if TYPE_CHECKING:  # read before transformers is imported
    from transformers import PreTrainedConfig

OPERATOR = r"(^|\.)tno\."
SETTINGS = {"learning_rate": "lr", "weight_decay": "weight_decay"}
# Not those that choose layers themselves and need what only Trainer has, nor schedules that follow measured losses or
# gradients, which the loop of `pretrain.py` does not give them.
OF_TRAINER = ("galore", "apollo", "lomo", "adalomo", "reduce_lr_on_plateau", "greedy")
SCHEDULES, OPTIMIZERS = (
    [value for value in NAMES[f"transformers.{enum}"] if not value.startswith(OF_TRAINER)]
    for enum in ("trainer_utils.SchedulerType", "training_args.OptimizerNames")
)
OBJECTIVES = ("clm", "mlm")
KIND = {"clm": "causal", "mlm": "masked"}
DEFAULT_PRESETS = {"clm": "tnn-tiny", "mlm": "tnn-bidirectional-small"}
CHOICES = {
    "objective": OBJECTIVES,
    "report_to": ("none", "tensorboard", "wandb", "trackio"),
    "optim": OPTIMIZERS,
    "lr_scheduler_type": SCHEDULES,
    "mixed_precision": ("no", "bf16", "fp16"),
}
AT_LEAST_ONE = (
    "max_steps", "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
    "global_batch_tokens", "logging_steps", "checkpointing_steps", "save_total_limit", "eval_steps", "max_eval_blocks",
    "block_size", "vocab_size", "ddp_timeout", "preprocessing_num_workers", "shuffle_buffer_size", "num_shards",
)  # fmt: skip
AT_LEAST_ZERO = ("weight_decay", "warmup_steps", "max_grad_norm", "seed", "dataloader_num_workers")
# The blocks of a forward pass, unless given or found by what fits a GPU.
DEFAULT_BLOCKS = 8
# The schedule of a learning rate that was given.
DEFAULT_SCHEDULE = {"lr_scheduler_type": "cosine", "warmup_steps": 0.1}
# Settings that a preset takes from its recipe.
OF_RECIPE = ("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "max_steps")


@dataclass(kw_only=True)
class GroupArguments:
    """Options for parameter groups with their own optimizer settings."""

    operator_learning_rate: float | None = None
    operator_weight_decay: float | None = None
    parameter_groups: list[str] = option([])

    def __post_init__(self):
        check_counts(self, "operator_learning_rate", "operator_weight_decay", least=0)
        for text in self.parameter_groups:
            parse_group(text)

    def groups(self) -> dict[str, dict[str, float]]:
        """Regular expressions of parameter names -> settings; the first one that finds a parameter counts."""
        groups = dict(parse_group(text) for text in self.parameter_groups)
        operator = {"lr": self.operator_learning_rate, "weight_decay": self.operator_weight_decay}
        if self.operator_learning_rate is not None and self.operator_weight_decay is None:
            operator["weight_decay"] = 0.0
        operator = {name: value for name, value in operator.items() if value is not None}
        return groups | ({OPERATOR: operator} if operator else {})


def parse_group(text: str) -> tuple[str, dict[str, float]]:
    """`PATTERN:learning_rate=X,weight_decay=X` as a regular expression and the settings of an optimizer."""
    pattern, _, given = text.rpartition(":")
    try:
        re.compile(pattern)
        pairs = [pair.split("=") for pair in given.split(",")]
        settings = {SETTINGS[name.strip()]: float(value) for name, value in pairs}
    except (KeyError, ValueError, re.error) as error:
        form = f"PATTERN:{'=X,'.join(SETTINGS)}=X"
        raise ValueError(f"`parameter_groups` must be of the form {form}, got {text!r}.") from error
    if not pattern or min(settings.values()) < 0:
        raise ValueError(f"`parameter_groups` must have a pattern and numbers of at least 0, got {text!r}.")
    return pattern, settings


@dataclass(kw_only=True)
class GenomeArguments:
    """Options for the windows of a FASTA file."""

    regions: str | None = option(None, "BED file: regions of a FASTA file to train on; column 4: train, valid, test.")
    validation_contigs: list[str] = option([], "Contigs of a FASTA file to evaluate on; else the last twentieth.")
    reverse_complement: bool = option(False, "Read windows of a FASTA file from the other strand every second time.")
    soft_masked_weight: float = option(1.0, "Weight of lower case in FASTA, 0 to 1; below 1 it is not validated on.")

    def check_genome(self, source: str | None, validation_file: str | None, streaming: bool):
        """Refuse options that do not belong together."""
        fasta = source is not None and is_fasta(source)
        require(self, "soft_masked_weight", 0 <= self.soft_masked_weight <= 1, "a number from 0 to 1")
        for name, usual in vars(GenomeArguments()).items():
            if getattr(self, name) != usual and not fasta:
                raise ValueError(f"--{name} must be given together with a FASTA file, got {source}")
        if not fasta:
            return
        require(self, "streaming", not streaming, "absent with a FASTA file, which is kept in memory")
        alike = validation_file is None or (is_fasta(validation_file) and not self.validation_contigs)
        require(self, "validation_file", alike, "FASTA as the other file is, and without --validation_contigs")
        for file in filter(None, (source, self.regions)):
            check_file(file, whole=False)


@dataclass(kw_only=True)
class PretrainArguments(GroupArguments, GenomeArguments):
    """The options of a pretraining run."""

    objective: str = "clm"
    config_name: str | None = None
    config_overrides: str | None = None
    tokenizer_name: str | None = option(None, "Tokenizer: folder or Hub id; trained on the text unless given.")
    do_lower_case: bool = option(False, "Let a tokenizer trained on the text ignore case.")
    vocab_size: int | None = option(None, "Size of the vocabulary; that of the config unless given.")
    train_file: str | None = None
    validation_file: str | None = None
    dataset_name: list[str] = option([])
    dataset_config_name: list[str] = option([])
    streaming: bool = option(False, "Tokenize while training; a new tokenizer learns from the first 10000 rows.")
    interleave_probabilities: list[float] = option([], "With --streaming, shares of sources; in turns unless given.")
    shuffle_buffer_size: int = option(1000, "With --streaming, blocks of text that are shuffled at a time.")
    num_shards: int = option(8, "With --streaming, parts of the text that processes and workers read side by side.")
    text_column: str = "text"
    documents: str | None = None
    block_size: int | None = None
    preprocessing_num_workers: int | None = option(None, "Processes that tokenize; by rows and cores unless given.")
    mlm_probability: float = 0.15
    output_dir: str = "outputs/pretrain"
    overwrite_output_dir: bool = False

    max_steps: int = 1000
    global_batch_tokens: int | None = option(None, "Tokens in a step of all devices, in passes of what fits a GPU.")
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
    max_eval_blocks: int | None = option(None, "Evaluate on the first N blocks; of a stream, 100 unless given.")
    logging_steps: int = 10
    checkpointing_steps: int | None = option(None, "Write checkpoint-STEP every N steps.")
    save_total_limit: int | None = None
    resume_from_checkpoint: str | None = None
    report_to: str = "none"

    use_cpu: bool = False
    ddp_timeout: int = 1800
    dataloader_num_workers: int | None = None
    mixed_precision: str | None = None
    gradient_checkpointing: bool = False
    torch_compile: bool | None = option(None, nargs="?", const=True)
    cuda_graph: bool = option(True, "On one GPU, start all kernels of a forward and backward pass at once.")

    def __post_init__(self):
        super().__post_init__()
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in allowed:
                hint = did_you_mean(value, allowed, f"--{name} ")
                first = f"{hint[2:]} " if hint != "." else ""  # the list may be long
                raise ValueError(f"{first}--{name} must be one of {', '.join(allowed)}, got {value}")
        self.config_name = find_config(self.config_name or DEFAULT_PRESETS[self.objective])
        if self.tokenizer_name is not None:
            check_path(self.tokenizer_name, "--tokenizer_name")
        check_counts(self, *AT_LEAST_ONE)
        check_counts(self, *AT_LEAST_ZERO, least=0)
        require(self, "learning_rate", self.learning_rate is None or self.learning_rate > 0, "above 0")
        require(self, "max_pole_radius", 0 < (self.max_pole_radius or 0.5) < 1, "in (0, 1)")
        require(self, "mlm_probability", 0 < self.mlm_probability < 1, "in (0, 1)")
        if self.lr_scheduler_kwargs is not None:  # they belong to a schedule
            self.lr_scheduler_type = self.lr_scheduler_type or DEFAULT_SCHEDULE["lr_scheduler_type"]
        if self.report_to != "none" and find_spec(self.report_to) is None:
            raise ValueError(f"--report_to must be an installed tracker, got {self.report_to}. Install it with pip.")
        self._check_batch()
        self._check_sources()
        self.check_schedule()

    def _check_batch(self):
        """Fill in the numbers that were not given, unless they follow from the global batch."""
        if self.global_batch_tokens is None:
            self.per_device_train_batch_size = self.per_device_train_batch_size or DEFAULT_BLOCKS
            self.gradient_accumulation_steps = self.gradient_accumulation_steps or 1
        else:
            passes = self.gradient_accumulation_steps
            require(self, "gradient_accumulation_steps", passes is None, "absent with --global_batch_tokens")

    def _check_sources(self):
        streaming, names, weights = self.streaming, self.dataset_name, self.interleave_probabilities
        own = bool(names or self.train_file)
        require(self, "dataset_name", not names or self.train_file is None, "absent with --train_file")
        require(self, "dataset_name", len(names) <= 1 or streaming, "one source without --streaming")
        together = "given together with --train_file or --dataset_name"
        require(self, "validation_file", self.validation_file is None or own, together)
        require(self, "streaming", not streaming or own, together)
        configs = len(self.dataset_config_name)
        require(self, "dataset_config_name", configs in (0, max(len(names), 1)), "one for each --dataset_name")
        require(self, "interleave_probabilities", len(weights) in (0, len(names)), "one for each --dataset_name")
        require(self, "interleave_probabilities", streaming or not weights, "absent without --streaming")
        require(self, "interleave_probabilities", all(weight > 0 for weight in weights), "above 0")
        streamed = not streaming or self.documents in (None, "rows", "lines")
        require(self, "documents", streamed, "rows or lines with --streaming")
        for file in filter(None, (self.train_file, self.validation_file)):
            check_file(file, whole=False)
        for source in names:
            check_source(source)
        self.check_genome(self.train_file or next(iter(names), None), self.validation_file, streaming)

    @property
    def num_warmup_steps(self) -> int:
        warmup = DEFAULT_SCHEDULE["warmup_steps"] if self.warmup_steps is None else self.warmup_steps
        return round(warmup * (self.max_steps if warmup < 1 else 1))

    def check_schedule(self):
        """Refuse fewer steps than warm-up and decay need: the rate would jump down when the warm-up ends."""
        try:
            further = dict(json.loads(self.lr_scheduler_kwargs or "{}"))
        except (TypeError, ValueError) as error:
            given = self.lr_scheduler_kwargs
            raise ValueError(f"--lr_scheduler_kwargs must be a JSON object, got {given}: {error}") from error
        decay = 0 if "num_stable_steps" in further else further.get("num_decay_steps", 0)
        needed = self.num_warmup_steps + decay
        holds = not self.num_warmup_steps < self.max_steps < needed
        require(self, "max_steps", holds, f"at least {needed}, for warm-up and decay")


def choose_schedule(args: PretrainArguments, config: "PreTrainedConfig", resumed: dict | None = None) -> str | None:
    """Set the rate and the schedule of `args` that were not given: as of the run that is `resumed`, or of the preset.

    Return a line that says which rate was taken and from where; None if it was given.
    """
    chosen, source = dict(DEFAULT_SCHEDULE), "given"
    if args.learning_rate is None:
        training, source = training_of(args, config)
        chosen = {"learning_rate": training.learning_rate, **training.schedule(args.max_steps)}
    if resumed is not None:
        chosen |= {name: resumed[name] for name in ("learning_rate", *DEFAULT_SCHEDULE) if name in resumed}
        source = f"that of {args.resume_from_checkpoint}"
    line = None
    if args.learning_rate is None:
        line = f"learning rate {chosen['learning_rate']:g}, {source}; --learning_rate sets another"
    further = chosen.pop("lr_scheduler_kwargs", None)
    if further and args.lr_scheduler_type is None:
        args.lr_scheduler_kwargs = json.dumps(further)
    for name, value in chosen.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.check_schedule()
    return line


@dataclass(frozen=True, kw_only=True)
class PresetTraining:
    """One preset: what it is, and how it was trained."""

    name: str
    kind: str  # causal, masked, images, signals or classifier
    parameters: int
    recipe: str | None = None
    figures: str | None = None  # the file of `docs/research/figures/` with the rate; None for the rate of a paper
    minutes: float | None = None  # of the recipe on one core of a CPU, if it was run
    learning_rate: float | None = None  # None where neither a measurement nor a paper gives one
    lr_scheduler_type: str = "cosine"
    lr_scheduler_kwargs: Mapping[str, Any] | None = None
    warmup_steps: float = 0.1
    max_steps: int | None = None  # of the recipe, to which the two fields above belong

    @property
    def source(self) -> str:
        """Source of the learning rate, for a line of a program."""
        if self.figures is not None:
            return f"measured for {self.name}, docs/research/figures/{self.figures}.json"
        return f"of the recipe {self.recipe}, after a paper; not measured here"

    def schedule(self, max_steps: int) -> dict:
        """The options of the schedule for a run of `max_steps`: warm-up and decay have the recipe's shares of it."""
        scale = max_steps / (self.max_steps or max_steps)
        warmup = self.warmup_steps if self.warmup_steps < 1 else max(round(self.warmup_steps * scale), 1)
        further = {
            name: round(value * scale) if name.endswith("_steps") else value
            for name, value in (self.lr_scheduler_kwargs or {}).items()
        }
        return {"lr_scheduler_type": self.lr_scheduler_type, "lr_scheduler_kwargs": further, "warmup_steps": warmup}


def training_of(args: PretrainArguments, config: "PreTrainedConfig") -> tuple[PresetTraining, str]:
    """Return the training settings of a model like `config`, or else those of the rule, and their source."""
    preset, width = find_training(args.config_name), config.hidden_size
    fits = preset is not None and preset.learning_rate is not None and preset.kind == KIND[args.objective]
    if fits and load_config(args.config_name).hidden_size == width:
        return preset, preset.source
    rule = _read("training.yaml")["rule"]  # the rate falls with the width
    rate = rule["learning_rate"] * rule["hidden_size"] / width
    rate *= 1 if config.model_type == "tnn" else rule["other_models"]
    schedule = {name: rule[name] for name in ("lr_scheduler_type", "warmup_steps")}
    found = PresetTraining(name="", kind="", parameters=0, learning_rate=float(f"{rate:.2g}"), **schedule)
    return found, f"by the rule for a width of {width}, not measured for this model"


def read_presets() -> dict[str, PresetTraining]:
    """All presets by name: `tnn-tiny`, `lra/tnn-text`, ..., small ones first."""
    presets = {}
    for name, entry in _read("training.yaml")["presets"].items():
        recipe = _read(f"recipes/{entry['recipe']}.yaml") if "recipe" in entry else {}
        presets[name] = PresetTraining(name=name, **{key: recipe[key] for key in OF_RECIPE if key in recipe} | entry)
    return presets


def find_training(config_name: str) -> PresetTraining | None:
    """The preset that `config_name` names or whose folder it is; None for any other configuration."""
    folder = Path(config_name).resolve()
    for name, preset in read_presets().items():
        if config_name in (name, Path(name).name) or folder == (configuration_folder() / name).resolve():
            return preset
    return None


def fine_tuning_of(hidden_size: int) -> tuple[float, str] | None:
    """The learning rate at which a TNN of such a width is fine-tuned, and where it comes from; None for a wide one."""
    known = _read("training.yaml")["fine_tuning"]
    if hidden_size > known["hidden_size"]:
        return None
    source = f"measured for TNNs up to {known['hidden_size']} wide, docs/research/figures/{known['figures']}.json"
    return known["learning_rate"], source


@functools.cache
def _read(file: str) -> dict:
    return yaml.safe_load((configuration_folder() / file).read_text(encoding="utf-8"))
