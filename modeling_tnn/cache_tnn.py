"""The cache of a causal TNN: one layer of decoding state, which plugs into transformers' caches.

B batch, D channels. A layer holds what the recurrence of its operator needs (see `recurrence.py`):

    register   the newest values of the sequence, (B, D, C): a shift register (see `register.py`)
    tensors    further states by name, each (B, D, ...)
    counters   integers that belong to them
    length     tokens seen
    prompt     the first inputs, as they came, until the text is continued: a pass that is not costs no state

    recurrence   register holds                   tensors                                    dtype
    filter       m - 1 inputs of the operator     future (B, D, H)                           float32
    companion    N values of the filtered input   -                                          float64
    modal        w + 32 inputs of the operator    memory (B, D, Q), complex; future          float32

and each register 64 values more, which `crop` can take back. A float64 model has float64 states; bfloat16 and float16
models have those of the table. Gradients do not flow through them.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING, Cache, CacheLayerMixin

from .gating import Activation, Gating, activate

LAYER_TYPE = "tnn_state"


class Prompt(NamedTuple):
    """What an operator was first called with, detached: the input of a later `Recurrence.start`.

    Attributes:
        v: `(B, L, D)`.
        mask: `(B, L)` or None, see `gating.Gating`.
        act: the activation that comes before the operator, or None.
    """

    v: torch.Tensor
    mask: torch.Tensor | None = None
    act: Activation | None = None

    def inputs(self) -> torch.Tensor:
        """The inputs of the operator, `(B, L, D)`."""
        return self.v if self.act is None else activate(self.v, self.act, self.mask)

    def select(self, choose: Callable[[torch.Tensor], torch.Tensor]) -> "Prompt":
        """With `choose` applied to its tensors."""
        return self._replace(v=choose(self.v), mask=None if self.mask is None else choose(self.mask))


class TnnCacheLayer(CacheLayerMixin):
    """Decoding state of one layer. Its size does not grow with the text (except for kernels without a bound)."""

    _layer_type = LAYER_TYPE
    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, **kwargs):
        super().__init__()
        self.reset()

    def reset(self):
        """Forget everything."""
        self.recurrence = self.register = self.prompt = None
        self.tensors: dict[str, torch.Tensor] = {}
        self.counters: dict[str, int] = {}
        self.length = 0
        self.is_initialized = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None):
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states, operator, gating: Gating | None = None):
        """The outputs of `operator` for `key_states` `(B, L, D)`, which continue the sequence seen so far.

        Args:
            value_states: not used; here because caches call it so.
            gating: as for the operator itself.

        Returns:
            The outputs `(B, L, D)`, and None.

        Raises:
            ValueError: the state belongs to another model or another batch size.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states)
            self.recurrence = operator.recurrence()
            self.prompt = Prompt(key_states.detach(), *(() if gating is None else (gating.mask, gating.act)))
            # The state is detached, these are not: training has its gradients.
            outputs = operator.mix(key_states, gating)
        else:
            self._check(key_states, operator)
            outputs = self._continue(key_states if gating is None else gating.open(key_states))
            outputs = outputs if gating is None else gating.close(outputs, operator.product)
        self.length += key_states.shape[1]
        return outputs, None

    @torch.no_grad()
    def _continue(self, v: torch.Tensor) -> torch.Tensor:
        if self.prompt is not None:
            self.recurrence.start(self, self.recurrence.channel_major(self.prompt.inputs()))
            self.prompt = None
        return self.recurrence.advance(self, v)

    def _check(self, v: torch.Tensor, operator):
        if self.recurrence.operator is not operator:
            raise ValueError("past_key_values belongs to another model: start with an empty cache.")
        rows = len(self.register.buffer if self.prompt is None else self.prompt.v)
        if rows != v.shape[0]:
            raise ValueError(
                f"past_key_values holds {rows} sequences, the input {v.shape[0]}: "
                "use batch_repeat_interleave or batch_select_indices on the cache, or an empty one."
            )

    def crop(self, tokens_to_remove: int):
        """Forget the newest tokens; `tokens_to_remove` is their number, negated (0 changes nothing).

        Raises:
            ValueError: more tokens than the register can take back, or a positive number.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the negated number of tokens to remove, not {tokens_to_remove}.")
        if tokens_to_remove == 0 or not self.is_initialized:
            return
        count, removable = -tokens_to_remove, self.removable()
        if count > removable:
            raise ValueError(
                f"Cannot remove {count} tokens: the state can take back {removable} of {self.length}. "
                "Run the text to keep through an empty cache instead."
            )
        if count == self.length:
            self.reset()
            return
        if self.prompt is None:
            self.recurrence.take_back(self, count)
        else:
            self.prompt = self.prompt.select(lambda tensor: tensor[:, :-count])
        self.length -= count

    def removable(self) -> int:
        """How many of the newest tokens `crop` can remove."""
        started = self.is_initialized and self.prompt is None
        return self.recurrence.removable(self) if started else self.length

    def memory_per_sequence(self) -> int:
        """Bytes of state that one sequence takes."""
        held = [*self.tensors.values()] + ([] if self.register is None else [self.register.buffer])
        held += [] if self.prompt is None else [self.prompt.v]
        return sum(tensor.numel() * tensor.element_size() // max(1, tensor.shape[0]) for tensor in held)

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def reorder_cache(self, beam_idx: torch.LongTensor):
        self._select(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int):
        self._select(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor):
        self._select(lambda tensor: tensor[indices])

    def offload(self):
        self._select(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self):
        self._select(lambda tensor: tensor.to(self.device, non_blocking=True))

    def _select(self, choose: Callable[[torch.Tensor], torch.Tensor]):
        if self.prompt is not None:
            self.prompt = self.prompt.select(choose)
        if self.register is not None:
            self.register.select(choose)
        self.tensors = {name: choose(tensor) for name, tensor in self.tensors.items()}


# Static caches take the same layer: its size is fixed anyway.
STATIC_LAYER_TYPE_MAPPING[LAYER_TYPE] = TnnCacheLayer


def memory_per_sequence(past_key_values: Cache) -> int:
    """Bytes of decoding state that one sequence takes in all layers."""
    return sum(layer.memory_per_sequence() for layer in past_key_values.layers)


def check_cache(past_key_values: Cache):
    """Refuse a cache of another kind of model.

    Raises:
        ValueError: its layers cannot hold the state of a TNN.
    """
    # Not isinstance: code loaded from the Hub has a class of its own.
    if not past_key_values.layers or not all(hasattr(layer, "recurrence") for layer in past_key_values.layers):
        raise ValueError(
            f"{type(past_key_values).__name__} cannot hold the state of a TNN: pass what this model returned, or "
            "DynamicCache(config=model.config)."
        )
