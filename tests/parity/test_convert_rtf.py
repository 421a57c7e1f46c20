"""Conversion of the models of the released RTF code in their own backbones, against a restatement of their formulas.

There is no released checkpoint to compare with: the weights are random. Bidirectional models of an odd length are
compared with the intended product, which the released code misses (golden vectors, section 5.4).
"""

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from helpers.released_rtf import affine, affine_of, hyena_logits, hyena_state, normal, pooled, s4_features, s4_state
from helpers.scripts import run
from tnn_programs.original.conversion import convert

TRUNCATION, WIDTH, CLASSES = 17, 6, 3
LENGTHS = [11, 7, 1]
SHORT = {"trunc_len": TRUNCATION}


def words() -> dict:
    return {"encoder.0.weight": normal(torch.Generator().manual_seed(1), 13, WIDTH)}


def classifier() -> dict:
    return affine(torch.Generator().manual_seed(2), "decoder.0.output_transform", CLASSES, WIDTH)


def texts(vocabulary: int = 13) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and the mask of texts of `LENGTHS`, padded at the end."""
    ids = torch.randint(vocabulary, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(5))
    return ids, torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]


def check_equal(converted: torch.Tensor, expected: torch.Tensor):
    torch.testing.assert_close(converted, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("form", [
    {"prenorm": False}, {"prenorm": True, "num_a": 6}, {"batch": False, "num_a": 2}, {"sides": 1},
])  # fmt: skip
def test_text_models(form, tmp_path):
    state = s4_state(words(), classifier(), **form)
    norm = {"prenorm": form.get("prenorm", True), "norm": "batch" if form.get("batch", True) else "layer"}
    model, report = convert(state, SHORT | norm, "rtf-listops")
    assert report["tensors"].keys() == state.keys() and not any("left" in name for name in report["tensors"].values())
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float64)
    ids, mask = texts()
    with torch.no_grad():
        logits = loaded(ids, attention_mask=mask).logits
    features = s4_features(state["encoder.0.weight"][ids], state, TRUNCATION, LENGTHS)
    check_equal(logits, affine_of(pooled(features, LENGTHS), state, "decoder.0.output_transform"))


@pytest.mark.parametrize(("architecture", "mean", "deviation"), [
    ("rtf-cifar", 122.6 / 255, 61 / 255), ("rtf-pathfinder", 0.5, 0.5), ("rtf-pathx", 0.5, 0.5),
])  # fmt: skip
def test_models_of_pictures(architecture, mean, deviation):
    """The released model gets normalised grey values; the converted one gets the values themselves as tokens."""
    state = s4_state(affine(torch.Generator().manual_seed(1), "encoder.0", WIDTH, 1), classifier())
    model, report = convert(state, SHORT, architecture)
    assert model.config.vocab_size == 256 and "embedding" in report["tensors"]["encoder.0.bias"]
    pixels = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(6))
    encoded = affine_of((pixels[..., None].double() / 255 - mean) / deviation, state, "encoder.0")
    with torch.no_grad():
        logits = model(pixels).logits
    features = s4_features(encoded, state, TRUNCATION)
    check_equal(logits, affine_of(pooled(features), state, "decoder.0.output_transform"))


def test_models_of_pairs():
    """The head of Retrieval sees [a, b, a - b, a * b]; the batch holds all first texts before all second ones."""
    generator, head = torch.Generator().manual_seed(2), "decoder.0.retrieval.classifier."
    layers = affine(generator, f"{head}0", WIDTH, 4 * WIDTH) | affine(generator, f"{head}2", 2, WIDTH)
    state = s4_state(words(), layers)
    model, _ = convert(state, SHORT, "rtf-aan")
    ids, mask = texts()
    pairs = torch.stack([ids, ids.flip(0)], dim=1), torch.stack([mask, mask.flip(0)], dim=1)
    with torch.no_grad():
        logits = model(pairs[0], attention_mask=pairs[1]).logits
    both, lengths = torch.cat([ids, ids.flip(0)]), LENGTHS + LENGTHS[::-1]
    features = pooled(s4_features(state["encoder.0.weight"][both], state, TRUNCATION, lengths), lengths)
    a, b = features.chunk(2)
    hidden = affine_of(torch.cat([a, b, a - b, a * b], dim=-1), state, f"{head}0").relu()
    check_equal(logits, affine_of(hidden, state, f"{head}2"))


@pytest.mark.parametrize("form", [{}, {"low_rank": None, "constraint": False, "num_a": 2}, {"taps": 4}])
def test_language_model(form, tmp_path):
    """The logits, and tokens that the cached model writes."""
    state = hyena_state(**form)
    constraint = {"constraint": "l1_montel" if form.get("constraint", True) else "no"}
    model, report = convert(state, SHORT | constraint, "hyena_rtf")
    assert report["tensors"].keys() == state.keys()
    assert report["tensors"]["model.lm_head.weight"] == "left out: tied to the input embedding"
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    ids, _ = texts(19)
    with torch.no_grad():
        check_equal(loaded(ids).logits, hyena_logits(ids, state, TRUNCATION))
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    written = loaded.generate(ids, attention_mask=torch.ones_like(ids), **options)
    for step in range(5):
        here = ids.shape[1] + step
        assert torch.equal(hyena_logits(written[:, :here], state, TRUNCATION)[:, -1].argmax(-1), written[:, here])


def test_script_reads_a_file_of_lightning(tmp_path):
    content = {"state_dict": hyena_state(), "epoch": 3, "optimizer_states": [{"state": {}}], "loops": {}}
    torch.save(content, tmp_path / "last.ckpt")
    (tmp_path / "hparams.json").write_text(json.dumps(SHORT))
    options = ["--architecture", "hyena_rtf", "--hparams", tmp_path / "hparams.json"]
    assert "TnnForCausalLM" in run("convert_original", tmp_path / "last.ckpt", tmp_path / "out", *options).stdout


STATES = {"rtf-listops": lambda: s4_state(words(), classifier()), "hyena_rtf": hyena_state}
# Architecture, options, tensors that are added (their size) or left out (None, by pattern), and the message.
REFUSED = [
    ("rtf-listops", {"final_act": "gelu"}, {}, "final_act must be 'glu' for a conversion, got 'gelu'"),
    ("rtf-listops", {"prenorm": False}, {}, "prenorm must be True, as in the weights .*, got False"),
    ("rtf-listops", {"norm": "layer"}, {}, "norm must be 'batch', as in the weights .*, got 'layer'"),
    ("rtf-listops", {}, {"model.layers.0.reverse_layer.layer.ab": 2}, "bidirectional of the model .*must be off"),
    ("rtf-listops", {}, {"model.layers.0.layer.layer.kernel.C": 2}, "other than 'rtf' must be off .*kernel.C"),
    ("rtf-listops", {}, {"model.layers.1.extra.weight": 2}, "Unexpected .*model.layers.1.extra.weight"),
    ("rtf-listops", {}, {"encoder.0.bias": WIDTH}, "dataset must be one of cifar, pathfinder, .*, got None and 6"),
    ("rtf-listops", {}, {"layers.1.layer.output_linear.0.bias": None}, "Missing .*layers.1.mixer.o_proj.bias"),
    ("rtf-listops", {}, {"layers.0.layer.layer.ab": None}, "must hold filters of RTF, ab and h_0"),
    ("rtf-listops", {}, {r"\.(running_mean|running_var|num_batches_tracked)$": None}, "norm must be 'layer'"),
    ("rtf-listops", {}, {r"^model\.norm\.": None}, "prenorm must be False, as in the weights"),
    ("hyena_rtf", {"num_heads": 2}, {}, "num_heads must be 1 for a conversion, got 2"),
    ("hyena_rtf", {}, {"model.backbone.embeddings.position_embeddings.weight": 2}, "max_position_embeddings must be"),
    ("hyena_rtf", {}, {"model.backbone.layers.0.mixer.Wqkv.weight": 2}, "attn_layer_idx must be off"),
    ("hyena_rtf", {}, {r"filter_fn\.scalar$": None}, "constraint must be 'no', as in the weights"),
]


def test_what_does_not_fit():
    for architecture, options, changes, message in REFUSED:
        lost = [name for name, size in changes.items() if size is None]
        state = {n: v for n, v in STATES[architecture]().items() if not any(re.search(part, n) for part in lost)}
        state |= {name: torch.zeros(size).double() for name, size in changes.items() if size is not None}
        with pytest.raises(ValueError, match=message):
            convert(state, SHORT | options, architecture)
