"""Count the kernels of a compiled decoding step on a GPU that need not be here.

`torch.compile` records the step on the CPU, on the branches of an accelerator. Then inductor compiles its graph for an
H100, with tensors that have the device and no memory. Each line of its code that starts a kernel of Triton, a product
or attention counts as one, although cuBLAS may start a second one for a product. Nothing is executed.

Example:
    python docs/research/kernel_counts.py --models rpe gpt2
"""

import argparse
import ctypes
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from suites.peers import BUILDERS, build_model, tnn
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import compile_fx, config, graph, scheduler
from torch._inductor.fx_passes import joint_graph, post_grad
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils import _triton
from torch.utils._pytree import tree_map
from transformers import CompileConfig

from modeling_tnn import numerics

MODELS = ("rpe", "fd", "explicit", "s4d", "modal", "rtf", "hyena", "s4", "hybrid", "gpt2")
BUILDERS |= {
    "hyena": partial(tnn, toeplitz_mixer="hyena"),
    "s4": partial(tnn, toeplitz_mixer="s4", tno_type="s4d", gtu_expansion=1),
}
GPU, H100 = torch.device("cuda", 0), DeviceProperties("cuda", 0, 132, 90, 9, 65536, 2048, 1024, 32)
PROPERTIES = SimpleNamespace(**H100._asdict(), minor=0, name="H100", gcnArchName="", total_memory=80 * 2**30)
TRITON = {"has_triton": True, "triton_hash_with_backend": ""}
INTERFACE = {"is_bf16_supported": True, "raise_if_triton_unavailable": None, "current_device": 0}
INTERFACE |= {"get_device_capability": (9, 0), "get_compute_capability": 90, "get_device_properties": PROPERTIES}
LAUNCH = re.compile(
    r"^\s+(?:\w+ = )?(triton_\w+(?=\.run\()|extern_kernels\.\w+|torch\.ops\.[\w.]+|aten\.[\w.]+)", re.M
)
# PyTorch for CPUs knows no such device: indexing a tensor asks for a guard of it. This one does nothing.
GUARD = """#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace { C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>) }"""


class Recorded(Exception):
    """The code of a graph is known, and nothing of it is to run."""


@contextmanager
def until_recorded() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # compilers put their own around ours
        if "Recorded" not in str(error):
            raise


def add_guard():
    """Compile the guard and register it, unless PyTorch has its own."""
    if torch.backends.cuda.is_built():
        return
    root, target = Path(torch.__file__).parent, Path(tempfile.mkdtemp()) / "guard.so"
    command = [
        "g++",
        "-std=c++20",
        "-shared",
        "-fPIC",
        "-x",
        "c++",
        "-",
        f"-I{root}/include",
        f"-L{root}/lib",
        "-lc10",
    ]
    subprocess.run([*command, "-o", target], input=GUARD.encode(), check=True)  # noqa: S603 - our own
    ctypes.CDLL(str(target))


def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """The kernel that PyTorch takes on a GPU, which a CPU would not choose: that for masks, or flash attention."""
    rest = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    if attn_mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, **rest)[0]
    mask = torch.where(attn_mask, 0.0, -torch.inf).to(query.dtype) if attn_mask.dtype == torch.bool else attn_mask
    mask = mask.expand(*query.shape[:-1], key.shape[-2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, mask, False, **rest)[0]


def on_gpu(mode: FakeTensorMode, x):
    if not isinstance(x, torch.Tensor):
        return x
    meta = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return FakeTensor(mode, meta, GPU)


def as_on_gpu(note) -> Iterator:
    """What has inductor compile for the GPU, and gives its code to `note` instead of loading it."""
    for passes in (joint_graph, post_grad):  # they would trace their patterns on the GPU
        passes.lazy_init(torch.device("cpu"))
        yield mock.patch.object(passes, "lazy_init", lambda *_: None)
    for owner, facts in {CudaInterface: INTERFACE, torch.cuda: INTERFACE, _triton: TRITON, scheduler: TRITON}.items():
        for name, fact in facts.items():
            yield mock.patch.object(owner, name, staticmethod(lambda *_, fact=fact, **__: fact), create=True)
    yield mock.patch.object(DeviceProperties, "create", lambda *_: H100)
    yield mock.patch.object(graph.GraphLowering, "compile_to_module", note)
    # Both would measure or compute on the device.
    yield config.patch(shape_padding=False, joint_graph_constant_folding=False, force_disable_caches=True)


def launches(module: torch.fx.GraphModule, inputs: list) -> list[str]:
    """The kernels that a recorded graph starts on a GPU, in their order."""
    for node in module.graph.nodes:
        node.target = attention if node.target is torch._C._nn.scaled_dot_product_attention else node.target
        node.args, node.kwargs = tree_map(
            lambda x: GPU if isinstance(x, torch.device) else x, (node.args, node.kwargs)
        )
    module.recompile()
    found, mode = [], FakeTensorMode()

    def note(lowering):
        code = lowering.codegen()[0].value
        found.extend(LAUNCH.findall(code[code.index("def call(") : code.index("def get_args(")]))
        raise Recorded

    with ExitStack() as stack, until_recorded():
        for patch in (*as_on_gpu(note), mode):
            stack.enter_context(patch)
        compile_fx.compile_fx(module, [on_gpu(mode, x) for x in inputs])
    return found


def kernels_of_step(name: str, batch_size: int, args) -> list[str]:
    """Those of a token with a static cache in bfloat16, as `generate` compiles it."""
    torch._dynamo.reset()
    model, found = build_model(name, args, 32).to(torch.bfloat16).eval(), []

    def compiler(module, inputs):
        found.extend(launches(module, inputs))
        raise Recorded

    compiling = CompileConfig(fullgraph=True, backend=compiler, mode=None)
    compiling._compile_all_devices = True
    ids = torch.full((batch_size, 8), 5)
    with mock.patch.object(numerics, "HOST_DEVICES", ()), until_recorded():
        model.generate(ids, max_new_tokens=24, cache_implementation="static", compile_config=compiling)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--batch_sizes", nargs="+", type=int, default=[1, 64])
    args = parser.parse_args()
    sizes = {"hidden_size": 512, "num_hidden_layers": 6, "vocab_size": 50265, "device": "cpu", "decay": 0.99}
    add_guard()
    for name in args.models:
        for batch_size in args.batch_sizes:
            kernels = kernels_of_step(name, batch_size, SimpleNamespace(**sizes))
            products = sum("mm" in kernel for kernel in kernels)
            print(f"{name}, batch {batch_size}: {len(kernels)} kernels, {products} of them products", flush=True)


if __name__ == "__main__":
    main()
