"""Find the roots of denominators outside a circle, and warn of them in training.

    a(z) = 1 + a_1 z^-1 + .. + a_N z^-N
    r_n = a_n,    a_i <- (a_i - r_n a_{n-i}) / (1 - r_n^2),  i = 1 .. n-1,    for n = N .. 1                  (1)
    |a_1| + .. + |a_N| < 1                                                                                   (2)

Q denominators, N order. All roots of a(z) lie inside the unit circle if and only if every reflection coefficient r_n
of the step-down recursion (1) is below 1 in magnitude (Schur 1917, Cohn 1922). It is so if (2) holds, because a(z) is
not 0 on the circle or outside it then. With a_i / r^i in place of a_i, both are for the circle of radius r.
"""

import logging

import torch

from ..extensions import extensions
from ..tno_rtf import RtfOperator, companion_matrix

logger = logging.getLogger(__name__)

OUTSIDE = (
    "Their kernels grow beyond the trained length, and generation from a cache may fail. Train with "
    "rtf_constraint='l1_montel', the default of new configurations, or keep the poles inside: "
    "`PoleCallback(max_radius=0.99)` in a Trainer, `--max_pole_radius 0.99` with `tnn pretrain`. "
    "`project_poles(model, 0.99)` moves those of a trained model."
)

# Numbers of `train()` calls without an `eval()` between them after which poles are checked.
WATCHED = {2**power for power in range(3, 40)}


def is_stable(denominator: torch.Tensor, radius: float = 1.0) -> torch.Tensor:
    """Return whether all roots of each denominator `(Q, N)` lie inside the circle of `radius`, `(Q,)`, in float64.

    By (2) where it holds, which is cheap, and by (1) for the others.
    """
    powers = torch.arange(1, denominator.shape[1] + 1, device=denominator.device, dtype=torch.float64)
    a = denominator.double() / radius**powers  # (Q, N)
    stable = a.abs().sum(dim=1) < 1  # (Q,)
    others = (~stable).nonzero()[:, 0]  # (M,)
    if len(others):
        stable[others] = _step_down(a[others])
    return stable


def _step_down(a: torch.Tensor) -> torch.Tensor:
    """Return whether all roots of polynomials `(Q, N)` lie inside the unit circle, `(Q,)`, by (1)."""
    a = a.T.contiguous()  # (N, Q)
    reflections = []
    for n in range(len(a), 0, -1):
        k, rest = a[n - 1], a[: n - 1]  # (Q,), (n-1, Q)
        reflections.append(k)
        a = torch.addcmul(rest, k, rest.flip(0), value=-1).div_(1 - k.square())
    # What is not a number stays so until it is a reflection coefficient itself.
    return (torch.stack(reflections).abs() < 1).all(dim=0)


def spectral_radius(denominator: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of a root of each denominator `(Q, N)`, `(Q,)` in float64; inf if not finite."""
    finite = denominator.isfinite().all(dim=1)
    matrices = companion_matrix(denominator.double().where(finite[:, None], 0.0))  # (Q, N, N)
    radii = torch.linalg.eigvals(matrices).abs().amax(dim=1)
    return radii.where(finite, torch.inf)


def watch_poles(operator: RtfOperator, mode: bool):
    """Warn once of poles outside the unit circle, before the operator changes to the `mode` of `train(mode)`.

    They are checked when a training ends, at the first call of `eval()` after it. A Trainer may end without one, but
    calls `train()` in each step: they are also checked at steps 8, 16, 32, 64, ..
    """
    ends = operator.training and not mode
    operator._train_calls = operator._train_calls + 1 if mode else 0
    is_due = ends or operator._train_calls in WATCHED
    denominator = operator.denominator
    is_whole = type(denominator.data) is torch.Tensor and denominator.numel() > 0  # not a shard
    if operator.constraint is not None or operator.has_warned or not (is_due and is_whole) or denominator.is_meta:
        return
    if outside := int((~is_stable(denominator.detach())).sum()):
        operator.has_warned = True
        count = f"{outside} of {len(denominator)}"
        logger.warning(
            "Layer %d: %s denominators have poles outside the unit circle. %s", operator.layer_idx, count, OUTSIDE
        )


extensions.register(watch_poles=watch_poles)
