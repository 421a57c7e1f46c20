"""Several tokens of all rows in one launch: the loop of `compile/token_loop.py` for texts that end apart.

The host reads the tokens afterwards. Those behind the end of a text are left out; its row runs on meanwhile.
"""

from dataclasses import fields

import torch
from torch import nn
from torch.nn.functional import pad
from transformers.cache_utils import Cache
from transformers.generation.stopping_criteria import MaxLengthCriteria

from ..cache_tnn import is_toeplitz
from ..compile.static_cache import FIXED_BASE, places_of, writable
from ..compile.token_loop import TokenLoop, uses_graphs
from ..recurrence import DecodingState
from .request import Request
from .sampling import Draw


class RowLoop(TokenLoop):
    """The `tokens` of one launch, at most `most` of each row after its newest one, which the cache has not read."""

    @writable()
    def __init__(self, model: nn.Module, past: Cache, requests: list[Request], mask: torch.Tensor | None, most: int):
        self.length, self.mask = int(past.get_seq_length()) + 1, mask
        longest = self.length + max(one.max_length - one.length for one in requests if not one.is_done)
        super().__init__(model, past, (), [MaxLengthCriteria(longest)], model.generation_config, streamer=None)
        put, is_graph = self.places.put, uses_graphs(model.device)
        self.token = put("token", torch.cat([one.ids[:, -1:] for one in requests]))  # (B, 1)
        self.written = put("written", self.token.new_zeros(FIXED_BASE, len(requests)))
        self.draw = draw = Draw(requests, most, model.config.vocab_size, model.device, all_rows=is_graph)
        if is_graph and draw.kind[0]:
            draw.settings, draw.noise = put("settings", draw.settings), put("noise", draw.noise)
        self.draws = draw.kind
        self.advance(most)

    def take(self, processors, logits: torch.Tensor, step: int):
        """As for `TokenLoop`."""
        self.written[step].copy_(self.draw.choose(logits.float(), step))
        self.token.copy_(self.written[step, :, None].clamp(min=0))

    def settle(self, count: int):
        """Read the tokens of each step, -1 where probabilities are not finite: here the host waits for the device."""
        self.tokens = self.written[:count].tolist()


@writable()
def move_rows(model: nn.Module, old: Cache, new: Cache) -> Cache:
    """`new`, an empty dynamic or static cache, with the rows of `old`. Static keys have places of the model."""
    new.tnn_fields, put = old.tnn_fields, places_of(model).put
    for i, (source, target) in enumerate(zip(old.layers, new.layers, strict=True)):
        for name, state in source.states.items() if is_toeplitz(source) else ():
            if source.is_compileable:
                state.leave()
            target.lazy_initialization(state.history.buffer)
            kept = {one.name: getattr(state, one.name) for one in fields(DecodingState)}
            target.states[name] = target.state_class(**kept)
        if not is_toeplitz(source):
            held, most = int(source.get_seq_length()), getattr(target, "max_cache_len", 0)
            target.lazy_initialization(source.keys, source.values)
            for name in ("keys", "values"):
                one = getattr(source, name)[..., :held, :].clone()
                setattr(target, name, put(f"{name} {i}", pad(one, (0, 0, 0, most - held))) if most else one)
            if most:
                target.cumulative_length = put(f"count {i}", target.cumulative_length + held)
    return new
