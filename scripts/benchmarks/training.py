"""The cost of a training step (forward, loss, backward) of a language model and its peers, by length.

The name of an operator is a TNN with it; `fused` and `eager` have `rpe`.
`matmul` computes only the matrix products of the linear layers of a TNN, forward and backward: a lower bound for a
model of this size. `hybrid` has attention in every fourth layer, from the second, `attention` in all, with rotary
positions; the rest is that of a TNN. After the name of a variant, `bf16` means autocast in bfloat16, and `compiled`
torch.compile, by regions for a TNN as in `tnn pretrain`; `compiled with loss` with the plain cross entropy in it,
`captured` a CUDA graph of the pass, as there too.
"""

from collections.abc import Callable

import torch

from modeling_tnn.compile.regions import compile_regions
from tnn_scripts.benchmarks.measure import autocast, markdown, measure, peak_on_device, rows_of
from tnn_scripts.benchmarks.peers import build_model, plain_training_loss, training_loss
from tnn_scripts.common.passes import WARM_UP_PASSES, CudaRecorder

FORMATS = {"length": "", "way": "", "milliseconds": ".0f", "tokens_per_second": ".0f", "rpe_over_this": ".2f"}
FORMATS |= {"released_over_this": ".2f", "gpt2_over_this": ".2f", "matmul_over_this": ".2f", "peak_mebibytes": ".0f"}
BASES = ("released", "rpe", "gpt2", "matmul")


def step(way: str, args, ids: torch.Tensor) -> Callable[[], None]:
    """One training step, or with `args.blocks_only` a pass through the blocks."""
    name, *words = way.split()
    precision, loss_of = autocast(args, "bf16" in words), training_loss
    if name == "matmul":
        return matmul_step(args, ids.numel(), torch.bfloat16 if words else torch.float32)
    model = build_model(name, args, ids.shape[1])
    if "loss" in words:
        loss_of = torch.compile(plain_training_loss, dynamic=False)
    elif "compiled" in words:
        regional = any(hasattr(module, "regions") for module in model.modules())
        compile_regions(model, dynamic=False) if regional else model.base_model.compile(dynamic=False)
    embeddings = torch.randn(*ids.shape, args.hidden_size, device=args.device, requires_grad=True)
    gradient = torch.randn_like(embeddings)
    model.config.use_cache = False

    def run():
        with precision:
            if args.blocks_only:
                hidden = model.base_model(inputs_embeds=embeddings).last_hidden_state
            else:
                loss = loss_of(model, ids)
        hidden.backward(gradient.to(hidden.dtype)) if args.blocks_only else loss.backward()

    return captured(run, model, args) if "captured" in words and args.device.startswith("cuda") else run


def captured(run: Callable[[], None], model: torch.nn.Module, args) -> Callable[[], None]:
    """A pass as one CUDA graph, which writes its gradients, as that of `tnn pretrain`."""
    recorder = CudaRecorder(torch.device(args.device))
    with recorder.aside():
        for _ in range(WARM_UP_PASSES):
            run()
        model.zero_grad()
        _, replay = recorder.record(run)
    return replay


def matmul_step(args, tokens: int, dtype: torch.dtype) -> Callable[[], None]:
    model = build_model("fused", args, 512)
    layers = [m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and ".rpe." not in name]
    weights = [m.weight.detach().to(dtype) for m in layers if not (args.blocks_only and m is model.lm_head)]
    shapes = {(tokens, size) for weight in weights for size in weight.shape}
    inputs = {shape[1]: torch.randn(shape, device=args.device, dtype=dtype) for shape in shapes}
    outputs = {shape[1]: torch.empty(shape, device=args.device, dtype=dtype) for shape in shapes}
    gradients = [torch.empty_like(weight) for weight in weights]

    @torch.no_grad()
    def run():
        for weight, gradient in zip(weights, gradients, strict=True):
            size_out, size_in = weight.shape
            torch.mm(inputs[size_in], weight.t(), out=outputs[size_out])
            torch.mm(inputs[size_out], weight, out=outputs[size_in])
            torch.mm(inputs[size_out].t(), inputs[size_in], out=gradient)

    return run


def run(args) -> list[dict]:
    """One row for each length and variant. A batch has `tokens` tokens."""
    rows = []
    for length in args.lengths:
        ids = torch.randint(args.vocab_size, (max(1, args.tokens // length), length), device=args.device)
        ways = {way: step(way, args, ids) for way in args.ways}
        found = rows_of(measure(ways, args), ids.numel(), BASES, length=length)
        rows += [row | peak_on_device(ways[row["way"]], args) for row in found]
    return rows


def table(rows: list[dict]) -> str:
    """The rows as a Markdown table."""
    return markdown(rows, FORMATS)
