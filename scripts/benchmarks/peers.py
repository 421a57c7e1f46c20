"""The models of the benchmarks: a TNN, and transformers' models of the same size, with random weights."""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import cross_entropy, linear, pad
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from modeling_tnn.configuration_tnn import TnnConfig
from modeling_tnn.extensions import IMPLEMENTATIONS
from modeling_tnn.kernels.loss import linear_cross_entropy
from modeling_tnn.modeling_tnn import TnnForCausalLM, TnnForMaskedLM


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


SPECIAL_TOKENS = {"bos_token_id": 0, "eos_token_id": 0}
BUILDERS: dict[str, Callable] = {name: partial(tnn, tno_implementation=name) for name in IMPLEMENTATIONS}
BUILDERS |= {name: partial(peer, name) for name in ("gpt2", "llama", "mamba", "mamba2")}


def build_model(way: str, args, length: int, builders: dict[str, Callable] = BUILDERS) -> PreTrainedModel:
    """A language model with random weights for training on sequences of `length`."""
    torch.manual_seed(0)
    with torch.device(args.device):
        return builders[way](args, length).train()


def sizes(args) -> dict[str, int]:
    return {"vocab_size": args.vocab_size, "num_hidden_layers": args.num_hidden_layers}


def training_loss(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """The mean loss on ids `(B, L)`, for every model by the same function, without the logits of the whole batch."""
    hidden, head = model.base_model(ids).last_hidden_state, model.get_output_embeddings()
    labels = ids[:, 1:].flatten()
    return linear_cross_entropy(hidden[:, :-1].flatten(0, 1), head.weight, head.bias, labels) / labels.numel()


def plain_training_loss(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """The same with all logits, for torch.compile to fuse."""
    hidden, head = model.base_model(ids).last_hidden_state, model.get_output_embeddings()
    return plain_loss(hidden[:, :-1].flatten(0, 1), head.weight, ids[:, 1:].flatten())


def plain_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean loss of hidden states `(N, d)`. The words are padded to rows of logits that a GPU reads aligned."""
    words = len(weight)
    logits = linear(hidden, pad(weight, (0, 0, 0, -words % 128)))[:, :words]  # (N, V)
    return cross_entropy(logits.float(), labels)
