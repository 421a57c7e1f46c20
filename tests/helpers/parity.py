"""The golden vectors: outputs of the released implementations.

`tests/parity/golden` holds a part of the reference data (see its README); `TNN_GOLDEN=folder` takes another folder
of the same form. Families and keys are explained there.
"""

import json
import os
from itertools import product
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from helpers.models import relative_error
from modeling_tnn import TnnConfig
from tnn_programs.original.names import our_layout, our_name

FOLDER = Path(os.environ.get("TNN_GOLDEN") or Path(__file__).parents[1] / "parity" / "golden")
CASES = {case["name"]: case for case in json.loads((FOLDER / "index.json").read_text())["cases"]}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}
# Gradients of language models and blocks are stored in float32, whatever they were computed in.
STORED_TOLERANCE = 2e-7


def named_cases(*families: str) -> list[tuple[str, str]]:
    """(case, run) names of the families, without the runs that record a defect of the released code."""
    return [
        (case["name"], run["tag"])
        for case in CASES.values()
        if case["family"] in families
        for run in case["runs"]
        if "known_defect" not in run
    ]


def over(cases: list[tuple[str, str]], *dtypes: torch.dtype):
    """Make a test of a `Case` one that goes through all of these, in each dtype."""

    def decorate(test):
        def runs(record_property):
            for (name, tag), dtype in product(cases, dtypes or TOLERANCE):
                try:
                    test(Case(name, tag, dtype, record_property))
                except Exception as error:
                    error.add_note(f"{name} {tag} {dtype}")
                    raise

        runs.__name__, runs.__doc__ = test.__name__, test.__doc__
        return runs

    return decorate


class Case:
    """One run of one case: its hyperparameters, parameters and tensors; `record(name, error)` takes its errors."""

    def __init__(self, name: str, tag: str, dtype: torch.dtype = torch.float64, record=lambda *_: None):
        self.name, self.tag, self.dtype, self.record = name, tag, dtype, record
        self.hparams = CASES[name]["hparams"]
        self.run = next(run for run in CASES[name]["runs"] if run["tag"] == tag)
        self.tensors = load_file(FOLDER / CASES[name]["file"])

    def parameters_from(self, name: str) -> "Case":
        """Take hyperparameters and parameters from another case, as `derived` cases do."""
        self.hparams = CASES[name]["hparams"]
        shared = load_file(FOLDER / CASES[name]["file"])
        self.tensors |= {key: value for key, value in shared.items() if key.startswith("param/")}
        return self

    def parameter(self, name: str) -> torch.Tensor:
        return self.tensors[f"param/{name}"].to(self.dtype)

    def get(self, key: str, tag: str | None = None) -> torch.Tensor | None:
        value = self.tensors.get(f"{tag or self.tag}/{key}")
        return value.to(self.dtype) if value is not None and key.startswith("in/") else value

    def input(self, key: str) -> torch.Tensor:
        """An input, `(b, h, n, dim)` flattened to `(b, n, h dim)`."""
        return merge_heads(self.get(f"in/{key}"))

    def ids(self, key: str = "input_ids") -> torch.Tensor:
        return self.tensors[f"{self.tag}/in/{key}"]

    def output(self, key: str = "y") -> torch.Tensor:
        return merge_heads(self.get(f"out64/{key}"))

    def load(self, module: torch.nn.Module) -> torch.nn.Module:
        """Copy the official parameters into `module`; every one of its parameters must be set or be a bias."""
        module.to(self.dtype).eval()
        parameters = dict(module.named_parameters())
        unset = set(parameters)
        with torch.no_grad():
            for key, value in self.tensors.items():
                official = key.removeprefix("param/")
                name = our_name(official)
                if key == official or name not in parameters:
                    continue
                parameters[name].copy_(our_layout(official, value))
                unset.discard(name)
            for name in unset:
                assert name.endswith("bias"), f"{self.name} has nothing for {name}"
                parameters[name].zero_()
        return module

    def fixed_decay(self) -> float | None:
        """The decay as it is stored, in float32."""
        gamma = next((v for k, v in self.tensors.items() if k.startswith("param/") and k.endswith("gamma")), None)
        return gamma.flatten()[0].item() if gamma is not None and self.hparams.get("use_decay") else None

    def check(self, actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 0.0, scale: float = 0.0):
        """Compare, relative to the largest entry of `expected` or to `scale`, and record under the family."""
        error = relative_error(actual, expected, scale)
        note = " (reference stored in float32)" if tolerance else ""
        self.record(f"parity {self.name.split('/')[0]} {str(self.dtype).removeprefix('torch.')}{note}", error)
        assert error < max(tolerance, TOLERANCE[self.dtype]), f"{self.name} {self.tag}: {error:.2e}"

    def check_gradients(self, module: torch.nn.Module, x: torch.Tensor | None = None):
        """Compare the gradients that the case stores; call after backward.

        In float32 relative to the largest gradient of the case: the smaller ones are differences of larger ones. In
        float64 so are those that are a millionth of it or less, whose last digits depend on the processor.
        """
        found = {name: parameter.grad for name, parameter in module.named_parameters()}
        found |= {} if x is None else {"x": x.grad}
        start = f"{self.tag}/grad64/"
        stored = {key.removeprefix(start): value for key, value in self.tensors.items() if key.startswith(start)}
        largest = max(value.abs().max().item() for value in stored.values())
        for key, expected in stored.items():
            official = key.removeprefix("param/")
            name = "x" if official == "x" else our_name(official)
            if name in found:
                expected = merge_heads(our_layout(official, expected))
                tolerance = STORED_TOLERANCE if expected.dtype == torch.float32 else 0.0
                least = largest if self.dtype == torch.float32 else 1e-6 * largest
                self.check(found[name], expected, tolerance, max(least, expected.abs().max().item()))

    def compare(self, module: torch.nn.Module, x: torch.Tensor, forward=None):
        """The outputs for `x`, and the gradients where the case has them."""
        x = x.clone().requires_grad_()
        y = (forward or module)(x)
        self.check(y, self.output())
        if self.get("in/w") is not None:
            (y * self.input("w")).sum().backward()
            self.check_gradients(module, x)


def merge_heads(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).flatten(2) if x is not None and x.dim() == 4 else x


def operator_config(case: Case, tno_type: str, **fields) -> TnnConfig:
    """The configuration of one operator with the channels of the case."""
    hparams = case.hparams
    return TnnConfig(
        tno_type=tno_type,
        hidden_size=hparams["h"] * hparams["dim"],
        gtu_expansion=1,
        causal=hparams["causal"],
        norm_type=hparams.get("norm_type", "simplermsnorm"),
        rpe_dim=hparams.get("rpe_dim", 8),
        rpe_layers=hparams.get("layers", 1),
        rpe_residual=hparams.get("residual", False),
        **fields,
    )


def block_config(case: Case, width: int, **fields) -> TnnConfig:
    """The configuration of a block or model; official option names are those of the reference data."""
    hparams = case.hparams
    tno_type = {"tno_fd": "fd", "skitno_inv_time": "ski"}.get(hparams.get("tno_type"), "rpe")
    resolution = 1 << (case.run["n"] - 1).bit_length()
    return TnnConfig(
        tno_type=tno_type,
        hidden_size=width,
        gtu_expansion=hparams.get("expand_ratio", 3),
        gtu_norm=hparams.get("use_norm", False),
        intermediate_size=hparams.get("intermediate_size", width),
        norm_type=hparams.get("norm_type", "simplermsnorm"),
        rpe_dim=hparams.get("rpe_embedding", 8),
        rpe_layers=hparams.get("rpe_layers", 1),
        rpe_residual=hparams.get("residual", False),
        decay=case.fixed_decay(),
        fd_resolution=max(resolution, 1),
        max_position_embeddings=max(case.run["n"], hparams.get("rank", 1)),
        ski_rank=hparams.get("rank", 2),
        ski_filter_size=hparams.get("nk", 1),
        ski_decay=torch.tensor(hparams.get("gamma", 0.99)).item(),
        **fields,
    )


def model_config(case: Case, side: str, **fields):
    hparams = case.hparams
    position = "pre" if hparams[f"{side}_normalize_before"] else "post"
    return block_config(
        case,
        hparams[f"{side}_embed_dim"],
        vocab_size=hparams["vocab_size"],
        num_hidden_layers=hparams[f"{side}_layers"],
        norm_position=position,
        scale_embedding=not hparams["no_scale_embedding"],
        embedding_norm=hparams["layernorm_embedding"],
        pad_token_id=hparams["pad_token_id"],
        **fields,
    )


def check_loss(case: Case, outputs, logits: torch.Tensor, labels: torch.Tensor, key: str) -> torch.Tensor:
    """The loss of the model, which transformers computes in float32, and the same one in the dtype of the case."""
    loss = cross_entropy(logits.flatten(0, -2), labels.flatten())
    case.check(loss[None], case.output(key))
    assert relative_error(outputs.loss, loss) < 2e-6
    return loss


def masked_lm_inputs(case: Case) -> dict[str, torch.Tensor]:
    return {"input_ids": case.ids(), "attention_mask": case.ids("attention_mask")}


def masked_lm_config(case: Case, **fields):
    return model_config(case, "encoder", causal=False, **fields)
