"""What only a GPU can prove. `make test-gpu` runs it there; without one it is skipped.

With TNN_GPU_TESTS=cpu the tests run on a CPU, without Triton and CUDA graphs: a test of the tests.
"""

import copy
import itertools
import json
import os

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig

from helpers.models import relative_error, seeded, tiny_config
from helpers.scripts import pretrain_options, run_script
from modeling_tnn import TnnForCausalLM
from modeling_tnn.compile.regions import compile_regions
from modeling_tnn.kernels import loss
from modeling_tnn.kernels.choice import choose
from modeling_tnn.toeplitz import causal_toeplitz_matmul, toeplitz_matmul
from modeling_tnn.toeplitz_fused import Gate
from tnn_programs.training.passes import CapturedStep, CudaRecorder

DEVICE = os.environ.get("TNN_GPU_TESTS", "cuda")
ON_GPU = DEVICE == "cuda"
pytestmark = pytest.mark.skipif(ON_GPU and not torch.cuda.is_available(), reason="needs a GPU (`make test-gpu`)")

# The largest relative error of values, in the norm; gradients may have twice as much.
ALLOWED = {"bfloat16": 4e-3, "float16": 1e-3, "float32": 1e-5, "float64": 1e-11}
CASES = ((1, 1), (17, 40), (63, 33), (2048, 1587), (4099, 200))  # length, and taps on each side
TEXT = torch.randint(5, 99, (3, 200), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def model_of(tno_type: str = "rpe", **fields) -> TnnForCausalLM:
    config = tiny_config(tno_type, True, hidden_dropout_prob=0.0, hidden_size=64, **{"decay": 0.9} | fields)
    return seeded(TnnForCausalLM, config).to(DEVICE)


def loss_in_bfloat16(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.autocast(DEVICE, torch.bfloat16):
        return model(ids, labels=ids).loss


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float):
    """All gradients together: those of parts that hardly matter are of rounding errors."""
    assert found.keys() == expected.keys()
    one, other = (torch.cat([grads[name].flatten().double() for name in expected]) for grads in (found, expected))
    assert relative_error(one, other) < tolerance


@pytest.fixture
def poisoned_memory():
    """Fresh memory is full of NaN: that of PyTorch's functions, and on a GPU what libraries get from its allocator."""
    if ON_GPU:
        torch.full((2**24,), torch.nan, device=DEVICE)
        torch.cuda.synchronize()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def with_gradients(implementation: str, causal: bool, v, kernel, u, mask, cotangent) -> list[torch.Tensor]:
    """The product, with a gate if there is `u`, and its gradients."""
    inputs = [x.detach().requires_grad_() for x in (v, kernel, u) if x is not None]
    gate = [] if u is None else [Gate(inputs[2], torch.nn.SiLU(), mask)]
    y = (causal_toeplitz_matmul if causal else toeplitz_matmul)(inputs[0], inputs[1], implementation, *gate)
    return [y.detach(), *torch.autograd.grad(y, inputs, cotangent)]


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("implementation", ["triton", "fused", "eager"])
def test_products(implementation, dtype, gated, poisoned_memory):
    """Values and gradients in both directions, with a gate and a mask or without, against float64."""
    # Activations and gate are rounded apart by `eager`.
    allowed, dtype = ALLOWED[dtype] * (1 + (implementation == "eager")), getattr(torch, dtype)
    for causal, (length, taps) in itertools.product((True, False), CASES):
        taps = taps if causal else 2 * taps - 1
        v, u, cotangent = (torch.randn(2, length, 5, dtype=torch.float64).to(dtype) for _ in range(3))
        kernel = torch.randn(5, taps, dtype=torch.float64) * 0.99 ** torch.arange(taps, dtype=torch.float64)
        kernel, mask = kernel.to(torch.promote_types(dtype, torch.float32)), torch.rand(2, length) < 0.9
        given = (v, kernel, u if gated else None, mask, cotangent)
        expected = with_gradients("eager", causal, *(x if x is None or x is mask else x.double() for x in given))
        found = with_gradients(implementation, causal, *(None if x is None else x.to(DEVICE) for x in given))
        errors = [relative_error(one.cpu().double(), other) for one, other in zip(found, expected, strict=True)]
        assert errors[0] <= allowed and max(errors[1:]) <= 2 * allowed, (causal, length, taps, errors)
        if ON_GPU:
            computes = "fused" if (implementation, dtype) == ("triton", torch.float64) else implementation
            assert choose(implementation, found[0], taps, kernel.dtype) == computes


@pytest.mark.parametrize("dtype, tolerance", [("bfloat16", 2e-2), ("float16", 3e-3), ("float32", 1e-4)])
@pytest.mark.parametrize("rows, words", [(1, 99), (37, 1001), (4100, 50265)])
def test_loss(dtype, tolerance, rows, words):
    dtype = getattr(torch, dtype)
    hidden = torch.randn(rows, 64, device=DEVICE).to(dtype).requires_grad_()
    weight = (0.2 * torch.randn(words, 64, device=DEVICE)).to(dtype).requires_grad_()
    labels = torch.randint(words, (rows,), device=DEVICE)
    labels[1::5] = -100
    found = loss.linear_cross_entropy(hidden, weight, None, labels)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = loss.eager_loss(*exact, labels=labels)
    assert relative_error(found.double(), expected) < tolerance
    pairs = zip(torch.autograd.grad(found, (hidden, weight)), torch.autograd.grad(expected, exact), strict=True)
    assert all(relative_error(actual.double(), gradient) < tolerance for actual, gradient in pairs)
    if ON_GPU:
        assert loss.find_kernel(hidden.device, dtype, words, -(-words // 128) * 128) is not None


@pytest.mark.parametrize("tno_type", ["rpe", "fd", "rtf"])
def test_a_compiled_step(tno_type):
    """Regions are compiled, as `tnn pretrain` does. With few taps no transform is left, also in the gradients."""
    model, ids = model_of(tno_type), TEXT[:, :128].to(DEVICE)
    expected = loss_in_bfloat16(model, ids)
    expected.backward()
    twin = copy.deepcopy(model)
    twin.zero_grad()
    compile_regions(twin, dynamic=False)
    loss_in_bfloat16(twin, ids).backward()
    twin.zero_grad()
    activities = [torch.profiler.ProfilerActivity.CUDA if ON_GPU else torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        found = loss_in_bfloat16(twin, ids)
        found.backward()
        if ON_GPU:
            torch.cuda.synchronize()
    assert relative_error(found.double(), expected.double()) < 1e-2
    assert_close(gradients(twin), gradients(model), 5e-2)
    like = torch.empty(1, 128, 1, device=DEVICE, dtype=torch.bfloat16)
    if tno_type == "rpe" and choose("auto", like, 128, torch.float32) == "triton":
        assert not [event.name for event in profile.events() if "fft" in event.name.lower()]


@pytest.mark.parametrize("rows, pads", [(1, 0), (3, 4)])
def test_compiled_decoding(rows, pads, monkeypatch):
    """Three texts give the tokens of the usual decoding. After the first one, no CUDA graph is recorded any more."""
    from torch._inductor.cudagraph_trees import CUDAGraphTreeManager  # seconds, in each process that collects tests

    recorded, record = [], CUDAGraphTreeManager.record_function

    def counting(self, *args):
        recorded.append(args)
        return record(self, *args)

    monkeypatch.setattr(CUDAGraphTreeManager, "record_function", counting)
    model, config = model_of().eval(), CompileConfig(fullgraph=True, mode="reduce-overhead" if ON_GPU else None)
    config._compile_all_devices, counts = True, []
    mask = torch.ones(rows, 50, dtype=torch.long, device=DEVICE)
    mask[0, :pads] = 0
    for start in (0, 50, 100):
        prompt = TEXT[:rows, start : start + 50].to(DEVICE)
        given = {"max_new_tokens": 140, "do_sample": False, "attention_mask": mask, "eos_token_id": None}
        static = model.generate(prompt, cache_implementation="static", compile_config=config, **given)
        assert torch.equal(static, model.generate(prompt, **given))
        counts.append(len(recorded))
    assert counters["stats"]["unique_graphs"] == 1 and counts == counts[:1] * 3
    if ON_GPU:
        assert 1 <= counts[0] <= 4


def test_a_captured_pass():
    """A CUDA graph of forward and backward pass, on other batches than it was recorded with."""
    model = model_of()
    eager, factor = copy.deepcopy(model), torch.ones((), device=DEVICE)

    def compute(batch, scale):
        found = loss_in_bfloat16(model, batch["input_ids"])
        (found * scale).backward()
        return found.detach()

    step = CapturedStep(compute, model, 1, CudaRecorder(torch.device("cuda", 0)) if ON_GPU else None)
    for ids in TEXT.to(DEVICE).view(3, 2, 100):
        model.zero_grad(set_to_none=not step.is_captured)
        found = step({"input_ids": ids}, factor).clone()
        eager.zero_grad()
        expected = loss_in_bfloat16(eager, ids)
        expected.backward()
        assert relative_error(found.double(), expected.detach().double()) < 1e-5
        assert_close(gradients(model), gradients(eager), 1e-3)
    assert step.is_captured == ON_GPU


def test_pretraining(tmp_path):
    """20 steps of the program, compiled and captured on a GPU, end with a lower loss."""
    options = [*pretrain_options(tmp_path, "clm"), "--mixed_precision", "bf16", "--output_dir", tmp_path / "out"]
    run_script("pretrain", *options, "--max_steps", 20)
    figures = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert figures["perplexity"] < 0.8 * figures["perplexity_before"], figures
