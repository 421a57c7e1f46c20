"""Tensor parallelism by transformers: two and four processes that do what one does."""

import json

import pytest
import torch
import transformers
from transformers.distributed import DistributedConfig

from helpers import ranks, tensor_ranks
from helpers.models import CAUSAL, VARIANTS, tiny_config
from modeling_tnn import TnnForCausalLM
from modeling_tnn.parallel.channels import restricted
from modeling_tnn.parallel.tensor import DIVIDES_FILTERS
from modeling_tnn.tno_auto import build_tno


def found(world: int, slow: bool = False) -> dict[str, dict]:
    results = ranks.start(world, slow)
    return {name.removeprefix("tensor: "): case for name, case in results.items() if name.startswith("tensor: ")}


@pytest.fixture(scope="module")
def two():
    return found(2)


def check(found: dict, name: str):
    assert found["logits"] < 1e-12 and found["gradients"] < 1e-9, found
    fields = tensor_ranks.CASES.get(name) or tensor_ranks.SLOW[name]
    config = tiny_config(*fields[:2], **fields[2]).per_layer_config[0]
    assert found["channels"] == (config.num_filter_groups or config.gtu_dim)
    assert found.get("generated", [True]) == [True] * len(found.get("generated", [True]))
    assert found["saved"]


def test_two_processes_are_one(two):
    for name in tensor_ranks.CASES:
        check(two[name], name)


def check_what_is_divided(found: dict[str, dict]):
    """All that belongs to channels, unless all channels of two processes share a denominator.

    PyTorch 2.11 cannot divide the rows of two filters.
    """
    filters = [] if DIVIDES_FILTERS else ["denominator", "direct", "numerator"]
    replicated = {"explicit-causal": [], "ski-bidirectional": [], "s4d-causal": [], "rtf-causal": []}
    replicated |= {"rtf-bidirectional": filters, "modal-causal": ["angle", "log_rate"]}
    replicated |= {"one denominator": ["denominator", "slack"]}
    assert all(found[name]["replicated"] == replicated[name] for name in replicated.keys() & found.keys())
    assert not any("out.linear" in name for name in found["rpe-causal"]["replicated"])
    if DIVIDES_FILTERS:
        mixers = {"hyena": ["o_proj.bias", "o_proj.weight"], "hyena norm": [], "s4": []}
        assert all(found[name]["replicated of the mixer"] == mixers[name] for name in mixers.keys() & found.keys())


@pytest.mark.slow
@pytest.mark.skipif(transformers.__version__ < "5.23", reason="refuses widths that the processes do not divide")
@pytest.mark.parametrize("world", [2, 4])
def test_processes_are_one(world):
    results = found(world, slow=True)
    for name in (*tensor_ranks.CASES, *tensor_ranks.SLOW):
        check(results[name], name)
    for name, errors in results["heads"].items():
        assert errors["logits"] < 1e-12 and errors["gradients"] < 1e-9, name
    assert {*results["pipeline"]["stages"]} == {*CAUSAL}
    assert all(one["logits"] < 1e-12 and one["same"] for one in results["pipeline"]["stages"].values())
    mixed = results["train mixed"]
    assert mixed["loss"] < 1e-2 and mixed["weights"] < 1e-2, mixed
    if world == 2:
        check_what_is_divided(results)


def test_what_is_divided(two):
    check_what_is_divided(two)


def test_training(two):
    assert two["train"]["loss"] < 1e-5 and two["train"]["weights"] < 1e-5


def test_pipeline(two):
    """What a stage passes on is not scaled, normalised or given positions again; too many stages are refused."""
    assert all(one["logits"] < 1e-12 and one["same"] for one in two["pipeline"]["stages"].values())
    assert two["pipeline"]["refused"] == ["`pp_size` must be at most 1, a stage for each layer, got 2"] * 2
    values = "`pp_size` must be 1 for real values, got a pipeline, which passes on tokens alone"
    assert two["pipeline"]["values"] == [values] * 2


def test_what_cannot_be_divided(two):
    assert two["refuse"]["channels"] == "The GTU must have channels for each of 2 processes, got 1"
    assert two["refuse"]["unknown"].endswith("over processes, got None from RpeOperator")


def test_one_process_is_as_without_a_plan(tmp_path):
    model = TnnForCausalLM(tiny_config()).eval()
    model.save_pretrained(tmp_path / "one")
    loaded = TnnForCausalLM.from_pretrained(tmp_path / "one", distributed_config=DistributedConfig(tp_plan="auto"))
    ids = torch.arange(22).view(2, 11)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert not any("forward" in vars(module) for module in loaded.modules())
    loaded.save_pretrained(tmp_path / "two")
    saved = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("one", "two")]
    assert saved[0] == saved[1] and not any("plan" in field or "distributed" in field for field in saved[0])


def test_restricted_operator():
    """Its coefficients are those of its channels, and the whole operator is unchanged."""
    several = [("rtf", True, {"rtf_num_denominators": count}) for count in (1, 64)]
    for tno_type, causal, fields in [*((*variant, {}) for variant in VARIANTS), *several]:
        operator = build_tno(tiny_config(tno_type, causal, learnable_decay=True, **fields))
        operator.reset_parameters()
        for parameter in operator.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        expected = operator.coefficients(13)
        for parts in (1, 2, 3, 5):
            bounds = [(chunk[0], chunk[-1] + 1) for chunk in torch.arange(64).chunk(parts)]
            chosen = [restricted(operator, range(*pair)) for pair in bounds]
            torch.testing.assert_close(torch.cat([one.coefficients(13) for one in chosen]), expected)
            assert sum(one.channels for one in chosen) == operator.channels == 64
