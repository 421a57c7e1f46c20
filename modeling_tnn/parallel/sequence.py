"""Sequence parallelism: one long text over several processes, for training and for the prompt of a generation.

P processes, B batch, L length, D channels of a GTU. What acts on one token is computed where the token lies, on L / P
tokens. A Toeplitz product acts on one channel at a time, so before it the processes exchange

    (L / P tokens, D channels)  ->  (L tokens, D / P channels)

and after it they exchange back. Each process makes the kernels of its channels alone. In an exchange each process
sends B L D / P numbers, its own share included. A layer has two, and two more in the backward pass: 4 B L D / P.
"""

import inspect
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..cache_tnn import cache_of
from ..configuration_tnn import GTU, S4, has_attention
from ..inputs import check_attention_mask, check_labels, first_real_token, roll
from ..packing import Documents, positions_of
from ..tno import LayerContext, ToeplitzOperator
from ..toeplitz_fused import Gate
from .channels import LocalOperator, total

HEADS = ("TnnModel", "TnnForCausalLM", "TnnForMaskedLM")


def shares_of(count: int, parts: int) -> list[range]:
    """Return `count` things in `parts` consecutive shares, whose sizes differ by one at most."""
    bounds = [-(-count * index // parts) for index in range(parts + 1)]
    return [range(*pair) for pair in pairwise(bounds)]


def slice_of(share: range) -> slice:
    return slice(share.start, share.stop)


class Layout(NamedTuple):
    """Placement of a sequence on the processes."""

    parallel: "SequenceParallel"
    tokens: list[range] | None = None  # of each process; None if each has all
    mask: torch.Tensor | None = None  # (B, L) of booleans, False at padding
    documents: Documents | None = None  # of packed rows


class AllToAll(torch.autograd.Function):
    """Exchange vectors: `sizes` are those of the parts sent to each process, and `wanted` of those received."""

    @staticmethod
    def forward(ctx, sent: torch.Tensor, sizes: list[int], wanted: list[int], group) -> torch.Tensor:
        ctx.back = wanted, sizes, group
        received = sent.new_empty(sum(wanted))
        dist.all_to_all_single(received, sent, wanted, sizes, group=group)
        return received

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return AllToAll.apply(gradient.contiguous(), *ctx.back), None, None, None


class SequenceParallel:
    """A context in which the processes of a `mesh` of one dimension compute a model on one sequence together.

        mesh = init_device_mesh("cuda", (8,))
        with SequenceParallel(model, mesh) as parallel:
            loss = model(input_ids=ids, labels=ids, skip_logits=True).loss  # of the whole sequence, in every process
            loss.backward()
            parallel.add_gradients()
            optimizer.step()

    Every process has the whole `model`, a `TnnModel`, `TnnForCausalLM` or `TnnForMaskedLM`, and gets the same whole
    sequence with its mask, labels and boundaries of documents. Logits and hidden states are those of the process's
    tokens, see `gather`; with `logits_to_keep=k` every process gets those of the last k tokens of the sequence.
    A prompt that is divided leaves a cache of D / P channels in each process, and all go on decoding together, inside
    the context, as `generate` does. Without gradients, sequences of fewer tokens than processes are computed too.

    Raises:
        TypeError: the model is of another class.
        ValueError: the model is divided already, has attention or short convolutions, or its operator has no
            `channel_parameters`, or fewer channels than there are processes.
    """

    def __init__(self, model: PreTrainedModel, mesh: DeviceMesh):
        if not any(cls.__name__ in HEADS for cls in type(model).__mro__):
            raise TypeError(f"`model` must be one of {', '.join(HEADS)}, got {type(model).__name__}")
        self.model, self.base, self.hooks = model, model.base_model, []
        self.mesh, self.group, self.index, self.count = mesh, mesh.get_group(), mesh.get_local_rank(), mesh.size()
        config, why = self.base.config, "for a divided text, whose processes do not see tokens of others"
        config.require("layer_types", not has_attention(config), f"'toeplitz' in all layers {why}; use tp_plan='auto'")
        config.require("toeplitz_mixer", config.toeplitz_mixer in (GTU, S4), f"'gtu' or 's4' {why}")
        operators = [layer.mixer.tno for layer in self.base.layers]
        if any(operator.local_operator is not None for operator in operators):
            raise ValueError("`model` must not be divided over processes already, got one that is")
        filters, size = shares_of(operators[0].channels, self.count), operators[0].group_size
        self.channels = [range(size * share.start, size * share.stop) for share in filters]
        self.local_operators = [LocalOperator(operator, filters, self.index) for operator in operators]

    def __enter__(self) -> "SequenceParallel":
        for local in self.local_operators:
            local.operator.local_operator = local
        self.base.sequence_parallel = self
        if self.model is not self.base:
            self.hooks = [
                self.model.register_forward_pre_hook(self._before_head, with_kwargs=True),
                self.model.register_forward_hook(self._after_head),
            ]
        return self

    def __exit__(self, *exception):
        for local in self.local_operators:
            del local.operator.local_operator
        del self.base.sequence_parallel
        for hook in self.hooks:
            hook.remove()

    def tokens_of(self, length: int) -> list[range]:
        """The tokens of each process, for a sequence of `length`."""
        return shares_of(length, self.count)

    def add_gradients(self):
        """Add the gradients of all processes, once before a step of the optimizer.

        DDP and FSDP over these processes do it themselves, if the loss is multiplied by the number of processes.
        """
        for parameter in self.model.parameters():
            if parameter.grad is not None:  # in no process, then: all record the same graph
                dist.all_reduce(parameter.grad, group=self.group)

    @torch.no_grad()
    def gather(self, x: torch.Tensor, length: int) -> torch.Tensor:
        """The entries of all tokens, `(B, length, ...)`, from those of this process, without gradients."""
        return self._gather(x, 1, [len(tokens) for tokens in self.tokens_of(length)])

    def _gather(self, x: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
        """Return the parts of all processes, which have these `sizes` along `dim`, one after the other."""
        own = x.movedim(dim, 0)
        sent = own.new_zeros(max(sizes), *own.shape[1:])
        sent[: len(own)] = own
        received = sent.new_empty(self.count * len(sent), *own.shape[1:])
        dist.all_gather_into_tensor(received, sent, group=self.group)
        parts = received.split(len(sent))
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]).movedim(0, dim)

    def _sizes(self, rows: int, tokens: list[range]) -> tuple[list[int], list[int]]:
        """Return how many numbers go to each process before a product, and come from each. After it they go back."""
        own_tokens, own_channels = len(tokens[self.index]), len(self.channels[self.index])
        sent = [rows * own_tokens * len(channels) for channels in self.channels]
        return sent, [rows * own_channels * len(share) for share in tokens]

    def _to_channels(self, x: torch.Tensor, tokens: list[range]) -> torch.Tensor:
        """Return all tokens of this process's channels `(B, L, D / P)` from its tokens `(B, L / P, D)`."""
        sizes, wanted = self._sizes(len(x), tokens)
        sent = x.permute(2, 0, 1).flatten()  # (D, B, L/P), as `apply_channel_major` lays it
        received = AllToAll.apply(sent, sizes, wanted, self.group).split(wanted)
        parts = [part.view(-1, len(x), len(share)) for part, share in zip(received, tokens, strict=True)]
        return torch.cat(parts, dim=-1).permute(1, 2, 0)

    def _to_tokens(self, y: torch.Tensor, tokens: list[range]) -> torch.Tensor:
        """Return all channels of this process's tokens `(B, L / P, D)` from its channels `(B, L, D / P)`."""
        wanted, sizes = self._sizes(len(y), tokens)
        parts = y.permute(2, 0, 1).split([len(share) for share in tokens], dim=-1)  # (D/P, B, L/P) each
        received = AllToAll.apply(torch.cat([part.flatten() for part in parts]), sizes, wanted, self.group)
        return received.view(-1, len(y), len(tokens[self.index])).permute(1, 2, 0)

    def mix(self, operator: ToeplitzOperator, v: torch.Tensor, gate: Gate, context: LayerContext) -> torch.Tensor:
        """The gated product of an operator, which calls this if the pass has a layout."""
        x, layout = gate.inputs(v), context.layout
        if layout.tokens is None:
            own = self.channels[self.index]
            mixed = self._product(operator, x[..., slice_of(own)], gate.mask, context)
            mixed = self._gather(mixed, 2, [len(channels) for channels in self.channels])
        else:
            x = self._to_channels(x, layout.tokens)
            mixed = self._product(operator, x, layout.mask, context._replace(documents=layout.documents))
            mixed = self._to_tokens(mixed, layout.tokens)
        return gate.apply(mixed, operator.implementation)

    def _product(self, operator, x: torch.Tensor, mask: torch.Tensor | None, context: LayerContext) -> torch.Tensor:
        """Return the product with all tokens `x` `(B, L, D / P)`, which are zero at padding."""
        own, context = operator.local_operator(), LayerContext(cache=context.cache, documents=context.documents)
        if mask is None or context.documents is not None or own.shift_invariant:
            return own(x, context=context)
        first = first_real_token(mask)
        return roll(own(roll(x, -first)), first)

    def _is_divided(self, tokens: torch.Tensor, cache: Cache | None) -> bool:
        """Whether a text is long enough for each process to have some of its tokens, and does not continue another."""
        continued = isinstance(cache, Cache) and cache.get_seq_length() > 0
        whole = continued or tokens.shape[1] < self.count
        if whole and torch.is_grad_enabled():
            raise ValueError(
                f"A text must have at least {self.count} tokens and no cache of earlier ones to be divided over "
                f"{self.count} processes with gradients, got {tokens.shape[1]} tokens. Use torch.no_grad()."
            )
        return not whole

    def divide(self, tokens: torch.Tensor, context: LayerContext) -> tuple[torch.Tensor, LayerContext]:
        """The tokens of this process, of `(B, L)` ids or `(B, L, d)` embeddings, and their pass.

        All tokens, of which each process computes its channels, if they are few or continue others.
        """
        if not self._is_divided(tokens, context.cache):
            return tokens, context._replace(layout=Layout(self))
        if self.base.training and self.base.config.norm_type == "batchnorm":
            raise ValueError("`norm_type` must be a norm of single tokens to train on a divided text, got 'batchnorm'")
        mask, documents = check_attention_mask(context.mask, tokens, 0), context.documents
        positions, shares = positions_of(documents, mask, 0, tokens), self.tokens_of(tokens.shape[1])
        context = context._replace(documents=None, layout=Layout(self, shares, mask, documents))
        own = slice_of(shares[self.index])
        mask = None if mask is None else mask[:, own]
        return tokens[:, own], context._replace(mask=mask, positions=positions[:, own])

    def _before_head(self, model, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Give a language model the labels, or the positions that get logits, of the tokens of this process."""
        given = inspect.signature(model.forward).bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        self.finish, self.as_tuple = None, given.get("return_dict") is False
        tokens = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
        if not isinstance(tokens, torch.Tensor) or not self._is_divided(tokens, cache_of(given)):
            return (), given
        shares, ignored = self.tokens_of(tokens.shape[1]), given.get("ignore_index", -100)
        if (labels := self._shifted(given, tokens, ignored)) is None:
            return (), given | self._last_tokens(given.get("logits_to_keep", 0), shares, tokens.device)
        if given.get("num_items_in_batch") is None:
            given["num_items_in_batch"] = (labels != ignored).sum()
        name, own = "shift_labels" if model.config.causal else "labels", slice_of(shares[self.index])
        self.finish = lambda outputs: ("loss", total(outputs.loss, self.mesh))
        return (), given | {"labels": None, "return_dict": True, name: labels[:, own].contiguous()}

    def _after_head(self, model, args: tuple, outputs):
        """Complete the outputs of a language model whose inputs `_before_head` has divided."""
        if self.finish is None:
            return outputs
        name, value = self.finish(outputs)
        outputs[name] = value
        return outputs.to_tuple() if self.as_tuple else outputs

    def _last_tokens(self, kept: int, shares: list[range], device: torch.device) -> dict:
        """The arguments for logits of the last `kept` tokens in every process; with 0, of its own tokens."""
        if not isinstance(kept, int) or (kept and torch.is_grad_enabled()):
            kind = type(kept).__name__ + (" with gradients" if torch.is_grad_enabled() else "")
            raise ValueError(f"`logits_to_keep` must be an int without gradients for a divided text, got {kind}")
        if not kept:
            return {}
        sizes = [max(0, share.stop - max(share.start, shares[-1].stop - kept)) for share in shares]
        length = len(shares[self.index])
        self.finish = lambda outputs: ("logits", self._gather(outputs.logits, 1, sizes))
        positions = torch.arange(length - sizes[self.index], length, device=device)
        return {"return_dict": True, "logits_to_keep": positions}

    def _shifted(self, given: dict, tokens: torch.Tensor, ignored: int) -> torch.Tensor | None:
        """Return the labels of the whole sequence: of a causal model, the token after each position."""
        name = "labels" if given.get("shift_labels") is None else "shift_labels"
        if (labels := given.get(name)) is None:
            return None
        check_labels(labels, tokens, self.model.config.vocab_size, name, ignored)
        is_shifted = name == "shift_labels" or not self.model.config.causal
        return labels if is_shifted else pad(labels[:, 1:], (0, 1), value=ignored)
