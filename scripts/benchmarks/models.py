"""The costs of language models: a training step, a new token after a context, and the state that decoding keeps."""

import statistics
from collections.abc import Callable

import torch
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from modeling_tnn.cache_tnn import CACHE
from modeling_tnn.kernels.loss import linear_cross_entropy
from modeling_tnn.tools.comparing import bytes_per_sequence
from tnn_programs.benchmarks.measure import autocast, measure, ratio

TURN, TURNS = 32, 4
CHUNK = 512  # tokens of the context that are read at once
OF_SMALL = {"model": "", "context": ",", "ms_per_step": ".1f", "ms_per_token": ".2f", "state_bytes": ","}
LINEAR = "linear_attention"


def costs(models: dict[str, PreTrainedModel], args) -> list[dict]:
    """One row for each of these models and each context; ratios are over the first model."""
    rows, first = [], next(iter(models))
    batch = max(1, args.tokens // args.block_size)
    training = measure({name: training_step(model, batch, args) for name, model in models.items()}, args)
    for context in args.contexts:
        decoders = {name: Decoder(model.eval(), context, args) for name, model in models.items()}
        states = {name: decoder.state_bytes() for name, decoder in decoders.items()}
        decoding = decoding_times(decoders, args)
        for name, model in models.items():
            rows.append({
                "model": name,
                "context": context,
                "parameters": model.num_parameters(),
                "training_tokens_per_second": batch * args.block_size / statistics.median(training[name]),
                "ms_per_step": 1000 * statistics.median(training[name]),
                "training_time": ratio(training[name], training[first]),
                "ms_per_token": 1000 * statistics.median(decoding[name]),
                "decoding_time": ratio(decoding[name], decoding[first]),
                "state_mebibytes": states[name] / 2**20,
                "state_bytes": states[name],
            })  # fmt: skip
    return rows


def training_step(model: PreTrainedModel, batch: int, args) -> Callable[[], None]:
    ids = torch.randint(model.config.vocab_size, (batch, args.block_size), device=args.device)  # (B, L)

    def run():
        model.train()
        with autocast(args, args.bf16):
            loss = training_loss(model, ids)
        loss.backward()
        model.zero_grad()

    return run


def training_loss(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """The mean loss on ids `(B, L)`, for every model by the same function, without the logits of the whole batch."""
    hidden, head = model.base_model(ids, use_cache=False).last_hidden_state, model.get_output_embeddings()
    labels = ids[:, 1:].flatten()
    return linear_cross_entropy(hidden[:, :-1].flatten(0, 1), head.weight, head.bias, labels) / labels.numel()


class Decoder:
    """A model that has read a context and a token, which frees what only a prompt needs, and decodes further ones."""

    def __init__(self, model: PreTrainedModel, context: int, args):
        self.model, self.inputs = model, {"use_cache": True, "logits_to_keep": 1}
        prompt = torch.randint(model.config.vocab_size, (args.batch_size, context), device=args.device)
        with torch.inference_mode():
            for chunk in prompt.split(CHUNK, dim=1):
                self.read(chunk)
            self.read(self.token)

    def read(self, ids: torch.Tensor):
        """Read ids `(B, L)`, and choose the most probable next ones."""
        config = self.model.config
        if hasattr(config, "num_attention_heads") and set(getattr(config, "layer_types", None) or ()) == {LINEAR}:
            # They have no positions, but transformers 5.24 would ask a layer of attention for them and for masks.
            self.inputs["position_ids"] = torch.arange(ids.shape[1], device=ids.device)[None]
            self.inputs["attention_mask"] = dict.fromkeys((LINEAR, "full_attention"))
        outputs = self.model(ids, **self.inputs)
        self.argument = CACHE if CACHE in outputs else "cache_params"
        self.inputs[self.argument] = outputs[self.argument]
        self.token = outputs.logits[:, -1:].argmax(dim=2)  # (B, 1)

    def decode(self):
        with torch.inference_mode():
            for _ in range(TURN):
                self.read(self.token)

    def state_bytes(self) -> int:
        """Of one sequence."""
        return sum(layer_bytes(layer, len(self.token)) for layer in self.inputs[self.argument].layers)


def layer_bytes(layer: CacheLayerMixin, rows: int) -> int:
    """The bytes of one of `rows` sequences in a layer of any model's cache."""
    if hasattr(layer, "keys"):
        return bytes_per_sequence(layer)
    tensors = [leaf for leaf in tree_leaves(vars(layer)) if isinstance(leaf, torch.Tensor)]  # states of a Mamba
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) // rows


def decoding_times(decoders: dict[str, Decoder], args) -> dict[str, list[float]]:
    """Seconds per token of each repeat."""
    times = measure({name: decoder.decode for name, decoder in decoders.items()}, args, TURNS)
    starts = range(0, args.repeats * TURNS, TURNS)
    return {name: [sum(one[i : i + TURNS]) / (TURN * TURNS) for i in starts] for name, one in times.items()}
