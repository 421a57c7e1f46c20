"""The Triton kernels compile for GPUs that are not here: memory, registers, and instructions of the tensor cores.

`make test-triton` runs these. Nothing is executed: Triton brings NVIDIA's assembler with it.
"""

import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="needs the package triton: `make test-triton` installs it")
if triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET=1 leaves nothing to compile", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402 - it needs triton
from triton.compiler import ASTSource  # noqa: E402 - as above

from modeling_tnn import loss_triton  # noqa: E402 - as above
from modeling_tnn import toeplitz_triton as kernels  # noqa: E402 - as above

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Bytes of shared memory that a block may have: A100, H100, B200. Then the instruction of the tensor cores.
DEVICES = {80: (163 * 1024, "mma.sync"), 90: (227 * 1024, "wgmma.mma_async"), 100: (227 * 1024, "tcgen05.mma")}
REGISTERS = 255
# What the consumer cards of these generations have; the first choice of the autotuner fits them too.
SMALLEST_SHARED = 99 * 1024
FORMS = {
    "forward": (kernels.product_kernel, {"ACT": "silu", "ACTIVATE": False, "BACKWARD": False}),
    "forward, activated in the loads": (kernels.product_kernel, {"ACT": "silu", "ACTIVATE": True, "BACKWARD": False}),
    "backward": (kernels.product_kernel, {"ACT": "silu", "ACTIVATE": False, "BACKWARD": True, "mixed": None}),
    "taps": (kernels.correlation_kernel, {}),
}
ELEMENTWISE = [(kernel, act) for kernel in (kernels.input_kernel, kernels.gate_kernel) for act in ("silu", "gelu")]


def compiled(function, constants: dict, dtype: str, device: int, **options):
    """The kernel for a device, as a launch with lengths that are multiples of 16 compiles it."""
    types = dict.fromkeys(("v", "taps", "out", "side", "mixed", "g", "x", "h", "u", "u_gradient"), f"*{dtype}")
    types["mask"] = "*u8"
    if function.__name__ == "correlation_kernel":
        types["out"] = "*fp32"
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in function.arg_names}
    whole = {*types, "length", "numbers", "v_d", "taps_d", "side_d", "g_d", "x_d", "h_d", "u_d"}
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_products(form, dtype, device, tmp_path):
    """All choices of the autotuner fit. Registers spill in none of half precision, and not in the first of float32."""
    kernel, constants = FORMS[form]
    shared, instruction = DEVICES[device]
    precise = "tf32x3" if dtype == "fp32" else "tf32"
    for config in kernel.configs[: 1 if dtype == "fp32" else None]:
        sizes = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        built = compiled(kernel.fn, constants | {"PRECISION": precise} | config.kwargs, dtype, device, **sizes)
        used = usage(built, tmp_path)
        limit = SMALLEST_SHARED if config is kernel.configs[0] else shared
        assert built.metadata.shared <= limit and used["REG"] <= REGISTERS, config
        assert used["STACK"] == 0, (config, used)
        small = config.kwargs.get("LOW", 64) < 64  # the instructions of later GPUs have 64 rows
        assert ("mma.sync" if small else instruction) in built.asm["ptx"], config


@pytest.mark.parametrize("form", FORMS)
def test_sizes_of_one(form):
    """A launch makes constants of integers that are 1."""
    kernel, constants = FORMS[form]
    ones = {name: 1 for name in kernel.fn.arg_names if name in ("batch", "length", "num_taps", "v_d", "g_d", "x_d")}
    sizes = kernel.configs[0].kwargs
    compiled(kernel.fn, constants | ones | {"PRECISION": "tf32"} | sizes, "bf16", 90)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kernel", "act"), ELEMENTWISE, ids=lambda one: getattr(one, "__name__", one))
def test_elementwise_kernels(kernel, act, device, tmp_path):
    used = usage(compiled(kernel, {"ACT": act, "BLOCK": kernels.BLOCK}, "bf16", device), tmp_path)
    assert used["REG"] <= REGISTERS and used["STACK"] == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("write", [True, False])
def test_loss(write, dtype, device, tmp_path):
    """A program has all 1,024 threads that a block may have, no registers spill, and each load has 16 bytes."""
    kernel, sizes = loss_triton.loss_kernel, {"BLOCK": loss_triton.BLOCK, "VECTOR": loss_triton.VECTOR}
    types = {"z": f"*{dtype}", "labels": "*i64", "losses": "*fp32"} | dict.fromkeys(("WRITE", *sizes), "constexpr")
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(signature)
        if name in ("z", "labels", "losses", "columns")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=sizes | {"WRITE": write}, attrs=attributes)
    built = triton.compile(source, target=GPUTarget("cuda", device, 32), options={"num_warps": 32})
    used = usage(built, tmp_path)
    assert used["STACK"] == 0 and used["REG"] <= 2**16 // 1024
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", built.asm["ptx"])) == (1 + write) * (1 + (dtype == "fp32"))
