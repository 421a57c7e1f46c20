"""The costs of trained models: a training step, a new token after a context, and the state that decoding keeps."""

from functools import partial

import torch
from transformers import AutoModelForCausalLM

from tnn_programs.benchmarks.measure import markdown
from tnn_programs.benchmarks.models import costs
from tnn_programs.cli.model_path import check_model_path, load

FORMATS = {"model": "", "context": ",", "parameters": ",", "training_tokens_per_second": ",.0f"}
FORMATS |= {"training_time": ".2f", "ms_per_token": ".2f", "decoding_time": ".2f", "state_mebibytes": ".1f"}


def run(args) -> list[dict]:
    """One row for each model and context."""
    models = {}
    for name in args.model_name_or_path:
        check_model_path(name)
        models[name] = load(AutoModelForCausalLM, name, dtype=torch.float32).to(args.device)
    return costs(models, args)


table = partial(markdown, formats=FORMATS)
