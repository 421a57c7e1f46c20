"""Further models of the benchmarks: the released form of a TNN, its operators, and hybrids."""

from collections.abc import Callable
from functools import partial

import torch
from suites.products import operator_sizes, released_product

from modeling_tnn import TnnForCausalLM, TnnForMaskedLM
from modeling_tnn.configuration_tnn import FULL, TOEPLITZ
from modeling_tnn.tno_auto import OPERATORS
from modeling_tnn.tno_rpe import RpeOperator
from tnn_programs.benchmarks import peers

# The operators of the benchmarks of decoding and of serving.
FIELDS = {
    "rpe-no-decay": {"tno_type": "rpe", "decay": 1.0},
    "rpe": {"tno_type": "rpe", "decay": 0.99},
    "fd": {"tno_type": "fd", "rpe_layers": 3},
    "rtf": {"tno_type": "rtf", "rtf_constraint": "l1_montel", "rtf_initializer": "xavier"},
    "modal": {"tno_type": "modal"},
}
# Names of models with attention in the blocks of a TNN -> whether layer i of a model has it. A model without Toeplitz
# layers needs positions.
ATTENTION = {"hybrid": lambda i: i % 4 == 1, "attention": lambda i: True}


def attention_fields(name: str, num_hidden_layers: int) -> dict[str, object]:
    """The fields of `TnnConfig` for a name of `ATTENTION`: in a hybrid every fourth layer, from the second, has it."""
    kinds = [FULL if ATTENTION[name](i) else TOEPLITZ for i in range(num_hidden_layers)]
    return {"layer_types": kinds} | ({} if TOEPLITZ in kinds else {"rope_parameters": {"rope_type": "default"}})


class ReleasedOperator(RpeOperator):
    """The operator with the product that the released code computes."""

    def matmul(self, v: torch.Tensor) -> torch.Tensor:
        return released_product(self, v)


def released(args, length: int, **fields) -> TnnForCausalLM | TnnForMaskedLM:
    model = peers.tnn(args, length, tno_implementation="eager", **fields)
    for layer in model.model.layers:
        mixer = layer.mixer
        mixer.u_proj.__class__ = mixer.v_proj.__class__ = torch.nn.Linear  # the memory layout of tokens
        mixer.tno.__class__ = ReleasedOperator
    return model


def with_operator(name: str, args, length: int, **fields) -> TnnForCausalLM | TnnForMaskedLM:
    return peers.tnn(args, length, tno_type=name, **operator_sizes(max(512, length)), **fields)


def with_attention(name: str, args, length: int) -> TnnForCausalLM | TnnForMaskedLM:
    return peers.tnn(args, length, **attention_fields(name, args.num_hidden_layers))


BUILDERS: dict[str, Callable] = peers.BUILDERS | {"released": released}
BUILDERS |= {name: partial(with_operator, name) for name in OPERATORS}
BUILDERS |= {name: partial(with_attention, name) for name in ATTENTION}
# Operators by the layers of their position encoder: SKI compares a TNN of six with FD of three.
DEPTHS = {f"released-{depth}": partial(released, rpe_layers=depth) for depth in (3, 6)}
DEPTHS |= {f"{name}-{depth}": partial(with_operator, name, rpe_layers=depth)
           for name in ("rpe", "fd") for depth in (3, 6)}  # fmt: skip
BUILDERS |= DEPTHS
build_model = partial(peers.build_model, builders=BUILDERS)
