"""Optimizers by the names of transformers, and parameters with a learning rate or weight decay of their own.

A Toeplitz operator has few parameters, and they act on every position of a text. The RTF paper gives them a rate of
their own and no weight decay (table 9).
"""

import json
import re

import torch
from transformers import PreTrainedModel, Trainer, TrainingArguments, get_scheduler

from tnn_scripts.common.muon import MuonWithAdamW
from tnn_scripts.common.optimizer_arguments import MUON, OPERATOR
from tnn_scripts.common.progress import show_figures


def regroup(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, groups: dict[str, dict[str, float]], decayed: set[str]
):
    """Move the parameters that a pattern finds into groups with settings of their own.

    Args:
        optimizer: new, of parameters of `model`.
        groups: see `GroupArguments.groups`.
        decayed: names of the parameters that may have weight decay; others, such as biases, get none.

    Raises:
        ValueError: a pattern finds no parameter.
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
            raise ValueError(
                f"`parameter_groups` must name parameters of the model, got {pattern!r}, which finds none."
            )
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]


def hidden_matrices(model: PreTrainedModel, decayed: set[str]) -> set[str]:
    """The names of the matrices that Muon is for: those of hidden layers, without embeddings, head and operators."""
    others = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    others = {id(p) for module in [*others, model.get_output_embeddings()] for p in module.parameters()}
    return {
        name
        for name, p in model.named_parameters()
        if name in decayed and p.ndim == 2 and id(p) not in others and not re.search(OPERATOR, name)
    }


def build_optimizer(model: PreTrainedModel, args, decayed: set[str]) -> torch.optim.Optimizer:
    """The optimizer that `args.optim` names; the parameters named `decayed` have weight decay.

    Args:
        args: `GroupArguments` with the fields of `TrainingArguments` that are about the optimizer.

    Raises:
        ValueError: the optimizer's package is missing, or a pattern finds no parameter.
    """
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = hidden_matrices(model, decayed) if args.optim == MUON else set()
    groups = [
        {"params": [p for name, p in parameters if name in decayed - matrices], "weight_decay": args.weight_decay},
        {"params": [p for name, p in parameters if name not in decayed], "weight_decay": 0.0},
    ]
    if args.optim == MUON:
        chosen = {"params": [p for name, p in parameters if name in matrices], "weight_decay": args.weight_decay}
        betas = (args.adam_beta1, args.adam_beta2)
        optimizer = MuonWithAdamW([chosen], groups, lr=args.learning_rate, betas=betas, eps=args.adam_epsilon)
    else:
        optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
        optimizer = optimizer_class(groups, **options)
    regroup(optimizer, model, args.groups(), decayed)
    return optimizer


def build_scheduler(args, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """The schedule that `args.lr_scheduler_type` names, with `args.lr_scheduler_kwargs`.

    Args:
        args: `PretrainArguments`.

    Raises:
        ValueError: the further arguments are no JSON object, or do not fit the schedule.
    """
    given = args.lr_scheduler_kwargs
    try:
        further = dict(json.loads(given or "{}"))
        return get_scheduler(args.lr_scheduler_type, optimizer, args.num_warmup_steps, args.max_steps, further)
    except (TypeError, ValueError) as error:
        name = args.lr_scheduler_type
        raise ValueError(f"--lr_scheduler_kwargs must be a JSON object for {name}, got {given}: {error}") from error


def fit_to_device(args: TrainingArguments):
    """Leave pinned memory to accelerators, and the filter of losses, for which Trainer reads each of them, to CPUs."""
    on_cpu = args.device.type == "cpu"
    args.dataloader_pin_memory &= not on_cpu  # else PyTorch warns
    args.logging_nan_inf_filter &= on_cpu


class GroupingTrainer(Trainer):
    """Trainer with parameters that have settings of their own, and a bar with loss and tokens per second.

    It saves the `use_cache` that the model had before, where it had one; Trainer sets it to False.

    Args:
        groups: see `GroupArguments.groups`.
    """

    def __init__(self, model, *arguments, groups: dict[str, dict[str, float]] | None = None, **options):
        config = getattr(model, "config", None)  # a plain module has none
        self.saved_cache = {"use_cache": config.use_cache} if hasattr(config, "use_cache") else {}
        super().__init__(model, *arguments, **options)
        self.groups = groups or {}
        self.bar = show_figures(self)
        fit_to_device(self.args)

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            optimizer, own = super().create_optimizer(model), self.model if model is None else model
            regroup(optimizer, own, self.groups, set(self.get_decay_parameter_names(own)))
        return self.optimizer

    def _save(self, *arguments, **options):
        if not hasattr(self.model, "config"):
            return super()._save(*arguments, **options)
        fields = vars(self.model.config)
        present = {"use_cache": fields.pop("use_cache")} if "use_cache" in fields else {}
        fields |= self.saved_cache
        try:
            super()._save(*arguments, **options)
        finally:
            fields |= present

    def training_step(self, model: torch.nn.Module, inputs: dict, *arguments, **options) -> torch.Tensor:
        if self.bar is not None:
            self.bar.add(inputs)
        return super().training_step(model, inputs, *arguments, **options)
