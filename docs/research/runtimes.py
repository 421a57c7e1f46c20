"""Compare runtimes on a CPU: PyTorch as it is, with weights by columns and compiled, ONNX Runtime, OpenVINO.

For a causal model: the time of a new token, by its cache in PyTorch and by `DecodingStep` elsewhere, and that of a
pass over a text. Ways take turns, and the figures are medians, with the ratio to PyTorch's: above 1 is faster. `error`
is the largest difference of the logits of the pass relative to the largest one, and `equal` tells whether 100 greedy
tokens are those of `generate`. A model that is no recurrence is made one.

Example:
    OMP_NUM_THREADS=1 python docs/research/runtimes.py --model_name_or_path outputs/demo --output_file runtimes.json
"""

import argparse
import copy
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import onnxruntime
import openvino
import torch
from tabulate import tabulate
from torch.export import Dim

from modeling_tnn import DecodingStep, TnnForCausalLM, to_column_major
from tnn_programs.cli.atomic import write_json

Way = Callable[..., list[torch.Tensor]]  # inputs as tensors, to outputs
PREFIX, GREEDY = 16, 100
COLUMNS = "PyTorch, weights by columns"


class Pass(torch.nn.Module):
    """The logits of a text."""

    def __init__(self, model: TnnForCausalLM):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids, use_cache=False).logits


def programs(module, inputs: tuple, sizes: tuple, threads: int, file: Path) -> dict[str, Way]:
    """The module in ONNX Runtime and OpenVINO, by a program in `file`."""
    torch.onnx.export(module, inputs, file, dynamic_shapes=sizes, external_data=False, dynamo=True, verbose=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    exact = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    request = openvino.Core().compile_model(file, "CPU", exact).create_infer_request()

    def in_onnxruntime(*tensors):
        given = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
        return list(map(torch.from_numpy, session.run(None, given)))

    def in_openvino(*tensors):
        return list(map(torch.from_numpy, request.infer([tensor.numpy() for tensor in tensors]).values()))

    return {"ONNX Runtime": in_onnxruntime, "OpenVINO": in_openvino}


class Writer:
    """A text that a way continues greedily, token by token; its first tokens are read in the same way."""

    def __init__(self, step: Way, states: list[torch.Tensor], prefix: torch.Tensor):
        self.step, self.states, self.ids = step, states, []
        for token in prefix.split(1, dim=1):
            logits, *self.states = self.step(token, *self.states)
        self.token = logits.argmax(-1, keepdim=True)

    def advance(self):
        self.ids.append(int(self.token))
        logits, *self.states = self.step(self.token, *self.states)
        self.token = logits.argmax(-1, keepdim=True)


class CachedWriter(Writer):
    """The same in PyTorch, with the cache of the model."""

    def __init__(self, model, prefix: torch.Tensor):
        def step(token, cache=None):
            outputs = model(token, past_key_values=cache, use_cache=True)
            return outputs.logits[:, -1], outputs.past_key_values

        super().__init__(step, [], prefix)


def measured(ways: dict[str, Callable], rounds: int, count: int) -> dict[str, float]:
    """The median seconds of a call of each way, which take turns of `count` calls."""
    seconds = {name: [] for name in ways}
    for _ in range(rounds):
        for name, call in ways.items():
            start = time.perf_counter()
            for _ in range(count):
                call()
            seconds[name].append((time.perf_counter() - start) / count)
    return {name: median(values) for name, values in seconds.items()}


@torch.inference_mode()
def compare(model: TnnForCausalLM, length: int, rounds: int, threads: int) -> list[dict]:
    """A row for each way."""
    step, ids = DecodingStep(model), torch.randint(3, model.config.vocab_size, (1, length))
    shape = [len(layer) for layer in step.empty(1)]
    states = [state for layer in step.empty(1) for state in layer]

    class Flat(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.step = step

        def forward(self, token, *states):
            remaining = iter(states)
            logits, states = self.step(token, [[next(remaining) for _ in range(count)] for count in shape])
            return logits, *(state for layer in states for state in layer)

    with tempfile.TemporaryDirectory() as folder, torch.inference_mode(False), torch.no_grad():
        columns = to_column_major(copy.deepcopy(model))  # which leaves what was made in inference mode
        fixed, token = ({}, tuple({} for _ in states)), ids[:, :1].clone()
        steps = programs(Flat(), (token, *states), fixed, threads, Path(folder, "step.onnx"))
        passes = programs(Pass(model), (ids.clone(),), ({1: Dim.DYNAMIC},), threads, Path(folder, "pass.onnx"))
    steps = {"PyTorch, compiled": torch.compile(Flat(), dynamic=False)} | steps
    compiled = {"PyTorch, compiled": torch.compile(Pass(model), dynamic=False)}
    passes = {"PyTorch": Pass(model), COLUMNS: Pass(columns)} | compiled | passes
    prefix = ids[:, :PREFIX]
    writers = {name: Writer(way, states, prefix) for name, way in steps.items()}
    writers = {"PyTorch": CachedWriter(model, prefix), COLUMNS: CachedWriter(columns, prefix)} | writers
    expected = model.generate(prefix, max_new_tokens=GREEDY, do_sample=False, eos_token_id=None)
    logits = Pass(model)(ids)
    tokens = measured({name: writer.advance for name, writer in writers.items()}, rounds, 20)
    found = {name: way(ids) for name, way in passes.items()}
    whole = measured({name: lambda way=way: way(ids) for name, way in passes.items()}, rounds, 1)
    rows = []
    for name, writer in writers.items():
        output = found[name][0] if isinstance(found[name], list) else found[name]
        error = float((output - logits).abs().max() / logits.abs().max())
        equal = writer.ids[:GREEDY] == expected[0, PREFIX:].tolist()
        rows.append({"way": name, "token_ms": 1e3 * tokens[name], "token_ratio": tokens["PyTorch"] / tokens[name]})
        rows[-1] |= {"pass_ms": 1e3 * whole[name], "pass_ratio": whole["PyTorch"] / whole[name]}
        rows[-1] |= {"error": error, "equal": equal}
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--length", type=int, default=512, help="Tokens of the pass.")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output_file", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = TnnForCausalLM.from_pretrained(args.model_name_or_path).eval()
    model = model.to_recurrent()[0]
    rows = compare(model, args.length, args.rounds, args.threads)
    sys.stdout.write(tabulate(rows, headers="keys", floatfmt=".3g") + "\n")
    if args.output_file is not None:
        write_json(args.output_file, {"length": args.length, "parameters": model.num_parameters(), "rows": rows})


if __name__ == "__main__":
    main()
