"""Deliberate defects, and the default tests that must catch each: fault injection for the test suite itself.

Each is one replacement in one file. `python tests/defects.py` applies them one at a time to a copy of the project and
runs their tests there; a defect that no test catches is an error. `tests/repo/test_defects.py` keeps the list
applicable.

Example:
    python tests/defects.py
    python tests/defects.py --only "crop" "padding"
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = ("modeling_tnn", "scripts", "tests", "configuration", "model_cards", "docs", ".ci")
FILES = ("pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "CITATION.cff", "Makefile", "LICENSE")


class Defect(NamedTuple):
    """One replacement: `old`, which occurs once in `file`, becomes `new`; `tests` are test files."""

    name: str
    file: str
    old: str
    new: str
    tests: str

    def test_files(self) -> list[str]:
        return [f"tests/{name}.py" for name in self.tests.split()]


P, S = "modeling_tnn/", "scripts/"
DEFECTS = [
    # Products
    Defect("product: transform too short", P + "toeplitz_fused.py",
           "next_fast_len(length + max(first, taps - 1 - first))", "next_fast_len(length)", "unit/test_toeplitz"),
    Defect("product: two-sided kernel off by one", P + "toeplitz.py", "reach), reach - 1, implementation",
           "reach), reach, implementation", "unit/test_toeplitz"),
    Defect("product: gradient of the gate without the mask", P + "toeplitz_fused.py",
           "u_gradient[chosen] = pull_back(g * mixed[chosen])", "u_gradient[chosen] = g * mixed[chosen]",
           "unit/test_toeplitz"),
    Defect("product: response not conjugated in the backward pass", P + "toeplitz_fused.py",
           "windows, g_buffer.dtype).conj()", "windows, g_buffer.dtype)", "unit/test_toeplitz"),
    Defect("product: overlapping windows lose their tails", P + "toeplitz_fused.py",
           "total[:, :, 1:, : windows.size - windows.step] += parts[..., windows.step :]", "pass",
           "unit/test_toeplitz"),
    Defect("product: gradient of a response counts mirror images once", P + "toeplitz_fused.py",
           "correlation[:, 1:-1] *= 2", "correlation[:, 1:-1] *= 1", "unit/test_operators"),
    # Operators
    Defect("fd: causal taps not doubled", P + "tno_fd.py", "torch.cat([taps[:, :1], 2 * taps[:, 1:]], dim=1)",
           "taps.clone()", "parity/test_golden_parts unit/test_operators"),
    Defect("rpe: decay by the lag and not its size", P + "tno_rpe.py", "self.decay ** lags.abs()",
           "self.decay ** lags", "unit/test_operators"),
    Defect("ski: sign of the warp", P + "tno_ski.py", "torch.where(lags < 0, -1.0, 1.0)",
           "torch.where(lags <= 0, -1.0, 1.0)", "parity/test_golden_models"),
    Defect("rtf: no tap at lag zero", P + "tno_rtf.py", "first = taps[:, :1] + self.direct.to(dtype)[:, None]",
           "first = taps[:, :1] + 0 * self.direct.to(dtype)[:, None]",
           "parity/test_golden_models unit/test_operators"),
    Defect("modal: tail begins a lag late", P + "tno_modal.py", "torch.arange(max(0, length - self.window)",
           "1 + torch.arange(max(0, length - self.window)", "generation/test_conversion unit/test_operators"),
    Defect("hyena: filters decay to zero", P + "tno_hyena.py", ".exp_().add_(FLOOR)", ".exp_()",
           "unit/test_tno_hyena parity/test_golden_hyenadna"),
    Defect("hyena: decoding goes on beyond the filter", P + "tno_hyena.py",
           "self.operator.require_positions(state.length + 1)", "pass", "unit/test_tno_hyena"),
    Defect("s4d: no tap at lag zero", P + "tno_s4d.py", "+ self.direct.to(kernel)[:, None] * first", "",
           "unit/test_tno_s4d"),
    Defect("s4d: gradient of the lags within a block alone", P + "tno_s4d.py",
           "(weighted + first * plain)", "weighted", "unit/test_tno_s4d"),
    Defect("s4d: a recorded graph begins each block at 0", P + "tno_s4d.py",
           "block * torch.arange(blocks, device=device)", "0 * torch.arange(blocks, device=device)",
           "unit/test_tno_s4d"),
    Defect("s4d: gain of the poles left out", P + "tno_s4d.py", "return poles, Pair(real, imag).times(gain)",
           "return poles, Pair(real, imag)", "unit/test_tno_s4d"),
    Defect("s4d cache: weights of the memory a token late", P + "tno_s4d.py", "torch.tensor([age + 1]",
           "torch.tensor([age + 2]", "unit/test_tno_s4d unit/test_recurrence"),
    Defect("s4d cache: memory does not fade", P + "tno_s4d.py",
           "memory = memory * complex_of(table[:, length]) + complex_of(added)", "memory = memory + complex_of(added)",
           "unit/test_recurrence"),
    # Caches
    # Rows for texts of different ages
    Defect("rows: tiles of the block are not passed on", P + "serving/states.py",
           'position, tiles = counters["position"], counters["tiles"]', 'position, tiles = counters["position"], 0',
           "generation/test_cache_rows"),
    Defect("rows: the next block is not begun", P + "serving/states.py",
           'recurrence.look_ahead(state, counters["ahead"], counters["block"] - position)',
           'recurrence.look_ahead(state, 0, counters["block"] - position)', "generation/test_cache_rows"),
    Defect("rows: values of a shorter text at the wrong end", P + "serving/states.py",
           "(count - values.shape[-1], 0))  # (N", "(0, count - values.shape[-1]))  # (N",
           "generation/test_cache_rows"),
    Defect("rows: a ring is filled to its end only", P + "serving/states.py", "if young < count:", "if young < 0:",
           "generation/test_cache_rows"),
    Defect("rows: memory of a converted model of another age", P + "serving/states.py",
           'state.counters["covered"] = length - reach', 'state.counters["covered"] = state.length - reach',
           "generation/test_cache_rows"),
    Defect("rows: padding is not dropped from the memory", P + "serving/states.py",
           'max(0, state.counters["covered"] - count)', 'state.counters["covered"]', "generation/test_cache_rows"),
    Defect("rows: keys padded on the right", P + "serving/rows.py", "(0, 0, longest - one.shape[-2], 0)",
           "(0, 0, 0, longest - one.shape[-2])", "generation/test_cache_rows"),
    Defect("batch: random numbers of the process", P + "serving/request.py", ", 1, generator=self._generator)", ", 1)",
           "generation/test_batching"),
    Defect("batch: masks on the wrong side", P + "serving/scheduler.py",
           "(length - len(row), 0)", "(0, length - len(row))", "generation/test_batching"),
    Defect("batch: a failed pass ends the others", P + "serving/scheduler.py",
           "if len(requests) == 1:", "if requests:",
           "generation/test_batching"),
    Defect("cache: length forgets a crop", P + "recurrence.py", "self.length -= count", "self.length -= 0",
           "unit/test_recurrence"),
    Defect("crop: the future of the block stays", P + "recurrence.py",
           "count <= position:\n            state.counters", "count <= 2 * position:\n            state.counters",
           "unit/test_recurrence generation/test_generation"),
    Defect("cache: a chunk leaves the old future", P + "recurrence.py",
           "state.history.append(x)\n        state.tensors.pop(\"future\", None)", "state.history.append(x)",
           "unit/test_recurrence"),
    Defect("cache: history one value short", P + "recurrence.py",
           "HistoryBuffer(x, None if self.taps is None else self.taps - 1)",
           "HistoryBuffer(x, None if self.taps is None else max(1, self.taps - 70))", "unit/test_recurrence"),
    Defect("history: a ring loses its place after a crop", P + "history.py", "self.end += self.buffer.shape[-1]",
           "self.end += 0", "unit/test_recurrence"),
    Defect("next block: computed from the wrong inputs", P + "recurrence.py", "state.history.last(reach + young, ",
           "state.history.last(reach, ", "unit/test_recurrence"),
    Defect("compiled step: without the newest input but one", P + "compile/static_cache.py",
           "counts = lags <= position % recurrence.base", "counts = lags < position % recurrence.base",
           "generation/test_compiled_decoding"),
    Defect("compiled step: rtf reads a place too far", P + "compile/static_cache.py",
           "slot - torch.arange(recurrence.order, 0, -1,", "slot - torch.arange(recurrence.order - 1, -1, -1,",
           "generation/test_compiled_decoding"),
    Defect("compiled step: a token that was not decoded counts", P + "compile/static_cache.py",
           "self.history.held, self.length, self.counters = self.before",
           "self.history.held, _, self.counters = self.before", "generation/test_compiled_decoding"),
    Defect("prefill: one input too few", P + "recurrence.py", "self.taps - 1 + slack_after(prompt.length)",
           "self.taps - 2 + slack_after(prompt.length)", "generation/test_prefill"),
    Defect("cache: tile passed on too short", P + "recurrence.py", "until = min(position + tile, self.horizon)",
           "until = min(position + tile - 1, self.horizon)", "unit/test_recurrence"),
    Defect("rtf cache: state counted from the wrong end", P + "tno_rtf.py",
           "newest = now - torch.linalg.vecdot(past, denominator)",
           "newest = now - torch.linalg.vecdot(past, numerator)",
           "unit/test_recurrence unit/test_operators"),
    Defect("rtf cache: the future of many texts outlives a crop", P + "tno_rtf.py",
           "        state.history.drop(count)\n        end_block(state)", "        state.history.drop(count)",
           "unit/test_recurrence"),
    Defect("modal cache: memory does not fade", P + "tno_modal.py", '* faded + added', '+ added',
           "unit/test_recurrence"),
    Defect("beams: rows of the history stay", P + "recurrence.py",
           "            self.history.buffer = choose(self.history.buffer)", "            pass",
           "generation/test_generation generation/test_cache"),
    # Padding and packing
    Defect("padding: the mask is not applied", P + "toeplitz_fused.py",
           "return v if self.mask is None else v.masked_fill(~self.mask[..., None], 0)", "return v",
           "unit/test_heads unit/test_operators"),
    Defect("padding: ski not aligned to the first token", P + "mixers.py",
           "if gate.mask is None or operator.shift_invariant or passed.documents is not None:", "if True:",
           "unit/test_tno_ski"),
    Defect("padding: short convolution of Hyena reads it", P + "mixers.py",
           "hidden_states), gate, passed)  # (B, L, 3D)", "hidden_states), Gate(), passed)  # (B, L, 3D)",
           "properties/test_properties"),
    Defect("padding: long filter of Hyena reads it", P + "mixers.py", "mix_tokens(self.tno, q * v, gate,",
           "mix_tokens(self.tno, q * v, Gate(),", "properties/test_properties"),
    Defect("packing: short convolution of Hyena crosses documents", P + "mixers.py",
           "self.matmul(gate.inputs(v), passed.documents)", "self.matmul(gate.inputs(v))", "unit/test_mixers"),
    Defect("cache: ignored by its other name", P + "cache_tnn.py", "return given | {name: cache}", "return given",
           "generation/test_cache"),
    Defect("cache: crop leaves the short convolution of Hyena", P + "cache_tnn.py",
           "for state in self.states.values():\n            state.crop(",
           "for state in [*self.states.values()][1:]:\n            state.crop(", "properties/test_properties"),
    Defect("cache: rows leave the short convolution of Hyena", P + "serving/rows.py",
           "for name, other in new.states.items():", "for name, other in [*new.states.items()][1:]:",
           "generation/test_cache_rows"),
    Defect("cache: beams leave the short convolution of Hyena", P + "cache_tnn.py",
           "for state in self.states.values():\n            state.select(lambda tensor: tensor[indices",
           "for state in [*self.states.values()][-1:]:\n            state.select(lambda tensor: tensor[indices",
           "generation/test_generation"),
    Defect("mixers: taps of the short convolution reversed", P + "mixers.py", "copies, taps[chosen].unbind(1)",
           "copies, taps[chosen].flip(1).unbind(1)", "unit/test_mixers"),
    Defect("parts: filter of Hyena with the rates of the first positions", P + "tno_hyena.py", "times[chosen], rates",
           "times[: len(x)], rates", "unit/test_numerics"),
    Defect("parts: the last part is left out", P + "numerics.py", "for start in range(size, count, size):",
           "for start in range(size, count - size, size):", "unit/test_numerics"),
    Defect("mixers: S4 gates with the wrong half", P + "mixers.py", "apply_linear(self.o_proj, self.act(mixed))",
           "apply_linear(self.o_proj, self.act(mixed)).flip(-1)", "unit/test_mixers"),
    Defect("padding: mean over all tokens", P + "inputs.py", "hidden_states.masked_fill(~real[..., None], 0)",
           "hidden_states", "unit/test_heads"),
    Defect("padding: last position instead of the last token", P + "inputs.py", "length - 1 - from_end]",
           "length - 1 - 0 * from_end]", "unit/test_heads"),
    Defect("packing: positions of padding begin texts", P + "packing.py",
           "starts = real & rises & (position_ids == 0)", "starts = rises & (position_ids == 0)",
           "unit/test_packing"),
    Defect("packing: documents begin with the padding before them", P + "packing.py",
           "    starts = real & (count_real(starts, real) == 1)\n", "", "unit/test_graphs"),
    Defect("packing: outputs in the order of their lengths", P + "packing.py",
           "place[token[inside]] = inside", "place[:] = inside", "unit/test_packing"),
    # Real values
    Defect("values: missing ones look observed", P + "signals.py", "observed.to(values.dtype)]",
           "observed.new_ones(observed.shape).to(values.dtype)]", "unit/test_signals"),
    Defect("values: gradients through missing ones", P + "signals.py", "values = values.masked_fill(missing, 0)  #",
           "values = values  #", "unit/test_signals"),
    Defect("values: missing targets count", P + "signals.py", "errors.square().sum() / (~missing).sum().clamp(min=1)",
           "errors.square().mean()", "unit/test_signals"),
    Defect("forecasts: padding before the first prediction", P + "modeling_tnn.py",
           "values, attention_mask = end_with_real(values, attention_mask)", "pass", "unit/test_signals"),
    Defect("forecasts: the mean over the last block alone", P + "modeling_tnn.py",
           'cached = self.config.causal and self.config.pooling == "last"', "cached = self.config.causal",
           "unit/test_signals"),
    # Saving, loading, converting
    Defect("saving: code of the models is left out", P + "configuration_tnn.py",
           "            save_code(save_directory, self._models)\n", "            pass\n", "hf/test_remote_code"),
    Defect("loading: sizes are not compared", P + "tools/checks.py",
           "    check_weights(declared, stored, numbers, optional)\n", "",
           "security/test_security faults/test_faults_loading"),
    Defect("conversion: radius of the poles", P + "tools/recurrent.py", "torch.log(-torch.log(fit.poles.abs()))",
           "torch.log(-2 * torch.log(fit.poles.abs()))", "generation/test_conversion"),
    Defect("half precision: kernels in bfloat16", P + "numerics.py",
           "return torch.promote_types(dtype, torch.float32)", "return dtype",
           "unit/test_operators parity/test_golden_parts"),
    Defect("loss: shift_labels are ignored", P + "modeling_tnn.py",
           '"shift_labels": shift_labels}', '"shift_labels": None}', "unit/test_modeling unit/test_loss"),
    Defect("loss: rows without a label have a gradient", P + "kernels/loss.py", ".masked_fill_(~real, 0)", "",
           "unit/test_loss"),
    Defect("loss: the padding takes part in the softmax", P + "kernels/loss.py",
           "z = z[:, :words]", "pass", "unit/test_loss"),
    Defect("loss: a head with an adapter is passed over", P + "mixers.py", "type(layer) is nn.Linear",
           "isinstance(layer, nn.Linear)", "unit/test_loss"),
    Defect("accelerators: a mask is read in every pass", P + "inputs.py", "can_be_read(attention_mask) and ", "",
           "unit/test_no_stalls"),
    Defect("accelerators: a recurrence is looked at after each token", P + "tno_rtf.py",
           "is_on_host(newest) or state.length % PATROL == 0", "True", "unit/test_no_stalls"),
    # Kernels of all layers at once
    Defect("stacking: hooks are not seen", P + "kernels/stacking.py", "not (known and all(map(is_plain, modules)))",
           "not known", "unit/test_stacking"),
    Defect("stacking: settings are not compared", P + "kernels/stacking.py",
           "not all(x is theirs[name] or is_same(x, theirs[name]) for name, x in settings)", "False",
           "unit/test_stacking"),
    Defect("stacking: checkpointed layers keep their kernels", P + "kernels/stacking.py",
           "any(layer.gradient_checkpointing and layer.training for layer in layers)", "False", "unit/test_stacking"),
    Defect("stacking: the filters of both sides mixed", P + "kernels/stacking.py",
           "one.unflatten(0, (filters[name], -1))", "one.unflatten(0, (1, -1))", "unit/test_stacking"),
    Defect("stacking: each layer copies its gradients", P + "kernels/stacking.py",
           "gradient.contiguous().flatten().view(gradient.shape)", "gradient", "unit/test_no_stalls"),
    Defect("decay: an accelerator waits for a learned one", P + "tno_rpe.py",
           "return LateRecurrence(self, None, self.refill_phase)", "return super().recurrence()",
           "unit/test_no_stalls"),
    Defect("poles: an accelerator waits for each check", P + "tools/poles.py",
           "all(is_on_host(operator.denominator) for operator in rational_operators(model))", "True",
           "properties/test_stability"),
    # Training programs
    Defect("data: the collator draws masks by a seed of its own", P + "data/text.py",
           "(tokenizer, mlm_probability=mlm_probability)", "(tokenizer, mlm_probability=mlm_probability, seed=0)",
           "scripts/test_pretrain"),
    Defect("recording: dropout goes on from the warm-up", P + "training/passes.py",
           "with undone(self.model, batch[\"input_ids\"].device), self", "with self",
           "scripts/test_training_step"),
    Defect("recording: the gradients of the warm-up stay", P + "training/passes.py",
           "self.model.zero_grad(set_to_none=self.passes == 1)", "pass", "scripts/test_training_step"),
    Defect("micro-batch: each process takes its own", P + "training/costs.py", "min(gather_object([size]))",
           "max(gather_object([size]))", "scripts/test_pretrain_options"),
    Defect("resuming: blocks of the text from the start", P + "training/accelerate_loop.py",
           "self.state = TrainerState(**saved[\"state\"])", "self.state = TrainerState()",
           "scripts/test_pretrain faults/test_interruption"),
    Defect("resuming: schedule from the start", P + "training/accelerate_loop.py",
           "            self.scheduler.load_state_dict(saved[\"scheduler\"])\n", "", "faults/test_interruption"),
    Defect("resuming: Trainer goes on with another run", S + "tnn_cli/runs.py",
           "if n in saved and saved[n] != v", "if n not in saved", "faults/test_faults_training"),
    Defect("checkpoints: damaged files are taken", S + "tnn_cli/runs.py",
           "if not path.is_file() or _sha256(path) != checksum:", "if not path.is_file():",
           "faults/test_faults_saving faults/test_faults_training scripts/test_pretrain"),
    Defect("evaluation: rows overlap by two tokens", P + "training/scoring.py", "nats[:, length - 1 - stride :]",
           "nats[:, length - 2 - stride :]", "scripts/test_evaluate_lm"),
    # Several processes
    Defect("tensor parallelism: gradients of shared parameters are those of one process", P + "parallel/tensor.py",
           "grad_placements=[Partial()]", "grad_placements=[Replicate()]", "unit/test_tensor_parallel"),
    Defect("tensor parallelism: both filters as one", P + "parallel/tensor.py", "Shard(0) if filters == 1 else",
           "Shard(0) if filters else", "unit/test_tensor_parallel"),
    Defect("tensor parallelism: a process of S4 has the inputs of another", P + "parallel/tensor.py",
           "[..., own.start : own.stop]", "[..., : len(own)]", "unit/test_tensor_parallel"),
    Defect("sequence parallelism: documents of a divided text meet", P + "parallel/sequence.py",
           "tokens.shape[1]), mask, documents)", "tokens.shape[1]), mask, None)", "unit/test_sequence_parallel"),
    Defect("sequence parallelism: each share divides by its own labels", P + "parallel/sequence.py",
           '= (labels != ignored).sum()', '= (labels != ignored)[:, self.index :: self.count].sum()',
           "unit/test_sequence_parallel"),
    Defect("pipeline: each stage scales the hidden states", P + "modeling_tnn.py", "if first == 0:", "if first >= 0:",
           "unit/test_tensor_parallel"),
]  # fmt: skip


def copy_project(folder: Path):
    """The project in `folder`, and the name by which the command `tnn` imports its programs."""
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)
    (folder / "scripts" / "tnn_cli" / "programs").symlink_to(folder / "scripts")


def apply(defect: Defect, folder: Path):
    """Break the copy in `folder`.

    Raises:
        ValueError: what is to be replaced does not occur once.
    """
    file = folder / defect.file
    text = file.read_text()
    if text.count(defect.old) != 1:
        raise ValueError(f"{defect.name}: {defect.old!r} occurs {text.count(defect.old)} times in {defect.file}.")
    file.write_text(text.replace(defect.old, defect.new))


def is_caught(defect: Defect) -> str | None:
    """The first test that fails with the defect; None if none does."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_project(folder)
        apply(defect, folder)
        environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{folder / 'scripts'}", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *defect.test_files()]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if done.returncode not in (0, 1):
            raise RuntimeError(f"{defect.name}: pytest left with {done.returncode}.\n{done.stdout[-2000:]}")
        return lines[0].split(" - ")[0] if done.returncode else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of defects")
    args = parser.parse_args()
    chosen = [defect for defect in DEFECTS if any(part in defect.name for part in args.only)]
    missed = []
    for defect in chosen:
        test = is_caught(defect)
        missed += [] if test else [defect.name]
        sys.stdout.write(f"{defect.name}: {test or 'NOT CAUGHT'}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{len(chosen) - len(missed)} of {len(chosen)} defects are caught.\n")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
