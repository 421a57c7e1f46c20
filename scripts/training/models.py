"""The model that the options of `tnn pretrain` name."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedConfig, PreTrainedModel

from modeling_tnn.configuration_tnn import LENGTH_FIELDS
from tnn_programs.cli.model_path import load
from tnn_programs.cli.parser import load_config, parse_overrides
from tnn_programs.cli.training_arguments import PretrainArguments

AUTO_MODELS = {"clm": AutoModelForCausalLM, "mlm": AutoModelForMaskedLM}


def build_config(args: PretrainArguments) -> PreTrainedConfig:
    """The configuration of the model with the changes of the command line; ValueError unless it fits the objective."""
    config = change_config(args)
    with torch.device("meta"):
        AUTO_MODELS[args.objective].from_config(config)
    return config


def change_config(args: PretrainArguments) -> PreTrainedConfig:
    """The configuration with the changes of the command line, whatever the objective."""
    known = load(AutoConfig, args.config_name)
    overrides = parse_overrides(args.config_overrides, known)
    fit_length(args, known, overrides)
    if args.vocab_size is not None:
        overrides["vocab_size"] = args.vocab_size
    return load_config(args.config_name, overrides)


def fit_length(args: PretrainArguments, config: PreTrainedConfig, overrides: dict):
    """Set the block size to the length that the model is made for, or a TNN's length to the block size."""
    field = "max_position_embeddings"
    longest = overrides.get(field, getattr(config, field, None))
    if args.block_size is None:
        args.block_size = longest or 1024
    elif longest is not None and args.block_size > longest:
        if config.model_type != "tnn":
            raise ValueError(f"--block_size must be at most {field}={longest} of the model, got {args.block_size}")
        # A TNN takes any length, but the fields that follow from this number must be derived again.
        overrides |= {field: args.block_size} | {name: overrides.get(name) for name in LENGTH_FIELDS}
    shortest = 3 if args.objective == "mlm" else 2
    if args.block_size < shortest:
        raise ValueError(f"--block_size must be at least {shortest} for a token to predict, got {args.block_size}")


def build_model(args: PretrainArguments, config: PreTrainedConfig, head: type | None = None) -> PreTrainedModel:
    """The model of the objective, or one of another class `head`."""
    model = AUTO_MODELS[args.objective].from_config(config) if head is None else head(config)
    if args.gradient_checkpointing:
        # transformers 5.17 has one name, of which later releases warn; they have another.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model
