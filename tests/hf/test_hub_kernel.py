"""The Triton product as a kernel of the Hub: the folder, the layer that it replaces, and models with it.

`make test-triton` runs all of these, in Triton's interpreter. `make test` runs those that need neither `triton` nor
`kernels`.
"""

import ast
import copy
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import MethodType

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from helpers import processes
from helpers.hub_client import WITHOUT_THE_PACKAGE
from helpers.models import VARIANTS, random, relative_error, seeded, tiny_config
from helpers.scripts import run_script
from modeling_tnn import TnnForCausalLM, TnnForMaskedLM, numerics
from modeling_tnn.gating import NO_GATE, Gate
from modeling_tnn.stacking import kernels_of_layers
from modeling_tnn.tno import ToeplitzProduct

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
needs_kernels = pytest.mark.skipif(
    not (find_spec("kernels") and find_spec("triton")) or (DEVICE == "cuda" and not torch.cuda.is_available()),
    reason="needs kernels, and triton with TRITON_INTERPRET=1 (see `make test-triton`) or a GPU",
)


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("kernel") / "tnn-toeplitz"
    run_script("hub_kernel", "--output_dir", folder, "--backends", "cuda", "cpu")
    return folder


def model_of(tno_type: str, causal: bool, **fields):
    cls = TnnForCausalLM if causal else TnnForMaskedLM
    fields = {"hidden_dropout_prob": 0.0, "hidden_size": 8} | fields
    return seeded(cls, tiny_config(tno_type, causal, **fields))


def test_the_folder_needs_pytorch_and_triton_alone(repository):
    for backend in ("cuda", "cpu"):
        files = list((repository / "build" / f"torch-{backend}").glob("*.py"))
        names = {file.stem for file in files}
        assert {"__init__", "toeplitz_hub", "toeplitz_triton"} <= names
        for node in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
            if isinstance(node, ast.Import):
                roots = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                of_the_folder = {node.module} if node.module else {alias.name for alias in node.names}
                roots = of_the_folder - names if node.level else {node.module.split(".")[0]}
            else:
                continue
            assert roots <= {"torch", "triton", *sys.stdlib_module_names}, roots


def test_the_layer_has_no_state():
    product = ToeplitzProduct()
    assert not product.state_dict() and not list(product.children()) and not product.is_replaced()
    assert not any(".product" in name for name in model_of("rpe", True).state_dict())


def replace(model, forward):
    """As `kernelize` does."""
    for layer in model.base_model.layers:
        product = layer.gtu.tno.product
        product.forward = MethodType(forward, product)


@pytest.mark.parametrize(("tno_type", "causal"), VARIANTS)
def test_every_product_of_taps_is_of_the_layer(tno_type, causal, monkeypatch):
    """One per operator and pass, two for SKI. FD and RTF give their taps instead of a response."""
    called = []

    def forward(self, v, kernel, first, implementation, gate):
        called.append(kernel.shape[1])
        return type(self).forward(self, v, kernel, first, implementation, gate)

    monkeypatch.setattr("modeling_tnn.toeplitz_choice.refused_by_triton", lambda *_: None)
    model, ids = model_of(tno_type, causal), torch.arange(140).view(2, 70) % 99
    expected = model(ids).logits
    replace(model, ToeplitzProduct.forward)  # what `kernelize` does if it has no kernel for a device
    assert torch.equal(model(ids).logits, expected)
    replace(model, forward)
    assert relative_error(model(ids).logits, expected) < 1e-5
    assert len(called) == model.config.num_hidden_layers * (2 if tno_type == "ski" else 1)
    twin = copy.deepcopy(model).base_model.layers[0].gtu.tno.product
    assert twin.forward.__self__ is twin


def test_kernels_are_still_made_together(monkeypatch):
    """On an accelerator: the foreign code convolves, and makes no kernel."""
    monkeypatch.setattr(numerics, "HOST_DEVICES", ())
    model = model_of("rpe", True)
    replace(model, lambda self, *arguments: None)
    kernels = kernels_of_layers(model.base_model.layers, torch.ones(1, 9, 8))
    assert all(isinstance(kernel, torch.Tensor) for kernel in kernels)


@pytest.fixture
def kernelized(repository, monkeypatch):
    """A function that puts the kernel into a model, in inference unless it is in training.

    transformers marks no layer with a release of `kernels` that it does not know, so `kernels` itself marks it.
    """
    import kernels

    for name in ("kernel_layer_name", "kernel_condition"):
        monkeypatch.setattr(ToeplitzProduct, name, None, raising=False)
    kernels.use_kernel_forward_from_hub("ToeplitzProduct")(ToeplitzProduct)
    mapping = {"ToeplitzProduct": {DEVICE: kernels.LocalLayerRepository(repository, layer_name="ToeplitzProduct")}}

    def kernelize(module, training: bool = False):
        mode = kernels.Mode.TRAINING if training else kernels.Mode.INFERENCE
        with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
            return kernels.kernelize(module, mode=mode, device=DEVICE, use_fallback=False)

    return kernelize


@needs_kernels
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(("tno_type", "causal"), [("rpe", True), ("rpe", False), ("fd", False), ("ski", False)])
def test_models(tno_type, causal, training, kernelized):
    """Logits, and in training the gradients of all parameters, with padding."""
    ids, mask = torch.arange(140, device=DEVICE).view(2, 70) % 99, torch.ones(2, 70, dtype=torch.long, device=DEVICE)
    mask[1, 50:] = 0
    model, found = model_of(tno_type, causal).to(DEVICE).train(training), []
    for change in (lambda model, training: model, kernelized):
        logits = change(model, training)(ids, attention_mask=mask).logits
        wanted = list(model.parameters()) if training else []
        found.append([logits, *(torch.autograd.grad(logits[mask.bool()].square().mean(), wanted) if wanted else ())])
    assert "tnn_toeplitz" in model.base_model.layers[0].gtu.tno.product.forward.__module__
    for actual, expected in zip(*found, strict=True):
        assert relative_error(actual, expected, scale=max(1e-2, expected.abs().max().item())) < 1e-5
    assert not torch.equal(found[0][0], found[1][0])


@needs_kernels
@pytest.mark.parametrize("act", [nn.SiLU(), nn.Tanh()], ids=["in the kernel", "around it"])
def test_the_product(act, kernelized):
    product = kernelized(ToeplitzProduct())
    v, u, kernel = (random(*shape).float().to(DEVICE) for shape in ((2, 33, 3), (2, 33, 3), (3, 9)))
    for gate in (NO_GATE, Gate(u, act, torch.arange(33, device=DEVICE).expand(2, 33) < 20)):
        arguments = (v, kernel, 4, "fused", gate)
        y, expected = product(*arguments), ToeplitzProduct.forward(product, *arguments)
        assert relative_error(y, expected) < 1e-6 and not torch.equal(y, expected)


@needs_kernels
@pytest.mark.parametrize("case", ["many taps", "float64", "empty", "functorch"])
def test_what_the_kernel_does_not_take(case, kernelized):
    """The class of the model computes it."""
    product, dtype = kernelized(ToeplitzProduct()), torch.float64 if case == "float64" else torch.float32
    v = random(0 if case == "empty" else 2, 33, 3).to(DEVICE, dtype).detach()
    kernel = random(3, 4097 if case == "many taps" else 9).to(DEVICE, dtype).detach()
    found = []
    for forward in (product, ToeplitzProduct().to(DEVICE)):
        function = lambda v, forward=forward: forward(v, kernel, 0, "fused", NO_GATE)  # noqa: E731 - for torch.func
        found.append(torch.func.vjp(function, v)[1](v)[0] if case == "functorch" else function(v))
    assert torch.equal(*found)


LOAD = """
import torch, kernels, pathlib, transformers
from transformers.utils import import_utils
# transformers takes the releases of `kernels` that it was tested with. Its code works with others.
inspect.unwrap(import_utils.is_kernels_available).__defaults__ = ("0", "99")
from safetensors.torch import save_file
folder, repository, device = sys.argv[1:]
model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).to(device)
product, ids = model.model.layers[0].gtu.tno.product, torch.arange(74, device=device).view(2, 37)
assert type(product).__module__.startswith("transformers_modules.") and type(product).kernel_layer_name
found = {"plain": model(ids).logits}
local = kernels.LocalLayerRepository(pathlib.Path(repository), layer_name="ToeplitzProduct")
kernels.register_kernel_mapping({"ToeplitzProduct": {device: local}})
model.set_use_kernels(True)
assert product.forward.__module__.startswith("tnn_toeplitz"), product.forward
found["inference"] = model(ids).logits
found["training"] = model.train()(ids).logits
found["compiled"] = torch.compile(model, backend="aot_eager", fullgraph=True)(ids).logits
save_file({name: logits.detach().cpu() for name, logits in found.items()}, "found.safetensors")
"""


@needs_kernels
def test_a_checkpoint_without_the_package(repository, tmp_path):
    """Its layer is marked by transformers, and `use_kernels` puts the kernel in."""
    seeded(TnnForCausalLM, tiny_config(hidden_size=8, hidden_dropout_prob=0.0)).save_pretrained(tmp_path / "model")
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    code = "import inspect\n" + WITHOUT_THE_PACKAGE + LOAD
    command = [sys.executable, "-c", code, str(tmp_path / "model"), str(repository), DEVICE]
    processes.run(command, check=True, cwd=tmp_path, env=environment)
    found = load_file(tmp_path / "found.safetensors")
    for name in ("inference", "training", "compiled"):
        assert relative_error(found[name], found["plain"]) < 1e-5
    assert not torch.equal(found["inference"], found["plain"])
