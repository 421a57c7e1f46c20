"""The models of the benchmarks, with random weights: TNNs and transformers' models of their size, and their losses."""

from collections.abc import Callable
from functools import partial

import torch
from suites.products import operator_sizes, released_product
from torch.nn.functional import cross_entropy, linear, pad
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from modeling_tnn.configuration_tnn import FULL, TOEPLITZ, TnnConfig
from modeling_tnn.extensions import IMPLEMENTATIONS
from modeling_tnn.modeling_tnn import TnnForCausalLM, TnnForMaskedLM
from modeling_tnn.tno_auto import OPERATORS
from modeling_tnn.tno_rpe import RpeOperator

# The operators of the benchmarks of decoding and of serving.
FIELDS = {
    "rpe-no-decay": {"tno_type": "rpe", "decay": 1.0},
    "rpe": {"tno_type": "rpe", "decay": 0.99},
    "fd": {"tno_type": "fd", "rpe_layers": 3},
    "rtf": {"tno_type": "rtf", "rtf_constraint": "l1_montel", "rtf_initializer": "xavier"},
    "modal": {"tno_type": "modal"},
}
SPECIAL_TOKENS = {"bos_token_id": 0, "eos_token_id": 0}
# Names of models with attention in the blocks of a TNN -> whether layer i of a model has it. A model without Toeplitz
# layers needs positions.
ATTENTION = {"hybrid": lambda i: i % 4 == 1, "attention": lambda i: True}


def attention_fields(name: str, num_hidden_layers: int) -> dict[str, object]:
    """The fields of `TnnConfig` for a name of `ATTENTION`: in a hybrid every fourth layer, from the second, has it."""
    kinds = [FULL if ATTENTION[name](i) else TOEPLITZ for i in range(num_hidden_layers)]
    return {"layer_types": kinds} | ({} if TOEPLITZ in kinds else {"rope_parameters": {"rope_type": "default"}})


def tnn(args, length: int, **fields) -> TnnForCausalLM | TnnForMaskedLM:
    fields |= {"hidden_size": args.hidden_size, "decay": args.decay, "hidden_dropout_prob": 0.0}
    fields["causal"] = not getattr(args, "bidirectional", False)
    head = TnnForCausalLM if fields["causal"] else TnnForMaskedLM
    return head(TnnConfig(max_position_embeddings=max(512, length), **fields, **sizes(args)))


def peer(kind: str, args, length: int) -> PreTrainedModel:
    """A model of transformers with as many parameters in a layer: 4 d^2 of attention and 8 d^2 of an MLP."""
    width, heads = args.hidden_size, max(1, args.hidden_size // 64)
    # No dropout in GPT-2, because attention has no fast path with it.
    silent = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    own = {
        "gpt2": {"n_embd": width, "n_head": heads, "n_positions": length} | silent,
        "llama": {"intermediate_size": width * 8 // 3, "num_attention_heads": heads, "tie_word_embeddings": True}
        | {"max_position_embeddings": length},
        "mamba": {},
        "mamba2": {"head_dim": 64, "num_heads": max(1, 2 * width // 64), "n_groups": 1},
    }[kind]
    own |= {} if kind == "gpt2" else {"hidden_size": width}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **own, **SPECIAL_TOKENS, **sizes(args)))


class ReleasedOperator(RpeOperator):
    """The operator with the product that the released code computes."""

    def matmul(self, v: torch.Tensor) -> torch.Tensor:
        return released_product(self, v)


def released(args, length: int, **fields) -> TnnForCausalLM | TnnForMaskedLM:
    model = tnn(args, length, tno_implementation="eager", **fields)
    for layer in model.model.layers:
        mixer = layer.mixer
        mixer.u_proj.__class__ = mixer.v_proj.__class__ = torch.nn.Linear  # the memory layout of tokens
        mixer.tno.__class__ = ReleasedOperator
    return model


def with_operator(name: str, args, length: int, **fields) -> TnnForCausalLM | TnnForMaskedLM:
    return tnn(args, length, tno_type=name, **operator_sizes(max(512, length)), **fields)


def with_attention(name: str, args, length: int) -> TnnForCausalLM | TnnForMaskedLM:
    return tnn(args, length, **attention_fields(name, args.num_hidden_layers))


BUILDERS: dict[str, Callable] = {name: partial(tnn, tno_implementation=name) for name in IMPLEMENTATIONS}
BUILDERS |= {name: partial(peer, name) for name in ("gpt2", "llama", "mamba", "mamba2")} | {"released": released}
BUILDERS |= {name: partial(with_operator, name) for name in OPERATORS}
BUILDERS |= {name: partial(with_attention, name) for name in ATTENTION}
# Operators by the layers of their position encoder: SKI compares a TNN of six with FD of three.
DEPTHS = {f"released-{depth}": partial(released, rpe_layers=depth) for depth in (3, 6)}
DEPTHS |= {f"{name}-{depth}": partial(with_operator, name, rpe_layers=depth)
           for name in ("rpe", "fd") for depth in (3, 6)}  # fmt: skip
BUILDERS |= DEPTHS


def build_model(way: str, args, length: int) -> PreTrainedModel:
    """A language model with random weights for training on sequences of `length`."""
    torch.manual_seed(0)
    with torch.device(args.device):
        return BUILDERS[way](args, length).train()


def sizes(args) -> dict[str, int]:
    return {"vocab_size": args.vocab_size, "num_hidden_layers": args.num_hidden_layers}


def plain_training_loss(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """The same with all logits, for torch.compile to fuse."""
    hidden, head = model.base_model(ids).last_hidden_state, model.get_output_embeddings()
    return plain_loss(hidden[:, :-1].flatten(0, 1), head.weight, ids[:, 1:].flatten())


def plain_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean loss of hidden states `(N, d)`. The words are padded to rows of logits that a GPU reads aligned."""
    words = len(weight)
    logits = linear(hidden, pad(weight, (0, 0, 0, -words % 128)))[:, :words]  # (N, V)
    return cross_entropy(logits.float(), labels)
