"""Optimizers and schedules.

A Toeplitz operator has few parameters, and they act on every position of a text. The RTF paper gives them a rate of
their own and no weight decay (table 9).
"""

import json
import logging
import re

import torch
from transformers import PreTrainedModel, Trainer, get_scheduler
from transformers.trainer_pt_utils import get_parameter_names

from tnn_programs.cli.training_arguments import OPERATOR, PretrainArguments

logger = logging.getLogger("pretrain")


def decayed_parameters(model: PreTrainedModel) -> set[str]:
    """The names of the parameters with weight decay: matrices, but not biases, norms and other vectors."""
    names = set(get_parameter_names(model, [torch.nn.LayerNorm], [r"bias", r"norm"]))
    return {name for name, parameter in model.named_parameters() if name in names and parameter.ndim >= 2}


def regroup(optimizer: torch.optim.Optimizer, model: torch.nn.Module, groups: dict[str, dict], decayed: set[str]):
    """Move the parameters that a pattern finds into groups with settings of their own, see `GroupArguments.groups`.

    The optimizer is a new one of parameters of `model`, of which those named `decayed` may have weight decay. A
    ValueError if a pattern finds no parameter.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for pattern, settings in groups.items():
        found = False
        for group in list(optimizer.param_groups):
            if "pattern" in group:
                continue
            chosen = [p for p in group["params"] if re.search(pattern, names[id(p)])]
            moved = {id(p) for p in chosen}
            found = found or bool(moved)
            group["params"] = [p for p in group["params"] if id(p) not in moved]
            for decays, others in ((True, {}), (False, {"weight_decay": 0.0})):
                part = [p for p in chosen if (names[id(p)] in decayed) is decays]
                if part:
                    optimizer.add_param_group({**group, **settings, **others, "params": part, "pattern": pattern})
        # A transformer beside the TNN has no operators.
        if not found and pattern != OPERATOR:
            raise ValueError(f"`parameter_groups` must name parameters of the model, got {pattern!r}, which has none")
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]


def build_optimizer(model: PreTrainedModel, args, decayed: set[str]) -> torch.optim.Optimizer:
    """The optimizer that `args.optim` names; the parameters named `decayed` have weight decay."""
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in parameters if name in decayed], "weight_decay": args.weight_decay},
        {"params": [p for name, p in parameters if name not in decayed], "weight_decay": 0.0},
    ]
    optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
    optimizer = optimizer_class(groups, **options)
    regroup(optimizer, model, args.groups(), decayed)
    return optimizer


def try_schedule(args: PretrainArguments):
    """Refuse a schedule that `build_scheduler` cannot build. Some compare their end with the learning rate."""
    build_scheduler(args, torch.optim.SGD([torch.zeros(1)], lr=args.learning_rate))


def build_scheduler(args, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """The schedule that `args.lr_scheduler_type` of `PretrainArguments` names; ValueError if others do not fit it."""
    name, given = args.lr_scheduler_type, args.lr_scheduler_kwargs
    try:
        return get_scheduler(name, optimizer, args.num_warmup_steps, args.max_steps, json.loads(given or "{}"))
    except (TypeError, ValueError) as error:
        raise ValueError(f"--lr_scheduler_kwargs must be a JSON object for {name}, got {given}: {error}") from error
