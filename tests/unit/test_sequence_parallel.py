"""Sequence parallelism: a text over two and four processes, computed as in one."""

import pytest
import torch

from helpers import ranks, sequence_ranks
from helpers.models import slow, tiny_config
from modeling_tnn import SequenceParallel, TnnForCausalLM
from modeling_tnn.parallel.sequence import shares_of


def found(world: int, slow: bool = False) -> dict[str, dict]:
    results = ranks.start(world, slow)
    return {name.removeprefix("sequence: "): case for name, case in results.items() if name.startswith("sequence: ")}


@pytest.fixture(scope="module")
def two():
    return found(2)


def check(errors: dict, name: str):
    """In float64; transformers computes the loss of all logits in float32."""
    assert errors["loss"] < (1e-6 if name == "eager" else 1e-12), errors
    assert errors["logits"] < 1e-12 and errors["gradients"] < 1e-11, errors


def test_two_processes_are_one(two):
    for name in sequence_ranks.USUAL:
        check(two[name], name)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_processes_are_one(world):
    for name in sequence_ranks.CASES:
        check(found(world, slow=True)[name], name)
    mixed = found(world, slow=True)["train mixed"]
    assert mixed["loss"] < 1e-2 and mixed["gradients"] < 3e-2, mixed
    engines = found(world, slow=True)["engines"]
    assert engines["DDP"] < 1e-11 and engines["FSDP2"] < 1e-11, "engines average gradients"


def test_training(two):
    """In float32, with accumulation and checkpoints: each text has the mask and the documents that it had before."""
    assert two["train"]["loss"] < 1e-5 and two["train"]["gradients"] < 1e-5, two["train"]


@pytest.mark.parametrize("world", [2, *slow(4)])
def test_generation_and_the_numbers_that_are_sent(world):
    """After a divided prompt, each process has the state of its channels, and all get the tokens of one process.

    4 B L D / P of each layer are sent from each process; the last P-th of them stays where it is.
    """
    results = found(world, slow=world == 4)
    for errors in results["generate"].values():
        assert errors["same"] == [True] * 3
        assert errors["pieces"] < 1e-12 and errors["last"] < 1e-12 and errors["documents"] < 1e-12
        assert errors["channels"] == 64 // world
    layers, batch, length, channels = 2, 2, 32, 64
    sent = layers * 4 * batch * length * channels // world
    assert results["count"] == {"exchanges": [2 * layers] * 2, "sent": sent, "to others": sent * (world - 1) // world}


def test_what_cannot_be_divided(two):
    errors = two["refuse"]
    assert errors["class"].startswith("`model` must be one of TnnModel, TnnForCausalLM, TnnForMaskedLM, got TnnForSeq")
    assert errors["channels"] == "The GTU must have channels for each of 2 processes, got 1"
    assert errors["batch norm, evaluated"] == ""
    assert errors["batch norm"].endswith("on a divided text, got 'batchnorm'")
    assert errors["twice"] == "`model` must not be divided over processes already, got one that is"
    assert errors["short"].startswith("A text must have at least 2 tokens")
    assert errors["misspelt"].startswith("`atention_mask` is not an argument")
    assert errors["labels"].startswith("`labels` must have shape (B, L) = (2, 23)")
    assert errors["last"].endswith("for a divided text, got int with gradients")
    assert errors["cache"].startswith("A row must be one document when a cache is used")
    assert errors["tuple"] == "tuple"


def test_one_process():
    """It changes nothing, and leaves the model as it was; shares of tokens differ by one at most."""
    for count, parts in ((1, 2), (7, 3), (64, 7)):
        shares = shares_of(count, parts)
        assert [i for share in shares for i in share] == list(range(count))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model, ids = TnnForCausalLM(tiny_config()).eval(), torch.arange(22).view(2, 11)
        expected = model(ids, labels=ids, skip_logits=True).loss
        with SequenceParallel(model, torch.distributed.init_device_mesh("cpu", (1,))):
            torch.testing.assert_close(model(ids, labels=ids, skip_logits=True).loss, expected)
        assert torch.equal(model(ids, labels=ids, skip_logits=True).loss, expected)
    finally:
        torch.distributed.destroy_process_group()
