"""A folder of static files that writes with a model in a browser, by transformers.js.

transformers.js (4.3.2) chooses a class and the names of its cache by `model_type`, from tables that have no `tnn`. Its
`falcon_h1` names up to four tensors of each layer i, and takes their shapes from the program:

    past_conv.i                     the first state of `decoding_step.States`: past inputs
    past_ssm.i                      the second one, the memory: the real part where there are two
    past_key_values.i.value         the third one, the imaginary part
    past_key_values.0.key           zeros `(1, 1, T, 1)` of T tokens: transformers.js counts tokens by it

The outputs have the names with `present` in place of `past` or `past_key_values`. All states begin as zeros.
"""

import json
import shutil
from pathlib import Path

import torch
from torch import nn
from torch.export import Dim

from .decoding_step import DecodingStep

NAMES = ("past_conv.{}", "past_ssm.{}", "past_key_values.{}.value")


class CountedStep(nn.Module):
    """A `DecodingStep` of one text that also counts its tokens."""

    def __init__(self, step: DecodingStep):
        super().__init__()
        self.step = step

    def forward(self, input_ids: torch.Tensor, counter: torch.Tensor, states: list) -> tuple:
        """The logits `(1, 1, V)` after the ids `(1, L)`, the counter `(1, 1, T + L, 1)` and the states."""
        logits, states = self.step(input_ids, states)
        counter = torch.cat([counter, torch.zeros_like(input_ids, dtype=counter.dtype)[:, None, :, None]], dim=2)
        return logits[:, None], counter, states


def save_for_browser(model: nn.Module, tokenizer, folder: str | Path):
    """Write `index.html`, a page that writes texts, and `model`, a folder for transformers.js.

    Args:
        model: a causal language model that `DecodingStep` takes, in float32.
        tokenizer: its tokenizer, a fast one.
        folder: made if there is none. `docs/guides/export.md` says which files of npm packages it needs besides.
    """
    step, target = DecodingStep(model), Path(folder) / "model"
    states = step.empty(1)
    names = [[name.format(i) for name, _ in zip(NAMES, layer, strict=False)] for i, layer in enumerate(states)]
    names = ["past_key_values.0.key", *(name for layer in names for name in layer)]
    outputs = [name.replace("past_key_values", "present").replace("past_", "present_") for name in names]
    (target / "onnx").mkdir(parents=True, exist_ok=True)
    torch.onnx.export(
        CountedStep(step).eval(),
        (torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 1, 2, 1), states),
        target / "onnx" / "model.onnx",
        dynamic_shapes=({1: Dim.DYNAMIC}, {2: Dim.DYNAMIC}, [[{} for _ in layer] for layer in states]),
        input_names=["input_ids", *names],
        output_names=["logits", *outputs],
        external_data=False,
        verbose=False,
    )
    tokenizer.save_pretrained(target)
    model.generation_config.save_pretrained(target)
    config = {"model_type": "falcon_h1", "num_hidden_layers": len(states), "vocab_size": model.config.vocab_size}
    config["transformers.js_config"] = {"dtype": "fp32", "device": "wasm"}
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    shutil.copyfile(Path(__file__).with_name("browser.html"), target.with_name("index.html"))
