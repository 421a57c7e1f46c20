"""The models of the benchmarks: a TNN, and transformers' models of the same size, with random weights."""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import cross_entropy, linear, pad
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    PreTrainedModel,
)

from modeling_tnn import TnnConfig, TnnForCausalLM, TnnForMaskedLM
from modeling_tnn.extensions import IMPLEMENTATIONS
from modeling_tnn.kernels.loss import linear_cross_entropy

# The operators of the benchmarks of decoding and of serving.
FIELDS = {
    "rpe-no-decay": {"tno_type": "rpe", "decay": 1.0},
    "rpe": {"tno_type": "rpe", "decay": 0.99},
    "fd": {"tno_type": "fd", "rpe_layers": 3},
    "rtf": {"tno_type": "rtf", "rtf_constraint": "l1_montel", "rtf_initializer": "xavier"},
    "modal": {"tno_type": "modal"},
}


def tnn(args, length: int, **fields) -> TnnForCausalLM | TnnForMaskedLM:
    fields |= {"hidden_size": args.hidden_size, "decay": args.decay, "hidden_dropout_prob": 0.0}
    fields["causal"] = not getattr(args, "bidirectional", False)
    head = TnnForCausalLM if fields["causal"] else TnnForMaskedLM
    return head(TnnConfig(max_position_embeddings=max(512, length), **fields, **sizes(args)))


def gpt2(args, length: int) -> GPT2LMHeadModel:
    # No dropout, because attention has no fast path with it.
    silent = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    shape = {"n_embd": args.hidden_size, "n_head": heads(args), "n_positions": length}
    return GPT2LMHeadModel(GPT2Config(**shape, **silent, **SPECIAL_TOKENS, **sizes(args)))


def llama(args, length: int) -> LlamaForCausalLM:
    """A Llama with as many parameters in a layer as the others: 4 d^2 of attention and 8 d^2 of its MLP."""
    shape = {"hidden_size": args.hidden_size, "intermediate_size": args.hidden_size * 8 // 3}
    shape |= {"num_attention_heads": heads(args), "max_position_embeddings": length, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(**shape, **SPECIAL_TOKENS, **sizes(args)))


def mamba2(args, length: int) -> Mamba2ForCausalLM:
    shape = {"hidden_size": args.hidden_size, "head_dim": 64, "num_heads": max(1, 2 * args.hidden_size // 64)}
    return Mamba2ForCausalLM(Mamba2Config(**shape, n_groups=1, **SPECIAL_TOKENS, **sizes(args)))


SPECIAL_TOKENS = {"bos_token_id": 0, "eos_token_id": 0}
BUILDERS: dict[str, Callable] = {name: partial(tnn, tno_implementation=name) for name in IMPLEMENTATIONS}
BUILDERS |= {"gpt2": gpt2, "llama": llama, "mamba2": mamba2}


def build_model(way: str, args, length: int, builders: dict[str, Callable] = BUILDERS) -> PreTrainedModel:
    """A language model with random weights for training on sequences of `length`."""
    torch.manual_seed(0)
    with torch.device(args.device):
        return builders[way](args, length).train()


def heads(args) -> int:
    return max(1, args.hidden_size // 64)


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
