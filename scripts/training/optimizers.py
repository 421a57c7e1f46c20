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

from tnn_programs.cli.training_arguments import MUON, OPERATOR, PretrainArguments

logger = logging.getLogger("pretrain")


class MuonWithAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` for groups of matrices, fused `torch.optim.AdamW` for others.

    Muon (Jordan et al. 2024) makes the step of a matrix close to orthogonal. PyTorch's "match_rms_adamw" scales it to
    the size of a step of AdamW (Liu et al. 2025, arXiv:2502.16982), so that one learning rate and weight decay serve
    both. As PyTorch's fused optimizers do, it skips a step on the device if `found_inf`, a tensor there, is 1.
    """

    def __init__(self, matrices: list[dict], others: list[dict], lr: float, betas: tuple[float, float], eps: float):
        matrices = [{**group, "muon": True} for group in matrices]
        others = [{**group, "muon": False} for group in others]
        self.muon = torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw")
        self.adamw = torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps, fused=True)
        # The groups and the state belong to this optimizer. A step lends them to the two.
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], {})
        self._step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure=None):
        if getattr(self, "grad_scale", None) is not None:
            raise ValueError(f"`grad_scale` must be None (unscale the gradients first), got {self.grad_scale}")
        loss = None if closure is None else torch.enable_grad()(closure)()
        skipped = getattr(self, "found_inf", None)
        self.muon.state = self.adamw.state = self.state
        self.adamw.param_groups = [group for group in self.param_groups if not group["muon"]]
        self.adamw.found_inf = skipped
        self.adamw.step()
        for group in self.param_groups:
            for matrix in group["params"] if group["muon"] else []:
                if matrix.grad is not None:
                    self._step_matrix(group, matrix, skipped)
        return loss

    def _step_matrix(self, group: dict, matrix: torch.Tensor, skipped: torch.Tensor | None):
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        changed = (matrix, state["momentum_buffer"])
        before = [tensor.clone() for tensor in changed] if skipped is not None else []
        self.muon.param_groups = [{**group, "params": [matrix]}]
        self.muon.step()
        for tensor, kept in zip(changed, before, strict=False):
            tensor.copy_(torch.where(skipped == 1, kept, tensor))


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
    """The optimizer that `args.optim` names; the parameters named `decayed` have weight decay."""
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
