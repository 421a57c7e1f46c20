"""Public entry points with arguments of any type, shape and dtype: an answer, or an error that says which.

What is answered is what the plain oracle answers, and what is refused is a ValueError or TypeError that names an
argument. hypothesis draws the arguments; `--hypothesis-profile thorough` tries twenty times as many (see conftest.py).
"""

import contextlib
import functools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from helpers.models import BIDIRECTIONAL, CAUSAL, relative_error, seeded, tiny_config
from modeling_tnn import (
    TnnForCausalLM,
    TnnForImageClassification,
    TnnForMaskedLM,
    TnnForSequenceClassification,
    TnnModel,
    causal_toeplitz_matmul,
    dense_toeplitz,
    toeplitz_matmul,
)
from modeling_tnn.tools.sequence_pairs import TnnForSequencePairClassification

DTYPES = (
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.cfloat,
)
CLOSE = 1e-5


@functools.cache
def model_of(head, tno_type: str, causal: bool, implementation: str = "fused"):
    fields = {"num_labels": 3, "eos_token_id": None, "tno_implementation": implementation}
    if head is TnnForImageClassification:
        fields |= {"spatial_dims": 2, "image_size": 8, "patch_size": 1, "rpe_layers": 1}
    return seeded(head, tiny_config(tno_type, causal, **fields))


no_tensors = st.sampled_from([[[1, 2]], "text", 3, {}, np.ones((2, 4)), (1, 2), 1.5])


@st.composite
def tensors(draw, *shapes, dtype=torch.int64, high=99):
    """Mostly what fits: one of `shapes`, of `dtype`; else another shape, dtype, or no tensor."""
    if draw(st.integers(0, 9)) == 0:
        return draw(no_tensors)
    shape = draw(st.sampled_from(shapes))
    if draw(st.integers(0, 5)) == 0:
        shape = draw(st.lists(st.integers(0, 5), max_size=4).map(tuple))
    if draw(st.integers(0, 5)) == 0:
        dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator).to(dtype)
    low = -1 if draw(st.integers(0, 9)) == 0 else 0
    return torch.randint(low, high, shape, generator=generator).to(dtype)


def optional(strategy):
    return st.one_of(st.none(), st.none(), strategy)


def attempt(function, arguments: dict):
    """The result of `function`, or None if it refuses an argument by name."""
    try:
        return function(**arguments)
    except (ValueError, TypeError) as error:
        named = [name for name in (*arguments, "sequence") if name in str(error)]
        assert named, f"{type(error).__name__} names no argument: {error}"


def agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.numel() == 0:
        return one.shape == other.shape
    finite = other.isfinite()
    return torch.equal(one.isfinite(), finite) and relative_error(one[finite], other[finite]) < CLOSE


@st.composite
def forward_arguments(draw, head):
    batch, length = draw(st.integers(0, 3)), draw(st.integers(0, 6))
    row, many = (1, length), (batch, length)
    arguments = {
        "input_ids": draw(optional(tensors(many)) if draw(st.integers(0, 3)) == 0 else tensors(many)),
        "attention_mask": draw(optional(tensors(many, row, high=2))),
        "inputs_embeds": draw(optional(tensors((*many, 32), dtype=torch.float32)))
        if draw(st.integers(0, 3)) == 0
        else None,
        "output_hidden_states": draw(st.sampled_from([None, True, False])),
        "return_dict": True,
    }
    if getattr(arguments["inputs_embeds"], "dtype", None) in (torch.float64, torch.bfloat16):  # PyTorch refuses these
        arguments["inputs_embeds"] = arguments["inputs_embeds"].float()
    arguments["position_ids"] = draw(optional(tensors(many, row, high=4)))
    arguments["use_cache"] = draw(st.sampled_from([None, True, False, False]))
    if head in (TnnModel, TnnForCausalLM, TnnForSequenceClassification):
        arguments["past_key_values"] = draw(optional(no_tensors)) if draw(st.integers(0, 5)) == 0 else None
    if head is TnnForCausalLM:
        arguments["logits_to_keep"] = draw(st.integers(0, 9))
    if head is not TnnModel:
        shape = many if head in (TnnForCausalLM, TnnForMaskedLM) else (batch,)
        arguments["labels"] = draw(optional(tensors(shape, high=99 if shape == many else 3)))
    if draw(st.integers(0, 9)) == 0:
        arguments[draw(st.sampled_from(["seq_ids", "mask", "cu_seq_lens"]))] = torch.ones(2, 3)
    return arguments


HEADS = [
    (TnnModel, CAUSAL, True),
    (TnnModel, BIDIRECTIONAL, False),
    (TnnForCausalLM, ["rpe"], True),
    (TnnForMaskedLM, ["ski"], False),
    (TnnForSequenceClassification, ["fd"], False),
    (TnnForSequenceClassification, ["rtf"], True),
]


def check(head, tno_type, causal, arguments):
    """The model answers as with PyTorch's own operations, or refuses an argument by name."""
    output = attempt(model_of(head, tno_type, causal), arguments)
    if output is not None:
        plain = model_of(head, tno_type, causal, "eager")(**arguments)
        name = "logits" if "logits" in output else "last_hidden_state"
        assert agree(output[name], plain[name])


@pytest.mark.parametrize("head, operators, causal", HEADS)
@given(data=st.data())
def test_forward(head, operators, causal, data):
    check(head, data.draw(st.sampled_from(operators)), causal, data.draw(forward_arguments(head)))


@given(st.data())
def test_forward_of_pairs_and_images(data):
    batch, length = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 6))
    labels = data.draw(optional(tensors((batch,), high=3)))
    mask = data.draw(optional(tensors((batch, 2, length), high=2)))
    pairs = {"input_ids": data.draw(tensors((batch, 2, length))), "attention_mask": mask, "labels": labels}
    check(TnnForSequencePairClassification, "rpe", False, pairs)
    side = data.draw(st.sampled_from([8, 8, 4, 5, 0]))
    pixels = data.draw(optional(tensors((batch, 3, side, side), dtype=torch.float32)))
    check(TnnForImageClassification, "rpe", False, {"pixel_values": pixels, "labels": labels})


@given(st.data())
def test_generate(data):
    batch, length = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 6))
    arguments = {"input_ids": data.draw(tensors((batch, length))), "use_cache": data.draw(st.booleans())}
    if data.draw(st.booleans()) and getattr(arguments["input_ids"], "shape", None) == (batch, length):
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
        arguments["attention_mask"] = torch.randint(2, (batch, length), generator=generator)
    model = model_of(TnnForCausalLM, data.draw(st.sampled_from(CAUSAL)), True)

    def generate(**given):
        return model.generate(max_new_tokens=3, do_sample=False, pad_token_id=1, **given)

    output = attempt(generate, arguments)
    if output is not None:
        rows, read = arguments["input_ids"].shape
        assert output.shape == (rows, read + 3 if rows else read)
        assert torch.equal(output, generate(**arguments | {"use_cache": not arguments["use_cache"]}))


STEPS = {
    "crop": lambda draw: {"tokens_to_remove": draw(st.integers(-9, 2))},
    "batch_repeat_interleave": lambda draw: {"repeats": draw(st.integers(1, 3))},
    "batch_select_indices": lambda draw: {"indices": torch.zeros(draw(st.integers(1, 3)), dtype=torch.long)},
    "reorder_cache": lambda draw: {"beam_idx": torch.zeros(2, dtype=torch.long)},
    "reset": lambda draw: {},
    "forward": lambda draw: {
        "input_ids": draw(tensors((2, 1), (2, 3), (1, 2))),
        "attention_mask": draw(optional(tensors((2, 4), high=2))),
    },
}


@given(st.data())
def test_caches(data):
    """Any sequence of calls: an answer or an error; after an error the layers are as they were."""
    model = model_of(TnnForCausalLM, data.draw(st.sampled_from(CAUSAL)), True)
    cache = DynamicCache(config=model.config)
    model(torch.ones(2, 4, dtype=torch.long), past_key_values=cache)
    for _ in range(data.draw(st.integers(1, 5))):
        name = data.draw(st.sampled_from(sorted(STEPS)))
        arguments = STEPS[name](data.draw)
        before = cache.get_seq_length()
        if name == "forward":
            answered = attempt(functools.partial(model, past_key_values=cache), arguments) is not None
            length = before + (arguments["input_ids"].shape[1] if answered else 0)
            assert cache.get_seq_length() == length
            continue
        for layer in cache.layers:
            with contextlib.suppress(IndexError):  # of PyTorch, as in transformers' layers: a cache may have no rows
                attempt(getattr(layer, name), arguments)
    assert all(layer.get_seq_length() == cache.get_seq_length() for layer in cache.layers)


@given(st.data())
def test_to_recurrent(data):
    numbers = st.one_of(st.integers(-1, 40), st.floats(0, 9), no_tensors)
    arguments = {"order": data.draw(numbers), "window": data.draw(numbers), "tolerance": data.draw(optional(numbers))}
    model = model_of(TnnForCausalLM, data.draw(st.sampled_from(["rpe", "fd"])), True)
    converted = attempt(model.to_recurrent, arguments)
    if converted is not None:
        ids = torch.arange(9)[None]
        assert converted[0](ids).logits.isfinite().all()
        # The first taps are exact.
        if arguments["window"] >= 9:
            assert relative_error(converted[0](ids).logits, model(ids).logits) < 1e-4


@pytest.mark.parametrize("causal", [True, False])
@given(data=st.data())
def test_products(causal, data):
    batch, length, channels = (data.draw(st.integers(0, most)) for most in (3, 70, 3))
    taps = data.draw(st.integers(0, 9)) if causal else max(0, 2 * length - 1)
    kernel = data.draw(tensors((channels, taps), dtype=torch.float32))
    v = data.draw(tensors((batch, length, channels), dtype=torch.float32))
    arguments = {"v": v, "kernel" if causal else "coefficients": kernel}
    function = causal_toeplitz_matmul if causal else toeplitz_matmul
    output = attempt(function, arguments)
    if output is not None:
        assert output.shape == v.shape and output.dtype == v.dtype
        assert agree(output.double(), function(**arguments, implementation="eager").double())
    dense = attempt(dense_toeplitz, {"coefficients": kernel})
    if dense is not None:
        size = (kernel.shape[1] + 1) // 2
        assert dense.shape == (kernel.shape[0], size, size)
