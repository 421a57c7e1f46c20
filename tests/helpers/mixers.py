"""The tests that every token mixer inherits, fields of small models with them, and the mixers by definition.

    class TestHyena(MixerTests):
        fields = MIXED["hyena"]
        definition = staticmethod(hyena_by_definition)

The definitions are sums over positions in PyTorch, with the matrices of the operator; `released_rtf.py` restates whole
models of Hyena and S4, with the filters of RTF, and uses nothing of the package.
"""

from functools import partial

import torch

from helpers.heads import LayerTests
from helpers.models import random, relative_error, seeded, tiny_config
from modeling_tnn import TnnModel

MIXED = {
    "hyena": {"toeplitz_mixer": "hyena", "hyena_rank": 20, "hidden_act": "gelu"},
    "s4": {"toeplitz_mixer": "s4", "gtu_expansion": 1, "use_glu": False, "hidden_act": "gelu"},
    "multihyena": {"toeplitz_mixer": "multihyena", "num_mixer_heads": 16, "num_filter_groups": 8},
}


def mixed_by_definition(operator, v: torch.Tensor) -> torch.Tensor:
    """The product of an operator with `v` `(B, L, D)`, one position at a time, by its matrices `(D, L, L)`."""
    rows = operator.dense(v.shape[1]).unbind(1)
    return torch.stack([(row.T * v).sum(1) for row in rows], dim=1)


def gtu_by_definition(mixer, x: torch.Tensor) -> torch.Tensor:
    """The outputs of a `TnnGatedToeplitzUnit` with SiLU for `x` `(B, L, d)`."""
    u, v = (torch.nn.functional.silu(x @ p.weight.T + p.bias) for p in (mixer.u_proj, mixer.v_proj))
    return (u * mixed_by_definition(mixer.tno, v)) @ mixer.o_proj.weight.T + mixer.o_proj.bias


def hyena_by_definition(mixer, x: torch.Tensor, mix=None) -> torch.Tensor:
    """The outputs of a `TnnHyena` with GELU for `x` `(B, L, d)`; `mix` is what is between its projections."""
    z = x @ mixer.in_proj.weight.T + mixer.in_proj.bias
    taps, length = mixer.short.taps, x.shape[1]
    reach = 0 if mixer.short.causal else taps.shape[1] // 2
    rows = []
    for i in range(length):
        lags = [lag - reach for lag in range(taps.shape[1])]
        rows.append(sum(taps[:, lag + reach] * z[:, i - lag] for lag in lags if 0 <= i - lag < length))
    p, q, v = (torch.stack(rows, dim=1) + mixer.short.bias).chunk(3, dim=-1)
    y = p * mixed_by_definition(mixer.tno, q * v) if mix is None else mix(mixer, p, q, v)
    if mixer.low_rank is not None:
        y = torch.nn.functional.gelu(y @ mixer.low_rank.weight.T + mixer.low_rank.bias)
    return y @ mixer.o_proj.weight.T + mixer.o_proj.bias


def heads_by_definition(mixer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Every query `(B, L, D)` by every key, times the coefficient of their lag, times the value."""
    size = mixer.head_size
    q, k, v = (x.unflatten(2, (-1, size)) for x in (q, k, v))  # (B, L, H, N)
    matrices = mixer.tno.dense(q.shape[1]).repeat_interleave(q.shape[2] // mixer.tno.channels, dim=0)  # (H, L, L)
    rows = []
    for i in range(q.shape[1]):
        terms = ((q[:, i] * k[:, j]).sum(2) * matrices[:, i, j] for j in range(q.shape[1]))  # (B, H) each
        rows.append(sum(term[..., None] * v[:, j] for j, term in enumerate(terms)))
    return torch.stack(rows, dim=1).flatten(2)


multihyena_by_definition = partial(hyena_by_definition, mix=heads_by_definition)


def s4_by_definition(mixer, x: torch.Tensor) -> torch.Tensor:
    """The outputs of a `TnnS4Mixer` with GELU for `x` `(B, L, d)`."""
    y = torch.nn.functional.gelu(mixed_by_definition(mixer.tno, x)) @ mixer.o_proj.weight.T + mixer.o_proj.bias
    a, b = y.chunk(2, dim=-1)
    return a * torch.sigmoid(b)


IDS = torch.arange(80).view(2, 40) % 90 + 5
SMALL = {"hidden_size": 6, "rtf_num_denominators": None, "num_hidden_layers": 1, "ski_rank": 5}


def mixer_of(fields: dict, tno_type="rpe", causal=True, **others):
    """The mixer of a small layer in float64, no parameter at its initial value."""
    sizes = {"hyena_rank": 5, "num_mixer_heads": 4, "num_filter_groups": 2}
    fields = fields | {name: size for name, size in sizes.items() if name in fields}
    mixer = seeded(TnnModel, tiny_config(tno_type, causal, **SMALL | fields | others)).layers[0].mixer.double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return mixer


def assert_is_definition(definition, mixer, length: int):
    """In values and all gradients."""
    x, weight = random(2, length, 6), random(2, length, 6)
    found, expected = mixer(x), definition(mixer, x)
    assert relative_error(found, expected) < 1e-10, length
    inputs, kept = [x, *mixer.parameters()], {"allow_unused": True, "materialize_grads": True}
    found, expected = (torch.autograd.grad((y * weight).sum(), inputs, **kept) for y in (found, expected))
    scale = max(one.abs().max().item() for one in expected)
    assert max(relative_error(a, b, scale) for a, b in zip(found, expected, strict=True)) < 1e-9, length


class MixerTests(LayerTests):
    """Properties of a mixer, over those of a language model with its `fields`.

    Attributes:
        definition: function of the mixer and its inputs `(B, L, d)`.
    """

    definition = None

    def test_equals_its_definition(self, causal):
        for length in (1, 2, 3, 17, 63):
            assert_is_definition(self.definition, mixer_of(self.fields, causal=causal), length)
