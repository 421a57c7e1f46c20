"""What the ablations change: free coefficients, inputs of the position encoder, blocks without GLU; their script."""

import json
import sys
from pathlib import Path

import pytest
import torch
from conftest import lively_language_model, relative_error, seeded, tiny_config
from datasets import Dataset
from operators import random_input, random_operator
from test_padding import padded

from modeling_tnn import TnnForCausalLM, TnnForMaskedLM, TnnModel
from modeling_tnn.rpe import RPE_INPUTS
from modeling_tnn.tno_auto import build_tno
from tnn_scripts import evaluate_lm, run_ablation

ROOT = Path(__file__).parent.parent

RECIPES = sorted((ROOT / "configuration" / "recipes" / "ablations").glob("*.yaml"))
VARIANTS = [{"tno_type": "explicit"}, *({"rpe_input": name} for name in RPE_INPUTS)]
EVERY_VARIANT = pytest.mark.parametrize("fields", VARIANTS, ids=lambda fields: "-".join(fields.values()))


@EVERY_VARIANT
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("length", [1, 2, 17, 64, 100])
def test_equals_its_dense_matrix(fields, causal, length):
    """Values and gradients, also beyond the trained length of 64."""
    operator = random_operator(**{"tno_type": "rpe"} | fields, causal=causal)
    v = random_input(2, length, operator.channels).requires_grad_()
    fast, dense = operator(v), torch.einsum("dij,bjd->bid", operator.dense(length), v)
    assert relative_error(fast, dense) < 1e-12
    inputs = [v, *operator.parameters()]
    options = {"materialize_grads": True, "allow_unused": True}
    gradients = [torch.autograd.grad(y.square().sum(), inputs, **options) for y in (fast, dense)]
    for actual, expected in zip(*gradients, strict=True):
        assert (actual - expected).abs().max() <= 1e-11 * expected.abs().max().clamp(min=1.0)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_free_coefficients_are_the_parameters(causal):
    operator = random_operator("explicit", causal, decay=0.9)
    lags = torch.arange(0 if causal else -63, 64)
    torch.testing.assert_close(operator.coefficients(64), operator.taps * 0.9 ** lags.abs().double())
    assert operator.coefficients(70)[:, -6:].abs().max() == 0
    middle = operator.coefficients(5) if causal else operator.coefficients(64)[:, 59:68]
    torch.testing.assert_close(operator.coefficients(5), middle)


def test_inputs_of_the_position_encoder():
    lags = torch.arange(-3.0, 4)[:, None]
    operators = {name: seeded(build_tno, tiny_config(rpe_input=name)).rpe.in_proj for name in RPE_INPUTS}
    expected = lags / 64 * operators["normalized"].weight.t() + operators["normalized"].bias
    torch.testing.assert_close(operators["normalized"](lags), expected)
    waves = operators["sinusoidal"](lags) - operators["sinusoidal"].bias
    assert waves.shape == (7, 16) and operators["sinusoidal"].weight.shape == (16, 16)
    by_hand = (
        torch.where(torch.arange(16) % 2 == 0, torch.tensor(0.0), torch.tensor(1.0))
        @ operators["sinusoidal"].weight.t()
    )
    torch.testing.assert_close(waves[3], by_hand)


@EVERY_VARIANT
def test_causal_kernels_do_not_depend_on_the_length(fields):
    operator = random_operator(**{"tno_type": "rpe"} | fields, causal=True)
    torch.testing.assert_close(operator.coefficients(100)[:, :7], operator.coefficients(7))


@EVERY_VARIANT
def test_cached_is_uncached(fields):
    """Generation goes on beyond the trained length."""
    model, prompts = lively_language_model(decay=0.9, **fields), torch.randint(2, 99, (2, 58))
    options = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(model.generate(prompts, **options), model.generate(prompts, use_cache=False, **options))


@EVERY_VARIANT
def test_padding_changes_nothing_and_saving_neither(fields, tmp_path):
    model, text = seeded(TnnModel, tiny_config(causal=False, **fields)), torch.randint(99, (23,))
    bare = model(text[None]).last_hidden_state
    actual = model(**padded(text, 7, 9)).last_hidden_state[:, 7:30]
    assert relative_error(actual, bare) < 5e-6
    model.save_pretrained(tmp_path)
    assert torch.equal(TnnModel.from_pretrained(tmp_path)(text[None]).last_hidden_state, bare)


def test_block_without_glu():
    """It is the block whose GLU adds nothing."""
    with_glu = seeded(TnnModel, tiny_config())
    without, text = seeded(TnnModel, tiny_config(use_glu=False)), torch.randint(99, (1, 9))
    assert not any(".glu." in name for name, _ in without.named_parameters())
    without.load_state_dict(with_glu.state_dict(), strict=False)
    with torch.no_grad():
        for layer in with_glu.layers:
            layer.glu.down_proj.weight.zero_(), layer.glu.down_proj.bias.zero_()
    torch.testing.assert_close(without(text).last_hidden_state, with_glu(text).last_hidden_state)


def test_free_kernel_converts_to_a_recurrence():
    model, text = seeded(TnnForCausalLM, tiny_config("explicit", decay=0.9)).double(), torch.randint(99, (1, 40))
    converted, report = model.to_recurrent(order=64, window=40)
    assert relative_error(converted(text).logits, model(text).logits) < 1e-6 and len(report) == 2


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_recipe_is_read(recipe, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run_ablation.py", "--recipe", str(recipe)])
    args, _ = run_ablation.parse_arguments([run_ablation.AblationArguments, run_ablation.TrainingArguments], "")
    configs = [args.variant_config(variant).to_dict() for variant in args.variants]
    assert len({json.dumps(config, sort_keys=True) for config in configs}) == len(args.variants)


def test_script(monkeypatch, tmp_path, capsys):
    text, small = tmp_path / "text.txt", "hidden_size=16,num_hidden_layers=1,max_position_embeddings=16,vocab_size=300"
    text.write_text("The quick brown fox jumps over the lazy dog.\n" * 300)
    options = ["--config_overrides", small, "--max_steps", "2", "--save_strategy", "no", "--longer", "70"]
    options += ["--eval_tokens", "100"]
    variants = ["rpe", "explicit:tno_type=explicit", "masked:causal=false"]
    command = ["run_ablation.py", "--dataset_name", text, "--output_dir", tmp_path / "out", *options, "--variants"]
    monkeypatch.setattr(sys, "argv", list(map(str, [*command, *variants])))
    run_ablation.main()
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["variant"] for row in results["rows"]] == ["rpe", "explicit", "masked"]
    assert all(list(row["perplexity"]) == ["16", "70"] and row["steps"] == 2 for row in results["rows"])
    assert [row["scored_tokens"] for row in results["rows"]][:2] == [99, 99]
    assert "| variant | perplexity at 16 | perplexity at 70 |" in capsys.readouterr().out


def test_every_length_scores_the_same_tokens():
    """Predicted ones: all but the first. Masked ones: the same masks at each length, of rows that are not padded."""
    tokenizer = run_ablation.tokenizer_for(Dataset.from_dict({"text": ["The quick brown fox."]}), 300)
    ids = torch.randint(260, (100,), generator=torch.Generator().manual_seed(0))
    causal, masked = (
        seeded(model, tiny_config(causal=model is TnnForCausalLM, vocab_size=300)).eval()
        for model in (TnnForCausalLM, TnnForMaskedLM)
    )
    for length in (16, 33, 64, 99, 100):
        loss, count = run_ablation.score(causal, ids, tokenizer, length, 40)
        expected = evaluate_lm.evaluate(causal, ids, length, None, 1000)
        assert count == expected["tokens"] == 99 and loss == pytest.approx(expected["loss"], rel=1e-6)
        found = [run_ablation.score(masked, ids, tokenizer, length, rows * length) for rows in (1, 3)]
        assert found[0] == pytest.approx(found[1], rel=1e-6)
        assert found[0][1] == (run_ablation.mask(ids, tokenizer)[1] != -100).sum() and 5 < found[0][1] < 30
    (hidden, labels), losses = run_ablation.mask(ids, tokenizer), []
    for start in range(0, 100, 33):
        row = slice(start, start + 33)
        logits = masked(hidden[None, row]).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits, labels[row], reduction="sum").item())
    loss, count = run_ablation.score(masked, ids, tokenizer, 33, 99)
    assert sum(losses) / count == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    "variants, message",
    [
        (["a:width=3"], "--variants a: a TnnConfig has no field width"),
        (["a:decay=2"], r"--variants a: decay=2 .* in \(0, 1\]"),
        (["a", "a:decay=1"], "--variants: a, a are not all different names"),
    ],
)
def test_refused_variants(variants, message):
    with pytest.raises(ValueError, match=message):
        run_ablation.AblationArguments(variants=variants)
