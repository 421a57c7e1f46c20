"""Compare models: the loss by the length of the rows that they read, bytes of state, and equal numbers of parameters.

B rows, L length, T tokens, V vocabulary, P tokens of a pass.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, Cache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.utils import logging

from ..cache_tnn import CACHE, is_toeplitz
from ..recurrence import DecodingState, DivergenceError, Prompt

logger = logging.get_logger(__name__)
# Fields that give a model its number of parameters, of which the first that it has counts, and how near it must come.
INNER, TOLERANCE = ("intermediate_size", "state_size"), 0.05


def evaluate_by_length(
    model: PreTrainedModel, batches: Iterable, lengths: Iterable[int], tokens_per_pass: int = 4096
) -> dict[int, float]:
    """The mean loss of a causal model, in nats a token, by the length of the rows that it reads.

    Each length scores the same tokens, all of a text but the first, given those before them in their row.

    Args:
        model: any causal model of transformers; it is put into evaluation mode.
        batches: ids `(B, T)` of texts, or dicts with `input_ids` and an `attention_mask`, 0 at padding.
        lengths: numbers of tokens from 2 up. One that is longer than a text reads the text at once.
        tokens_per_pass: longer rows are read in parts with a cache.

    Raises:
        ValueError: a length is below 2, no text has two tokens, or the model is bidirectional.
    """
    lengths = list(lengths)
    if not getattr(model.config, "causal", True):
        raise ValueError("`model` must be causal, got a bidirectional one")
    if min(lengths, default=0) < 2:
        raise ValueError(f"`lengths` must be at least 2, got {lengths}")
    total, count = dict.fromkeys(lengths, 0.0), 0
    model.eval()
    for batch in batches:
        given = {"input_ids": batch} if isinstance(batch, torch.Tensor) else batch
        ids, mask = given["input_ids"], given.get("attention_mask")
        for text in ids if mask is None else (row[real.ne(0)] for row, real in zip(ids, mask, strict=True)):
            if len(text) > 1:
                count += len(text) - 1
                for length in lengths:
                    nats = score_tokens(model, text, min(length, len(text)), None, tokens_per_pass)
                    total[length] += nats.sum().item()
    if not count:
        raise ValueError("`batches` must have a text of at least two tokens, got none")
    return {length: loss / count for length, loss in total.items()}


def plot_by_length(figures: Mapping[str, Mapping[int, float]], axes):
    """Draw a line for each name of `figures` in Matplotlib's axes: results of `evaluate_by_length`, or others."""
    for name, points in figures.items():
        axes.plot(*zip(*sorted(points.items()), strict=True), marker="o", label=name)
    lengths = sorted({length for points in figures.values() for length in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, map(str, lengths), rotation=45)
    axes.set_xlabel("length of the text read at once, in tokens")


def state_bytes_by_length(model: PreTrainedModel, lengths: Iterable[int]) -> list[dict[str, int]]:
    """The bytes of decoding state of one sequence after as many tokens, beside a transformer's.

    Returns:
        for each length the keys "length", "state" (of `model`, a causal TNN) and "transformer": keys and values of a
        model without grouped heads that has the same depth, width and dtype.
    """
    of_token = 2 * model.config.num_hidden_layers * model.config.hidden_size * model.dtype.itemsize
    found = {length: sum(state_bytes(model, length).values()) for length in lengths}
    return [{"length": length, "state": size, "transformer": length * of_token} for length, size in found.items()]


def memory_per_sequence(cache: Cache) -> int:
    """The bytes of decoding state of one sequence in all layers of a cache."""
    return sum(bytes_per_sequence(layer) for layer in cache.layers)


@torch.no_grad()
def state_bytes(model: PreTrainedModel, after: int) -> dict[str, int]:
    """The bytes of decoding state of one sequence when a token follows a prompt of `after` tokens.

    Returns:
        for each layer its operators ("layers.0.tno"), or its attention ("layers.3.attention").
    """
    config, found = model.config, {}
    if not isinstance(after, int) or after < 1:
        raise ValueError(f"`after` must be a whole number from 1 up, got {after!r}")
    for name, module in model.base_model.named_modules():
        if hasattr(module, "state_name"):
            width = module.channels * module.group_size
            v = torch.zeros((), dtype=model.dtype, device=model.device).expand(1, after, width)
            state = DecodingState(module.recurrence(), Prompt(v), length=after, group_size=module.group_size)
            state.decode(module, v[:, :1])
            found[name.replace(".mixer", "")] = bytes_of_state(state)
        elif name.endswith(".attention"):
            kept = after + 1 if module.sliding_window is None else min(after + 1, module.sliding_window - 1)
            found[name] = 2 * kept * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    return found


def bytes_per_sequence(layer: CacheLayerMixin) -> int:
    """The bytes of one sequence in a layer: its states, or its keys and values."""
    states = layer.states.values() if is_toeplitz(layer) else ()
    return bytes_of_row(layer.keys, layer.values) + sum(map(bytes_of_state, states))


def bytes_of_state(state: DecodingState) -> int:
    """The bytes of one sequence in a state."""
    if state.prompt is not None:
        return bytes_of_row(state.prompt.v)
    return state.group_size * bytes_of_row(state.history.buffer, *state.tensors.values())


def bytes_of_row(*held: torch.Tensor | None) -> int:
    """The bytes of one row of these tensors."""
    return sum(one.numel() * one.element_size() // max(1, one.shape[0]) for one in held if one is not None)


def count_parameters(config: PreTrainedConfig, build: Callable = AutoModelForCausalLM.from_config) -> int:
    """The number of parameters of the model that `build` makes of a configuration, which gets no memory."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(copy.deepcopy(config)).parameters())


def match_parameters(
    config: PreTrainedConfig, peer: PreTrainedConfig, build: Callable = AutoModelForCausalLM.from_config
) -> PreTrainedConfig:
    """A copy of a configuration whose model has as many parameters as that of `peer`, by its inner width.

    The width of GLU or MLP (`intermediate_size`) changes, or the `state_size` of a model without one, such as Mamba-2.

    `build` makes a model of a configuration. A ValueError if no width comes within 5%.
    """
    config, wanted = copy.deepcopy(config), count_parameters(peer, build)
    field = next((name for name in INNER if hasattr(config, name)), None)

    def count(size: int) -> int:
        setattr(config, field, size)
        return count_parameters(config, build)

    found = count_parameters(config, build)
    if field is not None and (slope := count(2) - (least := count(1))):
        found = count(max(1, round(1 + (wanted - least) / slope)))
    if abs(found / wanted - 1) > TOLERANCE:
        raise ValueError(f"`config` must allow {wanted:,} parameters within {TOLERANCE:.0%}, got {found:,}")
    return config


def score_rows(model, rows: torch.Tensor, tokens_per_pass: int) -> torch.Tensor:
    """The loss in nats of each token of `rows` `(B, L)` except the first, given those before it, `(B, L-1)`.

    Long rows are read in parts with a cache, to save memory. Where the state of a recurrence diverges, they are read
    at once, with a warning: up to the trained length, the convolution has a result for any poles.
    """
    try:
        return _score_parts(model, rows, max(1, tokens_per_pass // len(rows)))
    except DivergenceError as error:
        logger.warning_once(f"Rows of {rows.shape[1]} tokens are read at once, which takes more memory. {error}")
        return _score_parts(model, rows, rows.shape[1])


def _score_parts(model, rows: torch.Tensor, part: int) -> torch.Tensor:
    cached = part < rows.shape[1]
    nats, cache = [], {}
    for start in range(0, rows.shape[1], part):
        output = model(rows[:, start : start + part], use_cache=cached, **cache)
        if cached:
            name = CACHE if CACHE in output else "cache_params"  # of Mamba-2 in 5.17
            cache = {name: output[name]}
        targets = rows[:, start + 1 : start + part + 1]  # (B, P), one less in the last part
        logits = output.logits[:, : targets.shape[1]].float()  # (B, P, V)
        nats.append(cross_entropy(logits.transpose(1, 2), targets, reduction="none"))
    return torch.cat(nats, dim=1)


def rows_of(values: torch.Tensor, length: int, stride: int, tokens_per_pass: int) -> Iterator[torch.Tensor]:
    """Batches `(B, L)` of rows of values `(T,)` that begin every `stride` tokens, as many as fit into a pass.

    The rest of the text is a shorter row. It comes last, as a separate batch, so there is no padding.
    """
    rows = values.unfold(0, length, stride) if length <= len(values) else values.new_empty(0, length)  # (R, L)
    if len(rows):
        yield from rows.split(max(1, tokens_per_pass // length))
    if (len(rows) - 1) * stride + length < len(values):
        yield values[None, len(rows) * stride :]


@torch.inference_mode()
def score_tokens(model, ids: torch.Tensor, length: int, stride: int | None, tokens_per_pass: int) -> torch.Tensor:
    """The loss in nats of each token of ids `(T,)` except the first, `(T-1,)` in float64 on the CPU.

    `length` is at most T. Without a stride, rows overlap by one token: the last token of a row is the first of the
    next one, so that every token is scored.
    """
    stride, scored = length - 1 if stride is None else stride, []
    for index, rows in enumerate(rows_of(ids, length, stride, tokens_per_pass)):
        nats = score_rows(model, rows.to(model.device), tokens_per_pass).cpu().double()  # (B, L-1)
        kept = nats[:, length - 1 - stride :]  # the first tokens of a row are the last ones of the row before
        scored += [nats[0], kept[1:].flatten()] if index == 0 else [kept.flatten()]
    return torch.cat(scored)
