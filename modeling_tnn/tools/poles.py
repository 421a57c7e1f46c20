"""Poles of rational kernels in training: find those outside a circle, and move them onto it.

    a(z) = 1 + a_1 z^-1 + .. + a_N z^-N
    r_n = a_n,    a_i <- (a_i - r_n a_{n-i}) / (1 - r_n^2),  i = 1 .. n-1,    for n = N .. 1                  (1)
    |a_1| + .. + |a_N| < 1                                                                                   (2)

Q denominators, N order. All roots of a(z) lie inside the unit circle if and only if every reflection coefficient r_n
of the step-down recursion (1) is below 1 in magnitude (Schur 1917, Cohn 1922), and also if (2) holds. An RTF kernel
with a pole outside trains well, because training samples it only at `rtf_truncation_length` points (RTF paper, section
3.4). But it grows beyond, and its recurrence diverges.
"""

import logging
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel, TrainerCallback

from ..numerics import is_on_host
from ..tno_rtf import RtfOperator, spectral_radius

logger = logging.getLogger(__name__)

HINT = (
    "Their kernels grow beyond the trained length, and generation from a cache may fail. Train with "
    "rtf_constraint='l1_montel', or with `PoleCallback(max_radius=0.99)`."
)


class UnstableLayer(NamedTuple):
    """A layer with poles outside a circle."""

    layer: int  # its index
    denominators: int  # the number of those with poles outside
    radius: float  # that of the largest pole

    def __str__(self) -> str:
        return f"layer {self.layer}: {self.denominators} denominators have poles up to radius {self.radius:.6f}"


def scale_roots(denominator: torch.Tensor, factor) -> torch.Tensor:
    """Return denominators `(Q, N)` with all roots multiplied by `factor`, a number or `(Q, 1)`, in float64."""
    exponents = torch.arange(1, denominator.shape[1] + 1, device=denominator.device, dtype=torch.float64)
    return denominator.double() * factor**exponents


def is_stable(denominator: torch.Tensor, radius: float = 1.0) -> torch.Tensor:
    """Return whether all roots of each denominator `(Q, N)` lie inside the circle of `radius`, `(Q,)`.

    By (2) where it holds, which is cheap, and by (1) for the others.
    """
    a = scale_roots(denominator, 1 / radius)
    stable = a.abs().sum(dim=1) < 1  # (Q,)
    others = (~stable).nonzero()[:, 0]  # (M,)
    if len(others):
        stable[others] = (reflection_coefficients(a[others]).abs() < 1).all(dim=0)
    return stable


def reflection_coefficients(a: torch.Tensor) -> torch.Tensor:
    """Return r_N .. r_1 `(N, Q)` of denominators `(Q, N)`, by (1)."""
    a = a.T.contiguous()  # (N, Q)
    reflections = []
    for n in range(len(a), 0, -1):
        k, rest = a[n - 1], a[: n - 1]  # (Q,), (n-1, Q)
        reflections.append(k)
        a = torch.addcmul(rest, k, rest.flip(0), value=-1).div_(1 - k.square())
    return torch.stack(reflections)


def rational_operators(model: torch.nn.Module) -> list[RtfOperator]:
    """Return the RTF operators without a constraint. With DeepSpeed ZeRO 3 they are empty, and left out."""
    operators = (module for module in model.modules() if isinstance(module, RtfOperator))
    return [one for one in operators if one.constraint is None and one.denominator.numel() > 0]


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter as one tensor. If it is sharded, all processes must ask for it."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def unstable_operators(model: torch.nn.Module, radius: float) -> list[tuple[RtfOperator, torch.Tensor, torch.Tensor]]:
    """Return the RTF operators with poles on or outside a circle, the rows `(M,)` that have them, and their radii.

    All layers take the N steps of the recursion together, with two device syncs in all.
    """
    if not (operators := rational_operators(model)):
        return []
    denominators = [whole(operator.denominator) for operator in operators]
    stable = is_stable(torch.cat([one.to(denominators[0].device) for one in denominators]), radius)
    masks = (~stable).cpu().split([len(one) for one in denominators])
    rows = [mask.nonzero()[:, 0] if mask.any() else () for mask in masks]
    layers = zip(operators, denominators, rows, strict=True)
    return [(operator, rows, spectral_radius(values.cpu()[rows])) for operator, values, rows in layers if len(rows)]


@torch.no_grad()
def find_unstable(model: torch.nn.Module, radius: float = 1.0) -> list[UnstableLayer]:
    """The RTF layers of a model with poles on or outside the circle of `radius`, one `UnstableLayer` each.

    Layers with `rtf_constraint` are left out, and all layers with DeepSpeed ZeRO 3. If parameters are sharded, all
    processes must call this.
    """
    unstable = unstable_operators(model, radius)
    return [UnstableLayer(operator.layer_idx, len(rows), radii.max().item()) for operator, rows, radii in unstable]


@torch.no_grad()
def project_poles(model: torch.nn.Module, radius: float):
    """Move the poles outside the circle of `radius` onto it, in place.

    All poles of such a denominator are scaled by the same factor, which keeps their angles. Its numerator does not
    change. If parameters are sharded, all processes must call this. A ValueError if `radius` is not in (0, 1), or a
    coefficient is not finite.
    """
    if not 0 < radius < 1:
        raise ValueError(f"`radius` must be in (0, 1), got {radius}")
    unstable = unstable_operators(model, radius)
    for operator, _, radii in unstable:  # before any layer changes
        if radii.isinf().any():
            raise ValueError(f"Denominators must be finite to be projected, got others in layer {operator.layer_idx}")
    for operator, rows, radii in unstable:
        parameter, values = operator.denominator, whole(operator.denominator).clone()  # (Q, N)
        factors = (radius / radii).clamp(max=1)[:, None]  # (M, 1)
        values[rows.to(values.device)] = scale_roots(values.cpu()[rows], factors).to(values)
        if isinstance(parameter, DTensor):
            values = distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(values)


class PoleCallback(TrainerCallback):
    """A callback for `Trainer` that warns once of RTF poles outside the unit circle, or moves them back inside.

    Args:
        max_radius: radius below 1; poles outside it are moved onto it. With None it only warns.
        every: number of steps between two checks. On the CPU poles are moved after every step. An accelerator would
            wait for each check; there, they are also moved before each evaluation and checkpoint and at the end.
    """

    def __init__(self, max_radius: float | None = None, every: int = 10):
        self.max_radius, self.every, self._has_warned = max_radius, every, False

    def on_step_end(self, args, state, control, model=None, **kwargs):
        pauses = control.should_evaluate or control.should_save or control.should_training_stop
        self.on_step(model, state.global_step, pauses)

    def on_step(self, model: PreTrainedModel, step: int, pauses: bool = False):
        """Project or warn after `step`; `pauses`: before an evaluation or a checkpoint, or at the end."""
        is_due = step % self.every == 0
        if self.max_radius is not None:
            if is_due or pauses or all(is_on_host(operator.denominator) for operator in rational_operators(model)):
                project_poles(model, self.max_radius)
        elif is_due and not self._has_warned and (found := find_unstable(model)):
            self._has_warned = True
            logger.warning("Step %d, %s. %s", step, "; ".join(map(str, found)), HINT)
