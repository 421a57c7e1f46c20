"""The next tokens of a recurrent model as a function of tensors alone, for runtimes that keep the states themselves.

B batch, D channels, N order, w window, Q modes. The states of a layer, and the step from v_t to y_t:

    rtf      past w values (B, D, N)                          w_t = v_t - sum_k a_k w_(t-k)
                                                              y_t = h_0 v_t + sum_k c_k w_(t-k)
    modal    past inputs (B, D, w), memory (B, D, Q) twice    s_t = lambda s_(t-1) + v_(t-w)
    s4d      the same with w = 1 and poles of each channel    y_t = sum_(j<w) head_j v_(t-j) + Re sum_q r_q s_t,q

The cache computes the same in blocks of tokens and with room for `crop`. A recorded graph cannot, because blocks need
counters. Several tokens are a `scan` over the recurrence of each layer. The two memories are the real and the
imaginary part: ONNX has no complex numbers. Where n neighbouring channels share a filter, each of them has a row: B is
n times the number of sequences.
"""

from types import SimpleNamespace

import torch
from torch import nn
from torch._higher_order_ops.scan import scan

from ..configuration_tnn import GTU, S4, TOEPLITZ
from ..tno import ToeplitzOperator
from ..toeplitz_fused import Gate, groups_as_rows, rows_as_groups

States = list[list[torch.Tensor]]


class RtfStep(nn.Module):
    """The step of an `RtfOperator`, in float64. States of lower precision are rounded after each token."""

    def __init__(self, operator: ToeplitzOperator):
        super().__init__()
        denominator, numerator, direct = (part.detach() for part in operator.companion_form())
        self.register_buffer("denominator", denominator.flip(1))  # (D, N), for lags N .. 1
        self.register_buffer("numerator", numerator.flip(1))  # (D, N)
        self.register_buffer("direct", direct)  # (D,)

    def empty(self, rows: int) -> list[torch.Tensor]:
        """The states before the first token of `rows` sequences."""
        return [self.denominator.new_zeros(rows, *self.denominator.shape)]

    def forward(self, v: torch.Tensor, past: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The output `(B, D)` for the input `(B, D)`, and the states after it."""
        v, exact = v.to(self.direct.dtype), past.to(self.direct.dtype)
        y = self.direct * v + (exact * self.numerator).sum(-1)
        newest = v - (exact * self.denominator).sum(-1)
        return y, [torch.cat([past[..., 1:], newest[..., None].to(past.dtype)], dim=-1)]


class ModalStep(nn.Module):
    """The step of a `ModalOperator` or an `S4dOperator`. Its states are in float32, or float64 for a float64 model."""

    def __init__(self, operator: ToeplitzOperator):
        super().__init__()
        self.register_buffer("head", operator.coefficients(operator.window).detach().flip(1))  # (D, w), lags w-1 .. 0
        poles = operator.powers(torch.ones(1, device=self.head.device))[..., 0].detach()  # (Q,) or (D, Q)
        residues = operator.complex_residues().detach()  # (D, Q)
        for name, part in {"poles": poles, "residues": residues}.items():
            self.register_buffer(f"{name}_real", part.real.to(self.head.dtype))
            self.register_buffer(f"{name}_imag", part.imag.to(self.head.dtype))

    def empty(self, rows: int) -> list[torch.Tensor]:
        """As for `RtfStep`."""
        return [one.new_zeros(rows, *one.shape) for one in (self.head, self.residues_real, self.residues_imag)]

    def forward(self, v: torch.Tensor, past, real, imag) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """As for `RtfStep`."""
        oldest, past = past[..., :1], torch.cat([past[..., 1:], v.to(past.dtype)[..., None]], dim=-1)
        turned = real * self.poles_imag + imag * self.poles_real
        real, imag = real * self.poles_real - imag * self.poles_imag + oldest, turned
        y = (past * self.head).sum(-1) + (real * self.residues_real - imag * self.residues_imag).sum(-1)
        return y, [past, real, imag]


STEPS = {"rtf": RtfStep, "s4d": ModalStep, "modal": ModalStep}


class StepState:
    """The state of a layer in one step, in the place of a `recurrence.DecodingState`."""

    def __init__(self, step: nn.Module, tensors: list[torch.Tensor]):
        self.step, self.tensors = step, tensors

    def decode(self, operator, v: torch.Tensor, gate: Gate) -> torch.Tensor:
        """The outputs of an operator for the next inputs, `(B, L, D)`, inside its gate."""
        v = gate.inputs(v)
        rows = groups_as_rows(v, operator.group_size)  # (B, L, D)
        if rows.shape[1] == 1:
            y, self.tensors = self.step(rows[:, 0], *self.tensors)
            y = y[:, None]
        else:
            self.tensors, y = scan(lambda states, v: self.step(v, *states)[::-1], self.tensors, rows.movedim(1, 0))
            y = y.movedim(0, 1)
        y = rows_as_groups(y, operator.group_size)
        return gate.apply(y.to(v.dtype), operator.implementation)


class DecodingStep(nn.Module):
    """A causal language model that reads the next tokens, with its states as inputs and outputs.

    It holds copies of the coefficients: build it again after training. A program of one token is for one token; one of
    several takes any number in ONNX.

    Args:
        model: a `TnnForCausalLM` with `tno_type` "rtf", "s4d" or "modal", such as `to_recurrent` makes, without
            attention, Hyena mixers and positions; it is put into evaluation mode.

    Example:
        step = DecodingStep(model)
        logits, states = step(ids[:, :1], step.empty(len(ids)))
        program = torch.export.export(step, (ids[:, :1], states))
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        config = model.config
        if len(config.tno_types) > 1 or config.tno_types[0] not in STEPS:
            got = ", ".join(config.tno_types)
            raise ValueError(f"`tno_type` must be one of {', '.join(STEPS)} for one step, got {got!r}")
        config.require("layer_types", {*config.layer_types} == {TOEPLITZ}, f"{TOEPLITZ!r} in all layers for one step")
        config.require("toeplitz_mixer", config.toeplitz_mixer in (GTU, S4), "'gtu' or 's4' for one step")
        config.require("position_embedding", config.position_embedding is None, "None for one step")
        self.model = model.eval()
        self.steps = nn.ModuleList(STEPS[config.tno_types[0]](layer.mixer.tno) for layer in model.model.layers)

    def empty(self, rows: int) -> States:
        """The states before the first token of `rows` sequences: for each layer the tensors of the table above."""
        sizes = [layer.mixer.tno.group_size for layer in self.model.model.layers]
        return [step.empty(rows * size) for step, size in zip(self.steps, sizes, strict=True)]

    def forward(self, input_ids: torch.Tensor, states: States) -> tuple[torch.Tensor, States]:
        """The logits `(B, V)` after the next tokens `(B, L)`, and the states that hold them."""
        held = [StepState(*pair) for pair in zip(self.steps, states, strict=True)]
        # The pass is one of fixed shape but for L, see `compile/static_cache.py`.
        layers = [SimpleNamespace(states={"tno": one}, is_ready=True, reads_texts=True) for one in held]
        cache = SimpleNamespace(layers=layers, offloading=False)
        logits = self.model(input_ids=input_ids, cache=cache, use_cache=False, logits_to_keep=1).logits
        return logits[:, 0], [one.tensors for one in held]
