"""Poles of rational kernels during training: find those outside the unit circle, and move them back.

    a(z) = 1 + a_1 z^-1 + .. + a_N z^-N

Q denominators, N order. Scaling a_i by s^i multiplies the radius of every pole by s and keeps its angle; this projects
a denominator onto a circle. An RTF kernel with a pole outside the unit circle trains well, because training samples it
only at `rtf_truncation_length` points (RTF paper, section 3.4). But it grows beyond, and its recurrence diverges.
"""

import logging
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel, TrainerCallback

from ..numerics import is_on_host
from ..tno_rtf import RtfOperator
from .stability import OUTSIDE, is_stable, spectral_radius

logger = logging.getLogger(__name__)


class UnstableLayer(NamedTuple):
    """A layer with poles outside a circle."""

    layer: int  # its index
    denominators: int  # the number of those with poles outside
    index: int  # of the denominator with the largest pole
    radius: float  # of this pole

    def __str__(self) -> str:
        return (
            f"layer {self.layer}: {self.denominators} denominators with poles outside, the largest of radius "
            f"{self.radius:.6f} (denominator {self.index})"
        )


def rational_operators(model: torch.nn.Module) -> list[RtfOperator]:
    """Return the RTF operators of a model without a constraint on their poles."""
    operators = [module for module in model.modules() if isinstance(module, RtfOperator) and module.constraint is None]
    # With DeepSpeed ZeRO 3 parameters are empty while they are not used.
    return [operator for operator in operators if operator.denominator.numel() > 0]


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter as one tensor. If it is sharded, all processes must ask for it."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def unstable_operators(model: torch.nn.Module, radius: float) -> list[tuple[RtfOperator, torch.Tensor]]:
    """Return the RTF operators with poles on or outside the circle of `radius`, each with a mask of its Q rows.

    The recursion has N steps, one after the other, so all layers take them together: zeros after the last coefficient
    add poles at 0. There are two device syncs, whatever the number of layers.
    """
    if not (operators := rational_operators(model)):
        return []
    denominators = [whole(operator.denominator) for operator in operators]
    order = max(one.shape[1] for one in denominators)
    rows = torch.cat([pad(one, (0, order - one.shape[1])).to(denominators[0].device) for one in denominators])
    masks = (~is_stable(rows, radius)).cpu().split([len(one) for one in denominators])
    return [(operator, mask) for operator, mask in zip(operators, masks, strict=True) if mask.any()]


@torch.no_grad()
def find_unstable(model: torch.nn.Module, radius: float = 1.0) -> list[UnstableLayer]:
    """The RTF layers of a model with poles on or outside the circle of `radius`, one `UnstableLayer` each.

    Layers with `rtf_constraint` are left out, and all layers with DeepSpeed ZeRO 3. If parameters are sharded, all
    processes must call this.
    """
    return [_describe(operator, outside) for operator, outside in unstable_operators(model, radius)]


def _describe(operator: RtfOperator, outside: torch.Tensor) -> UnstableLayer:
    rows = outside.nonzero()[:, 0]  # (M,)
    radii = spectral_radius(whole(operator.denominator).cpu()[rows])
    worst = int(radii.argmax())
    return UnstableLayer(operator.layer_idx, len(rows), int(rows[worst]), radii[worst].item())


@torch.no_grad()
def project_poles(model: torch.nn.Module, radius: float) -> list[UnstableLayer]:
    """Move the poles outside the circle of `radius` onto it, in place.

    All poles of such a denominator are scaled by the same factor. Its numerator does not change. If parameters are
    sharded, all processes must call this.

    Returns:
        The layers that `find_unstable` found before.

    Raises:
        ValueError: `radius` is not in (0, 1), or a coefficient is not finite.
    """
    if not 0 < radius < 1:
        raise ValueError(f"`radius` must be in (0, 1), got {radius}")
    unstable = unstable_operators(model, radius)
    found = [_describe(operator, outside) for operator, outside in unstable]
    if any(layer.radius == float("inf") for layer in found):
        raise ValueError(f"Denominators must be finite to be projected, got {'; '.join(map(str, found))}")
    for operator, outside in unstable:
        parameter, values = operator.denominator, whole(operator.denominator).clone()  # (Q, N)
        rows = values.cpu()[outside].double()  # (M, N)
        powers = torch.arange(1, rows.shape[1] + 1, dtype=torch.float64)
        scale = (radius / spectral_radius(rows)).clamp(max=1)[:, None] ** powers  # (M, N)
        values[outside.to(values.device)] = (rows * scale).to(values)
        if isinstance(parameter, DTensor):
            values = distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(values)
    return found


class PoleCallback(TrainerCallback):
    """A callback for `Trainer` that warns of RTF poles outside the unit circle, or moves them back inside.

    Args:
        max_radius: radius below 1; poles outside it are moved onto it. With None it only warns.
        every: number of steps between two checks. On the CPU poles are moved after every step. An accelerator would
            wait for each check; there, they are also moved before each evaluation and checkpoint and at the end.
    """

    def __init__(self, max_radius: float | None = None, every: int = 10):
        self.max_radius, self.every = max_radius, every

    def on_step_end(self, args, state, control, model=None, **kwargs):
        pauses = control.should_evaluate or control.should_save or control.should_training_stop
        self.on_step(model, state.global_step, pauses)

    def on_step(self, model: PreTrainedModel, step: int, pauses: bool = False):
        """Project or warn after `step`. Training loops without a Trainer call this.

        Args:
            pauses: whether an evaluation or a checkpoint comes next, or nothing.
        """
        due = step % self.every == 0
        if self.max_radius is None:
            if due:
                self.warn(model, step)
        elif due or pauses or all(is_on_host(operator.denominator) for operator in rational_operators(model)):
            project_poles(model, self.max_radius)

    def warn(self, model: PreTrainedModel, step: int):
        """Log each layer with poles outside the unit circle, once per layer."""
        for operator, outside in unstable_operators(model, 1.0):
            if not operator.has_warned:
                operator.has_warned = True
                logger.warning("Step %d, %s. %s", step, _describe(operator, outside), OUTSIDE)
