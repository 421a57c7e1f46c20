"""The Triton kernels compile for GPUs that are not here: memory, registers, and instructions of the tensor cores.

`make test-slow` runs these. Nothing is executed: Triton brings NVIDIA's assembler with it.
"""

import argparse
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="needs the package triton: `make test-slow` installs it")
if triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET=1 leaves nothing to compile", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402 - it needs triton
from triton.compiler import ASTSource  # noqa: E402 - as above

from helpers.scripts import ROOT  # noqa: E402 - as above
from modeling_tnn.kernels import loss_triton  # noqa: E402 - as above
from modeling_tnn.kernels import triton as kernels  # noqa: E402 - as above

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Bytes of shared memory that a block may have: A100, H100, B200. Then the instruction of the tensor cores.
DEVICES = {80: (163 * 1024, "mma.sync"), 90: (227 * 1024, "wgmma.mma_async"), 100: (227 * 1024, "tcgen05.mma")}
REGISTERS = 255
# What the consumer cards of these generations have. All sizes fit them but the last ones, which they do not take.
SMALLEST_SHARED = 99 * 1024
FORMS = {"forward": {"ACT": "silu", "BACKWARD": False}, "backward": {"ACT": "silu", "BACKWARD": True, "mixed": None}}
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
POINTWISE = {
    "inputs": dict.fromkeys(("h", "u", "y", "g", "u_gradient")) | {"v_n": 1},
    "gradients": {"v_n": 1, "h_d": 1, "u_n": 1},
}


def compiled(function, constants: dict, dtype: str, device: int, **options):
    """The kernel for a device, as a launch with lengths that are multiples of 16 compiles it."""
    types = dict.fromkeys(("v", "taps", "out", "side", "mixed", "g", "x", "h", "u", "y", "u_gradient"), f"*{dtype}")
    types |= {"mask": "*u8", "sums": "*fp32", "kernel": "*fp32", "z": f"*{dtype}", "labels": "*i64", "losses": "*fp32"}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in function.arg_names}
    whole = {*types, "length", "channels", "numbers", "v_d", "x_d", "taps_d", "side_d", "g_d", "h_n", "u_d", "columns"}
    attributes = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(signature) if name in whole - constants.keys()
    }
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", device, 32), options=options)


def usage(kernel, folder: Path) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack: that is where registers spill to."""
    (folder / "kernel.cubin").write_bytes(kernel.asm["cubin"])
    command = [TOOLS / "cuobjdump", "--dump-resource-usage", folder / "kernel.cubin"]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"\b(REG|STACK):(\d+)", report)}


def check_tiles(kernel, constants: dict, dtype: str, device: int, sizes: tuple[int, int], folder: Path, shared: int):
    """A kernel of tiles fits the memory, spills no registers, copies 16 bytes at a time, and uses the tensor cores."""
    constants = constants | {"PRECISION": "tf32x3" if dtype == "fp32" else "tf32", "ROWS": kernels.ROWS}
    built = compiled(kernel, constants, dtype, device, num_warps=sizes[0], num_stages=sizes[1])
    used = usage(built, folder)
    assert built.metadata.shared <= shared and used["REG"] <= REGISTERS and used["STACK"] == 0, used
    assert "cp.async.cg.shared.global" in built.asm["ptx"] and DEVICES[device][1] in built.asm["ptx"]


# All sizes of the table, the last ones for the generations that take them.
PRODUCTS = [
    (device, dtype, columns)
    for device in DEVICES
    for dtype in ("bf16", "fp32")
    for columns in kernels.PRODUCT_SIZES[BYTES[dtype]]
    if device // 10 in kernels.LARGE or columns < max(kernels.PRODUCT_SIZES[BYTES[dtype]])
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("device", "dtype", "columns"), PRODUCTS)
def test_products(device, dtype, columns, form, tmp_path):
    sizes = kernels.PRODUCT_SIZES[BYTES[dtype]]
    shared = DEVICES[device][0] if columns == max(sizes) else SMALLEST_SHARED
    constants = FORMS[form] | {"COLUMNS": columns}
    check_tiles(kernels.product_kernel, constants, dtype, device, sizes[columns], tmp_path, shared)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", BYTES)
def test_gradients_of_taps(dtype, device, tmp_path):
    columns, window, *sizes = kernels.TAP_SIZES[BYTES[dtype]]
    constants = {"COLUMNS": columns, "WINDOW": window}
    check_tiles(kernels.tap_gradient_kernel, constants, dtype, device, sizes, tmp_path, SMALLEST_SHARED)


ONES = ("length", "channels", "numbers", "v_d", "x_d", "g_d", "side_d", "h_d")


def test_sizes_of_one(tmp_path):
    """A launch makes constants of integers that are 1. The kernel of padding spills nothing."""
    given = FORMS["forward"] | {"PRECISION": "tf32", "ROWS": 64, "COLUMNS": 32, "WINDOW": 128, "CHANNELS": 32}
    given |= {"NUMBERS": 64} | dict.fromkeys(ONES, 1)
    for kernel in (kernels.product_kernel, kernels.tap_gradient_kernel, kernels.pointwise_kernel):
        compiled(kernel, {name: value for name, value in given.items() if name in kernel.arg_names}, "bf16", 90)
    used = usage(compiled(kernels.padding_kernel, {"BLOCK": kernels.BLOCK, "kernel_k": 1}, "bf16", 90), tmp_path)
    assert used["STACK"] == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("act", ["silu", "gelu"])
@pytest.mark.parametrize("form", POINTWISE)
def test_pointwise_kernel(form, act, device, tmp_path):
    constants = POINTWISE[form] | {"ACT": act, "CHANNELS": kernels.CHANNELS, "NUMBERS": kernels.NUMBERS}
    built = compiled(kernels.pointwise_kernel, constants, "bf16", device)
    used = usage(built, tmp_path)
    assert used["REG"] <= REGISTERS and used["STACK"] == 0
    assert not re.search(r"(ld|st)\.global\.b16", built.asm["ptx"])  # 16 bytes at a time, of a gradient by tokens too


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("write", [True, False])
def test_loss(write, dtype, device, tmp_path):
    """A program has all 1,024 threads that a block may have, no registers spill, and each load has 16 bytes."""
    kernel, sizes = loss_triton.loss_kernel, {"BLOCK": loss_triton.BLOCK, "VECTOR": loss_triton.VECTOR}
    built = compiled(kernel, sizes | {"WRITE": write}, dtype, device, num_warps=32)
    used = usage(built, tmp_path)
    assert used["STACK"] == 0 and used["REG"] <= 2**16 // 1024
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", built.asm["ptx"])) == (1 + write) * (1 + (dtype == "fp32"))


@pytest.fixture(scope="module")
def counts():
    sys.path.append(str(ROOT / "docs" / "research"))
    counts = import_module("kernel_counts")
    counts.add_guard()
    return counts


# Models -> kernels of a layer in a decoding step, its matrix products among them, and those beside the layers.
STEPS = {"rpe": (8, 4, 2), "rtf": (8, 4, 2), "hyena": (9, 4, 2), "gpt2": (10, 4, 5)}


@pytest.mark.parametrize("name", ["rpe", "rtf", "gpt2"])
def test_kernels_of_a_step(name, counts):
    """Everything between two products is one kernel: a norm, the state with its gate, or an activation."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 99, "device": "cpu", "decay": 0.99}
    kernels, (layer, products, beside) = counts.kernels_of_step(name, 2, argparse.Namespace(**sizes)), STEPS[name]
    assert sum("mm" in kernel for kernel in kernels) == 2 * products + 1
    assert len(kernels) == 2 * layer + beside, kernels
