"""Sequence parallelism: one long text over several processes, for training and for the prompt of a generation.

P processes, B batch, L length, D channels of a GTU. All that acts on one token at a time is computed where the token
lies, on L / P tokens. A Toeplitz product acts on one channel at a time, so before it the processes exchange

    (L / P tokens, D channels)  ->  (L tokens, D / P channels)

and after it they exchange back. Each process makes the kernels of its channels alone. In an exchange each process
sends B L D / P numbers, its own share included. A layer has two, and two more in the backward pass: 4 B L D / P.

Every process gets the whole text, as ids, which are small, and takes its tokens itself. So masks, documents of packed
rows, positions and the shift of labels are those of the whole text.
"""

import functools
import inspect
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..cache_tnn import cache_of, takes_cache
from ..configuration_tnn import HYENA, has_attention
from ..inputs import (
    check_attention_mask,
    check_keywords,
    check_labels,
    check_tokens,
    first_real_token,
    require_tensor,
    roll,
    token_positions,
)
from ..packing import Documents, documents_of
from ..tno import NO_PASS, Pass
from ..toeplitz_fused import NO_GATE, Gate
from .channels import OF_THE_WHOLE, Part, filters_of_parameters, restricted

HEADS = ("TnnModel", "TnnForCausalLM", "TnnForMaskedLM")


def share_of(count: int, parts: int, index: int) -> range:
    """The share `index` of `count` things in `parts` consecutive shares, whose sizes differ by one at most."""
    size, longer = divmod(count, parts)
    start = index * size + min(index, longer)
    return range(start, start + size + (index < longer))


class Layout(NamedTuple):
    """How a text lies on the processes.

    Attributes:
        tokens: the tokens of each process.
        mask: `(B, L)` of booleans, False at padding, or None.
        documents: the documents of packed rows, or None.
    """

    tokens: list[range]
    mask: torch.Tensor | None = None
    documents: Documents | None = None

    def mix(self, operator: nn.Module, x: torch.Tensor, cache: Cache | None) -> torch.Tensor:
        """The product of an operator with all tokens `x` `(B, L, D / P)`, which are zero at padding."""
        if self.documents is None:
            return mix_rows(operator, x, self.mask, cache)
        return operator(x, passed=Pass(documents=self.documents))

    def positions(self, tokens: torch.Tensor) -> torch.Tensor:
        """The positions of all tokens in their documents, `(B, L)` or `(1, L)`."""
        if self.documents is None:
            return token_positions(self.mask, 0, tokens)
        return self.documents.positions()


def mix_rows(operator: nn.Module, x: torch.Tensor, mask: torch.Tensor | None, cache: Cache | None) -> torch.Tensor:
    """The product of an operator with rows of one text each."""
    if mask is None or operator.shift_invariant:
        return operator(x, passed=Pass(cache=cache))
    first = first_real_token(mask)
    return roll(operator(roll(x, -first)), first)


class Shares(NamedTuple):
    """Who has what in an exchange.

    Attributes:
        group: the processes.
        index: the number of this process among them.
        tokens, channels: the shares of all processes.
    """

    group: dist.ProcessGroup
    index: int
    tokens: list[range]
    channels: list[range]


class Exchange(torch.autograd.Function):
    """From `(B, L / P, D)` to `(B, L, D / P)`, or back. Each is the derivative of the other."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, shares: Shares, to_channels: bool) -> torch.Tensor:
        ctx.shares, ctx.to_channels = shares, to_channels
        return (to_own_channels if to_channels else to_own_tokens)(x, shares)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return Exchange.apply(gradient, ctx.shares, not ctx.to_channels), None, None


def to_own_channels(x: torch.Tensor, shares: Shares) -> torch.Tensor:
    """All tokens `(B, L, D / P)` of the channels of this process, from all channels `(B, L / P, D)` of its tokens."""
    own, rows = len(shares.channels[shares.index]), len(x)
    sent = x.permute(2, 0, 1).contiguous()  # (D, B, L/P), as `apply_channel_major` lays it
    sizes = [len(channels) * rows * x.shape[1] for channels in shares.channels]
    received = exchanged(sent, sizes, [own * rows * len(tokens) for tokens in shares.tokens], shares.group)
    pieces = [part.view(own, rows, len(tokens)) for part, tokens in zip(received, shares.tokens, strict=True)]
    return torch.cat(pieces, dim=-1).permute(1, 2, 0)


def to_own_tokens(y: torch.Tensor, shares: Shares) -> torch.Tensor:
    """All channels `(B, L / P, D)` of the tokens of this process, from all tokens `(B, L, D / P)` of its channels."""
    own, rows = len(shares.tokens[shares.index]), len(y)
    channel_major = y.permute(2, 0, 1)  # (D/P, B, L)
    sent = torch.cat([channel_major[..., tokens.start : tokens.stop].reshape(-1) for tokens in shares.tokens])
    sizes = [y.shape[2] * rows * len(tokens) for tokens in shares.tokens]
    received = exchanged(sent, sizes, [len(channels) * rows * own for channels in shares.channels], shares.group)
    return torch.cat(received).view(-1, rows, own).permute(1, 2, 0)


def exchanged(sent: torch.Tensor, sizes: list[int], wanted: list[int], group) -> Sequence[torch.Tensor]:
    """What each process has sent to this one, in vectors of the `wanted` sizes."""
    received = sent.new_empty(sum(wanted))
    dist.all_to_all_single(received, sent.flatten(), wanted, sizes, group=group)
    return received.split(wanted)


class SumOfLosses(torch.autograd.Function):
    """The sum of the parts of a loss. Each process differentiates its own part."""

    @staticmethod
    def forward(ctx, loss: torch.Tensor, group) -> torch.Tensor:
        total = loss.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return gradient, None


class SequenceParallel:
    """A context in which the processes of a mesh compute one model on one text together.

        mesh = init_device_mesh("cuda", (8,))
        with SequenceParallel(model, mesh) as parallel:
            loss = model(input_ids=ids, labels=ids).loss  # of the whole text, in every process
            loss.backward()
            parallel.add_gradients()
            optimizer.step()

    Every process has the whole model, and gets the same whole text with its mask, labels and boundaries of documents.
    The loss is that of the whole text. Logits and hidden states are those of the process's tokens, see `gather`; with
    `logits_to_keep=k` every process gets those of the last k tokens of the text.

    A prompt that is divided leaves a cache of D / P channels in each process. All processes go on decoding together,
    inside the context: each token is computed by every process, and its mixing by all of them. `generate` does so.
    Without gradients, texts of fewer tokens than processes and texts that are continued are computed in this way too.

    Args:
        model: a `TnnModel`, `TnnForCausalLM` or `TnnForMaskedLM`.
        mesh: the processes, in one dimension.

    Raises:
        TypeError: the model is of another class.
        ValueError: the mesh has several dimensions, the model is divided already, has attention, or its operator does
            not say which parameters belong to channels, or has fewer channels than there are processes.
    """

    def __init__(self, model: PreTrainedModel, mesh: DeviceMesh):
        if not any(cls.__name__ in HEADS for cls in type(model).__mro__):
            raise TypeError(f"`model` must be one of {', '.join(HEADS)}, got {type(model).__name__}")
        if mesh.ndim != 1:
            raise ValueError(f"`mesh` must have one dimension, such as mesh['sp'], got {mesh.ndim}")
        self.model, self.base = model, model.base_model
        self.kept = 0  # of how many last tokens the logits are wanted
        self.group, self.index, self.count = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        if has_attention(self.base.config):
            raise ValueError(
                "`layer_types` must be 'toeplitz' for all layers of a divided text, because attention would see one "
                f"part of it alone, got {self.base.config.layer_types}. Divide the model instead (tp_plan='auto')."
            )
        mixer = self.base.config.toeplitz_mixer
        if mixer == HYENA:
            raise ValueError(
                "`toeplitz_mixer` must be 'gtu' or 's4' for a divided text, because short convolutions read tokens of "
                f"other processes, got {mixer!r}. Use data parallelism or shards (FSDP) instead."
            )
        self.operators = [layer.mixer.tno for layer in self.base.layers]
        width = self.operators[0].channels
        self.channels = [share_of(width, self.count, index) for index in range(self.count)]
        if not self.channels[-1]:
            raise ValueError(f"The GTU must have channels for each of {self.count} processes, got {width}")
        for operator in self.operators:
            filters_of_parameters(operator)
            if "forward" in vars(operator):
                raise ValueError("`model` must not be divided over processes already, got one that is")

    def __enter__(self) -> "SequenceParallel":
        for operator in self.operators:
            part = Part(operator, functools.partial(restricted, operator, self.channels[self.index]))
            operator.on_this_process, operator.forward = part, functools.partial(self._mix, operator)
            operator.shift_invariant = True  # rows are aligned where all of their tokens are
        self._replace(self.base, self._forward_base)
        if self.model is not self.base:
            self._replace(self.model, self._forward_head)
        return self

    def __exit__(self, *exception):
        for operator in self.operators:
            for name in OF_THE_WHOLE:
                vars(operator).pop(name, None)
        for module in {self.base, self.model}:
            del module.forward

    def tokens_of(self, length: int) -> list[range]:
        """The tokens of each process, for a text of `length`."""
        return [share_of(length, self.count, index) for index in range(self.count)]

    def add_gradients(self):
        """Add the gradients of all processes. To be called once, before a step of the optimizer.

        Engines that average gradients over these processes (DDP, FSDP) do it themselves, if the loss is multiplied by
        the number of processes.
        """
        parameters = [one for one in self.model.parameters() if one.requires_grad]
        found = torch.tensor(
            [one.grad is not None for one in parameters], device=parameters[0].device, dtype=torch.int32
        )
        dist.all_reduce(found, group=self.group)
        for parameter, somewhere in zip(parameters, found.tolist(), strict=True):
            if somewhere:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(parameter.grad, group=self.group)

    @torch.no_grad()
    def gather(self, x: torch.Tensor, length: int) -> torch.Tensor:
        """The entries of all tokens, `(B, length, ...)`, from those of this process, without gradients."""
        return self._gather(x, 1, [len(tokens) for tokens in self.tokens_of(length)])

    def _gather(self, x: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
        """The pieces of all processes, which have these `sizes` along `dim`, one after the other."""
        own = x.movedim(dim, 0)
        sent = own.new_zeros(max(sizes), *own.shape[1:])
        sent[: len(own)] = own
        received = sent.new_empty(self.count * len(sent), *own.shape[1:])
        dist.all_gather_into_tensor(received, sent, group=self.group)
        parts = received.split(len(sent))
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]).movedim(0, dim)

    def _replace(self, module: nn.Module, forward):
        original = module.forward
        module.forward = functools.wraps(original)(functools.partial(forward, original))

    def _mix(self, operator, v: torch.Tensor, gate: Gate = NO_GATE, passed: Pass = NO_PASS):
        """The forward pass of an operator."""
        x, part, layout = gate.inputs(v), operator.on_this_process(), passed.layout
        if layout is None:
            own = self.channels[self.index]
            mixed = mix_rows(part, x[..., own.start : own.stop], gate.mask, passed.cache)
            mixed = self._gather(mixed, 2, [len(channels) for channels in self.channels])
        else:
            shares = Shares(self.group, self.index, layout.tokens, self.channels)
            mixed = layout.mix(part, Exchange.apply(x, shares, True), passed.cache)
            mixed = Exchange.apply(mixed, shares, False)
        return gate.apply(mixed, operator.implementation)

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

    @takes_cache
    def _forward_base(
        self,
        original,
        input_ids=None,
        attention_mask=None,
        cache=None,
        inputs_embeds=None,
        use_cache=None,
        position_ids=None,
        **kwargs,
    ):
        """`TnnModel.forward` of a whole text; the outputs are those of the tokens of this process."""
        check_tokens(input_ids, inputs_embeds, self.base.embed_tokens)
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        if not self._is_divided(tokens, cache):
            kwargs |= {"inputs_embeds": inputs_embeds, "use_cache": use_cache, "position_ids": position_ids}
            return original(input_ids, attention_mask, cache, **kwargs)
        check_keywords(kwargs)
        layout = self._layout(tokens, attention_mask, position_ids, **kwargs)
        if layout.documents is not None:
            if self.base.config.causal and (use_cache or cache is not None):
                raise ValueError("A row must be one document when a cache is used, got several")
            use_cache = False
        own = slice(layout.tokens[self.index].start, layout.tokens[self.index].stop)
        ids, embeds, mask = (None if x is None else x[:, own] for x in (input_ids, inputs_embeds, layout.mask))
        as_tuple = kwargs.get("return_dict") is False
        kwargs |= {"position_ids": layout.positions(tokens)[:, own], "inputs_embeds": embeds, "return_dict": True}
        kwargs |= {"use_cache": use_cache, "layout": layout}
        outputs = self.base._forward(ids, mask, cache, **kwargs)
        if self.kept:
            outputs.last_hidden_state = self._last_tokens(outputs.last_hidden_state, layout.tokens)
        return outputs.to_tuple() if as_tuple else outputs

    def _layout(self, tokens, attention_mask, position_ids, seq_idx=None, cu_seq_lens_q=None, **kwargs) -> Layout:
        if self.base.training and self.base.config.norm_type == "batchnorm":
            raise ValueError("`norm_type` must be a norm of single tokens to train on a divided text, got 'batchnorm'")
        mask = attention_mask
        if mask is not None:
            require_tensor("attention_mask", mask, "(B, L)")
            mask = check_attention_mask(mask, tokens, 0)
        documents = documents_of(tokens, attention_mask, position_ids, seq_idx, cu_seq_lens_q)
        return Layout(self.tokens_of(tokens.shape[1]), mask, documents)

    def _last_tokens(self, x: torch.Tensor, tokens: list[range]) -> torch.Tensor:
        """The last `kept` tokens of the text `(B, kept, d)`, from the tokens of this process."""
        first = tokens[-1].stop - self.kept
        sizes = [max(0, one.stop - max(one.start, first)) for one in tokens]
        return self._gather(x[:, x.shape[1] - sizes[self.index] :], 1, sizes)

    def _forward_head(self, original, *args, **kwargs):
        """The forward pass of a language model: the loss of the whole text, the logits of this process's tokens."""
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        tokens = given.get("input_ids") if given.get("inputs_embeds") is None else given.get("inputs_embeds")
        if not isinstance(tokens, torch.Tensor) or not self._is_divided(tokens, cache_of(given)):
            return original(**given)
        labels, kept = self._shifted(given, tokens), given.get("logits_to_keep", 0)
        if labels is None:
            return self._of_last_tokens(kept, original, given)
        name, ignored = "shift_labels" if self.model.config.causal else "labels", given.get("ignore_index", -100)
        if given.get("num_items_in_batch") is None:
            given["num_items_in_batch"] = (labels != ignored).sum()
        own, as_tuple = self.tokens_of(tokens.shape[1])[self.index], given.get("return_dict") is False
        given |= {"labels": None, name: labels[:, own.start : own.stop].contiguous(), "return_dict": True}
        outputs = original(**given)
        outputs.loss = SumOfLosses.apply(outputs.loss, self.group)
        return outputs.to_tuple() if as_tuple else outputs

    def _of_last_tokens(self, kept: int, original, given: dict):
        """The outputs with the logits of the last `kept` tokens of the text, in every process (0: of its tokens)."""
        if not isinstance(kept, int) or (kept and torch.is_grad_enabled()):
            kind = type(kept).__name__ + (" with gradients" if torch.is_grad_enabled() else "")
            raise ValueError(f"`logits_to_keep` must be an int without gradients for a divided text, got {kind}")
        self.kept = kept
        try:
            return original(**given)
        finally:
            self.kept = 0

    def _shifted(self, given: dict, tokens: torch.Tensor) -> torch.Tensor | None:
        """The labels of the whole text: of a causal model, the token after each position."""
        ignored = given.get("ignore_index", -100)
        for name in ("labels", "shift_labels"):
            if given.get(name) is not None:
                check_labels(given[name], tokens, self.model.config.vocab_size, name, ignored)
        labels, shifted = given.get("labels"), given.get("shift_labels")
        if not self.model.config.causal or shifted is not None or labels is None:
            return labels if shifted is None else shifted
        return pad(labels[:, 1:], (0, 1), value=ignored)
