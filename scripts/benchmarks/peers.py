"""The peers in the benchmarks: the released form of a TNN, hybrids, and transformers' models of the same size.

The released form is written anew here: the position encoder at every lag, and three real transforms of twice the
length along the second-last axis, with every intermediate result saved for the backward pass.
"""

import torch
from torch.nn.functional import cross_entropy, linear, pad
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
)

from modeling_tnn import TnnConfig, TnnForCausalLM, TnnForMaskedLM
from modeling_tnn.configuration_tnn import FULL, TOEPLITZ
from modeling_tnn.extensions import IMPLEMENTATIONS
from modeling_tnn.kernels.loss import linear_cross_entropy
from modeling_tnn.tno_auto import OPERATORS
from modeling_tnn.tno_rpe import RpeOperator

# Names of models with attention in the blocks of a TNN -> whether layer i of a model has it. A model without Toeplitz
# layers needs positions.
ATTENTION = {"hybrid": lambda i: i % 4 == 1, "attention": lambda i: True}


def attention_fields(name: str, num_hidden_layers: int) -> dict[str, object]:
    """The fields of `TnnConfig` for a name of `ATTENTION`: in a hybrid every fourth layer, from the second, has it."""
    kinds = [FULL if ATTENTION[name](i) else TOEPLITZ for i in range(num_hidden_layers)]
    return {"layer_types": kinds} | ({} if TOEPLITZ in kinds else {"rope_parameters": {"rope_type": "default"}})


def released_product(operator, v: torch.Tensor) -> torch.Tensor:
    """The Toeplitz product as the released code computes it, `(B, L, D)` to `(B, L, D)`."""
    length = v.shape[1]
    coefficients = operator.coefficients(length).t()  # (L, D) or (2L-1, D)
    zero = coefficients[:1] if operator.causal else coefficients[length - 1 : length]
    positive = coefficients[-length:]
    parts = [positive, zero] if operator.causal else [positive, zero, coefficients[: length - 1]]
    kernel = torch.fft.rfft(torch.cat(parts), n=2 * length, dim=-2)
    spectrum = torch.fft.rfft(v, n=2 * length, dim=-2)
    return torch.fft.irfft(spectrum * kernel, n=2 * length, dim=-2)[:, :length]


class ReleasedOperator(RpeOperator):
    """The operator with the product that the released code computes."""

    def matmul(self, v: torch.Tensor) -> torch.Tensor:
        return released_product(self, v)


def operator_sizes(length: int) -> dict[str, int]:
    """The sizes of the papers, and for `fd` as many taps as the sequence has tokens."""
    return {"fd_resolution": 1 << (length - 1).bit_length(), "ski_rank": min(64, length), "ski_filter_size": 32}


def tnn(way: str, args, length: int) -> TnnForCausalLM | TnnForMaskedLM:
    fields = {"hidden_size": args.hidden_size, "decay": args.decay, "hidden_dropout_prob": 0.0}
    fields["causal"] = not getattr(args, "bidirectional", False)
    if way in OPERATORS:
        fields |= {"tno_type": way} | operator_sizes(max(512, length))
    elif way in ATTENTION:
        fields |= attention_fields(way, args.num_hidden_layers)
    else:
        fields["tno_implementation"] = "eager" if way == "released" else way
    head = TnnForCausalLM if fields["causal"] else TnnForMaskedLM
    model = head(TnnConfig(max_position_embeddings=max(512, length), **fields, **sizes(args)))
    if way == "released":
        for layer in model.model.layers:
            mixer = layer.mixer
            mixer.u_proj.__class__ = mixer.v_proj.__class__ = torch.nn.Linear  # the memory layout of tokens
            mixer.tno.__class__ = ReleasedOperator
    return model


def gpt2(way: str, args, length: int) -> GPT2LMHeadModel:
    # No dropout, because attention has no fast path with it.
    silent = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    shape = {"n_embd": args.hidden_size, "n_head": heads(args), "n_positions": length}
    return GPT2LMHeadModel(GPT2Config(**shape, **silent, **special_tokens(args), **sizes(args)))


def llama(way: str, args, length: int) -> LlamaForCausalLM:
    """A Llama with as many parameters in a layer as the others: 4 d^2 of attention and 8 d^2 of its MLP."""
    shape = {"hidden_size": args.hidden_size, "intermediate_size": args.hidden_size * 8 // 3}
    shape |= {"num_attention_heads": heads(args), "max_position_embeddings": length, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(**shape, **special_tokens(args), **sizes(args)))


def mamba(way: str, args, length: int) -> MambaForCausalLM:
    return MambaForCausalLM(MambaConfig(hidden_size=args.hidden_size, **special_tokens(args), **sizes(args)))


def mamba2(way: str, args, length: int) -> Mamba2ForCausalLM:
    shape = {"hidden_size": args.hidden_size, "head_dim": 64, "num_heads": max(1, 2 * args.hidden_size // 64)}
    return Mamba2ForCausalLM(Mamba2Config(**shape, n_groups=1, **special_tokens(args), **sizes(args)))


BUILDERS = {"released": tnn, **dict.fromkeys((*IMPLEMENTATIONS, *ATTENTION, *OPERATORS), tnn)}
BUILDERS |= {"gpt2": gpt2, "llama": llama, "mamba": mamba, "mamba2": mamba2}


def build_model(way: str, args, length: int) -> torch.nn.Module:
    """A language model with random weights for training on sequences of `length`."""
    torch.manual_seed(0)
    with torch.device(args.device):
        return BUILDERS[way](way, args, length).train()


def heads(args) -> int:
    return max(1, args.hidden_size // 64)


def sizes(args) -> dict[str, int]:
    return {"vocab_size": args.vocab_size, "num_hidden_layers": args.num_hidden_layers}


def special_tokens(args) -> dict[str, int]:
    return {"bos_token_id": 0, "eos_token_id": 0}


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
