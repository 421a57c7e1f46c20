"""The learning rate and schedule of a pretraining run whose options do not name them.

They are those of the checkpoint that is resumed, or of the preset, or of a rule (see `preset_training.py`).
"""

import json
from pathlib import Path

from transformers import PreTrainedConfig

from tnn_scripts.common.arguments import load_config
from tnn_scripts.common.checkpoints import STATE, find_checkpoint
from tnn_scripts.common.preset_training import PresetTraining, find_training, rule_of
from tnn_scripts.common.pretrain_arguments import DEFAULT_SCHEDULE, OBJECTIVES, PretrainArguments

KIND = dict(zip(OBJECTIVES, ("causal", "masked"), strict=True))


def choose_schedule(args: PretrainArguments, config: PreTrainedConfig) -> str | None:
    """Set the rate and the schedule of `args` that were not given.

    Returns:
        A line that says which rate was taken and from where; None if it was given.

    Raises:
        ValueError: the run is too short for the given and the taken settings.
    """
    chosen, source = dict(DEFAULT_SCHEDULE), "given"
    if args.learning_rate is None:
        training, source = training_of(args, config)
        chosen = {"learning_rate": training.learning_rate, **training.schedule(args.max_steps)}
    if args.resume_from_checkpoint is not None:
        folder = find_checkpoint(Path(args.output_dir), args.resume_from_checkpoint)
        saved = json.loads((folder / STATE).read_text(encoding="utf-8"))["fingerprint"]
        chosen |= {name: saved[name] for name in ("learning_rate", *DEFAULT_SCHEDULE) if name in saved}
        source = f"that of {folder}"
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


def training_of(args: PretrainArguments, config: PreTrainedConfig) -> tuple[PresetTraining, str]:
    """What a model like `config` was trained with, or else what the rule says, and where that comes from."""
    preset, width = find_training(args.config_name), config.hidden_size
    fits = preset is not None and preset.learning_rate is not None and preset.kind == KIND[args.objective]
    if fits and load_config(args.config_name).hidden_size == width:
        return preset, preset.source
    return rule_of(
        width, config.model_type == "tnn"
    ), f"by the rule for a width of {width}, not measured for this model"
