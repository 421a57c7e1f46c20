"""The cost of a training step (forward, loss, backward) of a language model and its peers, by length.

The name of an operator is a TNN with it; `fused` and `eager` have `rpe`. `hybrid` has attention in every fourth layer,
from the second, `attention` in all, with rotary positions; the rest is that of a TNN. `matmul` and the words after a
name are those of `step` in `gpu_models.py`.
"""

from collections.abc import Callable
from functools import partial

import torch
from suites import gpu_models
from suites.device import peak_on_device
from suites.peers import build_model
from suites.products import rows_of

from tnn_programs.benchmarks.measure import autocast, markdown, measure

FORMATS = {"length": "", "way": "", "milliseconds": ".0f", "tokens_per_second": ".0f", "rpe_over_this": ".2f"}
FORMATS |= {"released_over_this": ".2f", "gpt2_over_this": ".2f", "matmul_over_this": ".2f", "peak_mebibytes": ".0f"}
BASES = ("released", "rpe", "gpt2", "matmul")


def blocks_only(way: str, args, ids: torch.Tensor) -> Callable[[], None]:
    """A pass through the blocks, without embeddings, head and loss."""
    name, *words = way.split()
    if name == "matmul":
        model = build_model("fused", args, 512)
        layers = [layer for layer in gpu_models.linear_layers(model) if layer is not model.lm_head]
        return gpu_models.matmul_step(layers, ids.numel(), torch.bfloat16 if words else torch.float32)
    model = build_model(name, args, ids.shape[1])
    embeddings = torch.randn(*ids.shape, args.hidden_size, device=args.device, requires_grad=True)
    gradient = torch.randn_like(embeddings)
    model.config.use_cache = False

    def run():
        with autocast(args, "bf16" in words):
            hidden = model.base_model(inputs_embeds=embeddings).last_hidden_state
        hidden.backward(gradient.to(hidden.dtype))

    return run


def run(args) -> list[dict]:
    """One row for each length and variant. A batch has `tokens` tokens."""
    rows, step = [], blocks_only if args.blocks_only else gpu_models.step
    for length in args.lengths:
        ids = torch.randint(args.vocab_size, (max(1, args.tokens // length), length), device=args.device)
        ways = {way: step(way, args, ids) for way in args.ways}
        found = rows_of(measure(ways, args), ids.numel(), BASES, length=length)
        rows += [row | peak_on_device(ways[row["way"]], args) for row in found]
    return rows


table = partial(markdown, formats=FORMATS)
