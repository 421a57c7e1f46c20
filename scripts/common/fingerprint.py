"""What makes a run the one that a checkpoint belongs to: options, model, data, global batch, kind of checkpoint."""

import dataclasses
import json
import math

from transformers import PreTrainedConfig

from tnn_scripts.common.pretrain_arguments import DEFAULT_SCHEDULE, PretrainArguments

# Arguments in which a resumed run may differ. Of the first three only the product counts; the last line says where and
# how the same steps are computed, which changes the weights by rounding alone.
PASSES = ("per_device_train_batch_size", "gradient_accumulation_steps", "processes")
FREE_ARGUMENTS = {
    *PASSES, "global_batch_tokens", "max_steps", "lr_scheduler_kwargs", "output_dir", "per_device_eval_batch_size",
    "eval_steps", "max_eval_blocks", "logging_steps", "checkpointing_steps", "save_total_limit",
    "resume_from_checkpoint", "report_to", "push_to_hub", "hub_model_id", "hub_private_repo", "overwrite_output_dir",
    "dataloader_num_workers", "preprocessing_num_workers", "ddp_timeout",
    "use_cpu", "torch_compile", "cuda_graph", "gradient_checkpointing",
}  # fmt: skip
# Arguments that are not compared: the resulting configuration and blocks, or the settings of the stream, are.
SOURCES = {
    "config_name", "config_overrides", "tokenizer_name", "vocab_size", "train_file", "validation_file", "dataset_name",
    "dataset_config_name", "text_column", "block_size", "streaming", "interleave_probabilities",
    "shuffle_buffer_size", "num_shards",
}  # fmt: skip


def fingerprint(
    args: PretrainArguments, config: PreTrainedConfig, data: dict, blocks_per_step: int, sharded: bool
) -> dict:
    """What a checkpoint must agree with.

    Args:
        data: the identity of the training blocks.
        blocks_per_step: the global batch.
        sharded: whether checkpoints are written in shards.
    """
    options = {k: v for k, v in dataclasses.asdict(args).items() if k not in FREE_ARGUMENTS | SOURCES}
    model = {f"config.{k}": v for k, v in config.to_diff_dict().items() if k != "transformers_version"}
    run = {"data": data, "blocks_per_step": blocks_per_step, "sharded": sharded}
    return json.loads(json.dumps(options | model | run))


def differences(saved: dict, present: dict, config: PreTrainedConfig) -> list[str]:
    """Where the fingerprint of a checkpoint differs, a line for each.

    Args:
        config: the configuration of the present run.
    """
    if "blocks_per_step" not in saved:  # of version 0.1.0, which compared each number and had one optimizer
        blocks = math.prod(saved.get(name, 1) for name in PASSES)
        saved = {"optim": "adamw_torch"} | saved | {"blocks_per_step": blocks, "sharded": False}
    # Options and fields that came after the checkpoint had the value that is now their default.
    options, model = dataclasses.asdict(PretrainArguments(**DEFAULT_SCHEDULE)), type(config)().to_dict()
    defaults = json.loads(json.dumps(options | {f"config.{name}": value for name, value in model.items()}))
    saved = defaults | saved
    return [f"{k} must be {saved.get(k)}, got {v}" for k, v in present.items() if saved.get(k) != v]
