"""What the package does with whole models that have attention: packing, files, conversion, division, programs."""

import copy
import itertools
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModelForCausalLM

from helpers import processes
from helpers.hybrids import DIRECTIONS, HYBRIDS, ROPE, hybrid_config
from helpers.models import lively_language_model, relative_error, seeded, tiny_config
from modeling_tnn import SequenceParallel, TnnConfig, TnnForCausalLM, TnnForMaskedLM, numerics
from modeling_tnn.kernels import stacking
from tnn_scripts.common.arguments import load_config, parse_overrides
from tnn_scripts.plotting.reading import read_model

EVERY_HYBRID = pytest.mark.parametrize("name", HYBRIDS)
EVERY_DIRECTION = pytest.mark.parametrize("causal", DIRECTIONS)


def exhaustive(*values):
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*row, marks=pytest.mark.exhaustive) for row in rows]


GRAPHS = [("full", True, True), *exhaustive(*itertools.product(HYBRIDS, DIRECTIONS, [False, True]))]
IDS = torch.arange(80).view(2, 40) % 90 + 5
STARTS = (0, 7, 16, 17)
POSITIONS = torch.cat([torch.arange(n) for n in (7, 9, 1, 23)]).expand(2, 40)


def language_model(name, causal=True, **fields):
    head = TnnForCausalLM if causal else TnnForMaskedLM
    return seeded(head, hybrid_config(name, causal, use_cache=False, **fields))


def results(call, model, **inputs):
    """The logits, and the gradients of all parameters."""
    logits = call(input_ids=IDS, **inputs).logits
    return [logits, *torch.autograd.grad(logits.square().mean(), list(model.parameters()))]


def assert_same(found, expected, tolerance=5e-6):
    assert max(relative_error(a, b) for a, b in zip(found, expected, strict=True)) < tolerance


@EVERY_HYBRID
@EVERY_DIRECTION
def test_packed_documents_are_alone(name, causal):
    model = language_model(name, causal)
    ends = (*STARTS[1:], 40)
    pieces = [model(IDS[:, start:end]).logits for start, end in zip(STARTS, ends, strict=True)]
    expected = torch.cat(pieces, dim=1)
    gradients = torch.autograd.grad(expected.square().mean(), list(model.parameters()))
    assert_same(results(model, model, position_ids=POSITIONS), [expected, *gradients])
    assert relative_error(model(IDS).logits, expected) > 1e-3


@pytest.mark.parametrize(("name", "causal", "masked"), GRAPHS)
def test_packed_rows_in_one_graph(name, causal, masked):
    """The same graph for other documents; with padding before, inside and behind them."""
    torch._dynamo.reset()
    model = language_model(name, causal).train()
    backend = CompileCounterWithBackend("eager")
    call, mask = torch.compile(model, backend=backend, fullgraph=True), torch.ones_like(IDS)
    mask[0, :3] = mask[1, 11:13] = mask[1, 35:] = 0
    real = mask.bool() if masked else torch.ones_like(IDS).bool()
    for positions in (POSITIONS + 0, torch.arange(40).expand(2, 40) % 16):
        given = {"position_ids": positions} | ({"attention_mask": mask} if masked else {})
        found, expected = (one(input_ids=IDS, **given).logits[real] for one in (call, model))
        parts = (torch.autograd.grad(y.square().mean(), list(model.parameters())) for y in (found, expected))
        assert_same([found, *next(parts)], [expected, *next(parts)])
    assert len(backend.graphs) == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["full", *exhaustive("sliding", "attention")])
def test_one_graph_for_all_lengths(name):
    torch._dynamo.reset()
    model, backend = language_model(name), CompileCounterWithBackend("eager")
    call = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for length in (40, 33, 24, 17):
        ids = IDS[:, :length].contiguous()
        assert relative_error(call(ids).logits, model(ids).logits) < 5e-6
    assert len(backend.graphs) <= 2
    torch._dynamo.reset()


@EVERY_HYBRID
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saving_and_loading(name, dtype, tmp_path):
    model = language_model(name).to(dtype)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()) and loaded.config.layer_types == HYBRIDS[name]["layer_types"]
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    again = TnnConfig.from_pretrained(tmp_path)
    again.save_pretrained(tmp_path / "again")
    first, second = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path, tmp_path / "again"))
    assert second == {name: value for name, value in first.items() if name != "auto_map"}  # it carries no code


def test_resized_embeddings():
    model = language_model("full")
    before = model(IDS).logits
    model.resize_token_embeddings(120)
    assert torch.equal(model(IDS).logits[..., :99], before) and model(IDS + 20).logits.shape[-1] == 120


@pytest.mark.parametrize("name", ["full", "sliding"])
def test_conversion(name):
    """Toeplitz layers become recurrences, attention stays."""
    model = lively_language_model(tno_type="rpe", decay=0.8, **HYBRIDS[name])
    converted, reports = model.to_recurrent(order=32, window=8)
    place = HYBRIDS[name]["layer_types"].index("toeplitz")
    assert [report.layer for report in reports] == [place]
    assert converted.config.layer_types == HYBRIDS[name]["layer_types"] and converted.config.tno_type == "modal"
    with torch.no_grad():
        assert relative_error(converted(IDS).logits, model(IDS).logits) < 1e-3
        prompt = {"max_new_tokens": 30, "do_sample": False}
        by_hand = converted.generate(IDS, use_cache=False, **prompt)
        assert torch.equal(converted.generate(IDS, **prompt), by_hand)


def test_there_is_nothing_to_convert_in_attention():
    model = language_model("attention")
    assert model.to_recurrent() == (model, [])


@pytest.mark.parametrize("name", HYBRIDS)
def test_plan_of_tensor_parallelism(name):
    """It names modules that exist."""
    model = language_model(name)
    names = {part.replace(".0.", ".*.").replace(".1.", ".*.") for part, _ in model.named_modules()}
    assert model.tp_plan.keys() <= names
    assert model.tp_plan["model.layers.*.attention.k_proj"] == "colwise"


def test_a_text_with_attention_cannot_be_divided():
    mesh = SimpleNamespace(ndim=1, get_group=None, get_local_rank=lambda: 0, size=lambda: 2)
    mesh.get_group = lambda: None
    with pytest.raises(ValueError, match="`layer_types` must be 'toeplitz' in all layers for a divided text.*tp_plan"):
        SequenceParallel(language_model("full"), mesh)


@pytest.mark.parametrize("causal", DIRECTIONS)
def test_kernels_of_all_layers_at_once(causal, monkeypatch):
    """As on an accelerator: those of the Toeplitz layers, around the layer of attention."""
    kinds = ["toeplitz", "full_attention", "toeplitz", "toeplitz"]
    model = language_model("full", causal, layer_types=kinds, num_hidden_layers=4)
    expected, made = model(IDS).logits, []
    function = stacking.kernels_of_operators

    def counted(operators, x):
        made.append(len(operators))
        return function(operators, x)

    monkeypatch.setattr(stacking, "kernels_of_operators", counted)
    monkeypatch.setattr(numerics, "HOST_DEVICES", ())
    assert relative_error(model(IDS).logits, expected) < 1e-5 and made == [3]


SHARDS = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from helpers.hybrids import HYBRIDS, hybrid_config
from helpers.mixers import MIXED
from helpers.models import relative_error, seeded, tiny_config
from modeling_tnn import TnnForCausalLM
dist.init_process_group("gloo")
mesh, ids = init_device_mesh("cpu", (2,)), torch.arange(80).view(2, 40)
configs = [hybrid_config(name) for name in HYBRIDS]
configs += [tiny_config("rtf", hidden_dropout_prob=0.0, **fields) for fields in MIXED.values()]
for config in configs:
    model = seeded(TnnForCausalLM, config).train()
    model(ids, labels=ids).loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert relative_error(parameter.grad.full_tensor(), expected[name]) < 1e-5, name
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_shards_of_two_processes(tmp_path):
    """FSDP2 with a group for each block, whatever mixes the tokens in it."""
    (tmp_path / "shards.py").write_text(SHARDS)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    folder = str(Path(__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([folder, *sys.path]), "OMP_NUM_THREADS": "1"}
    processes.run([*launch, str(tmp_path / "shards.py")], check=True, env=environment)


def test_copies():
    model = language_model("attention")
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    assert model.config._attn_implementation == "sdpa"
    assert relative_error(twin(IDS).logits, model(IDS).logits) < 5e-6


def test_overrides_of_a_command_line():
    text = "num_hidden_layers=2,layer_types=[toeplitz, full_attention],rope_parameters={rope_theta: 100.0},decay=0.9"
    overrides = parse_overrides(text)
    assert overrides["layer_types"] == ["toeplitz", "full_attention"] and overrides["decay"] == 0.9
    config = load_config("tnn-tiny", overrides)
    assert config.layer_types == overrides["layer_types"]
    assert config.rope_parameters == ROPE


def test_pictures_of_the_toeplitz_layers():
    kernels, _ = read_model(language_model("sliding").model, 16)
    assert [kernel.label for kernel in kernels] == ["layer 1"]
    with pytest.raises(ValueError, match="`layer_types` must have a 'toeplitz' layer to draw"):
        read_model(language_model("attention").model, 16)


def test_another_max_position_embeddings_changes_nothing(tmp_path):
    model = language_model("full")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, max_position_embeddings=4096, use_cache=False)
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert tiny_config().layer_types == ["toeplitz", "toeplitz"]
