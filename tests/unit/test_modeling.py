"""Whole models: initialisation, losses of Trainer, precision, graphs, lengths; of heads, see `test_heads.py`."""

import math

import pytest
import torch
from transformers import Trainer, TrainingArguments

from helpers.hybrids import HYBRIDS
from helpers.models import VARIANTS, relative_error, seeded, tiny_config
from modeling_tnn import TnnForCausalLM, TnnForMaskedLM, TnnModel

LANGUAGE_MODELS = {True: TnnForCausalLM, False: TnnForMaskedLM}


def batch(length=19, rows=3) -> dict[str, torch.Tensor]:
    """Ids and a mask with padding on the right of the second row."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[1, -length // 3 :] = 0
    return {"input_ids": torch.randint(99, (rows, length), generator=generator), "attention_mask": mask}


def labels() -> torch.Tensor:
    return batch()["input_ids"].masked_fill(batch()["attention_mask"] == 0, -100)


def language_model(variant=("rpe", True), **fields):
    return seeded(LANGUAGE_MODELS[variant[1]], tiny_config(*variant, **fields))


def test_padding_tokens_in_the_loss_have_ordinary_gradients():
    """The last padding token on the left predicts the first real one."""
    input_ids = torch.cat([torch.full((2, 5), 1), batch(rows=2)["input_ids"]], dim=1)
    mask = (torch.arange(24) >= 5).long().expand(2, -1)
    for fields in ({"initializer": "torch"}, {"initializer": "normal"}, {"norm_position": "post"}):
        model = language_model(hidden_dropout_prob=0.0, **fields)
        model(input_ids, attention_mask=mask, labels=input_ids.masked_fill(mask == 0, -100)).loss.backward()
        assert torch.nn.utils.get_total_norm(parameter.grad for parameter in model.parameters()) < 100


def test_label_smoothing_of_trainer(tmp_path):
    """The loss of a causal model is that of the next tokens, smoothed or not; padding has no part in it."""
    model = language_model()
    trainer = Trainer(model, TrainingArguments(tmp_path, label_smoothing_factor=0.2, use_cpu=True, report_to="none"))
    loss = trainer.compute_loss(model, batch() | {"labels": labels()})
    scores = model(**batch()).logits[:, :-1].log_softmax(dim=-1)
    real, targets = labels()[:, 1:] != -100, labels()[:, 1:].clamp(min=0)
    likelihood = scores.gather(-1, targets[..., None])[..., 0][real].mean()
    torch.testing.assert_close(loss, -0.8 * likelihood - 0.2 * scores[real].mean())


def test_logits_to_keep():
    model = language_model()
    every = model(**batch()).logits
    for kept, positions in ((1, [-1]), (5, slice(-5, None)), (torch.tensor([0, 7]), [0, 7])):
        torch.testing.assert_close(model(**batch(), logits_to_keep=kept).logits, every[:, positions])


@pytest.mark.parametrize("tied", [True, False])
def test_resize_token_embeddings(tied):
    for causal, fields in ((True, {}), (False, {}), (True, HYBRIDS["full"])):
        model = language_model(("rpe", causal), tie_word_embeddings=tied, **fields)
        before = model(**batch()).logits
        model.resize_token_embeddings(120)
        after = model(**batch()).logits
        assert after.shape[-1] == model.config.vocab_size == 120
        torch.testing.assert_close(after[..., :99], before)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        model(torch.tensor([[119]]))


def test_training_under_autocast(variant):
    """Of every operator, in half precision too; of every norm."""
    norms = ("simplermsnorm", "rmsnorm", "gatedrmsnorm", "scalenorm", "layernorm") if variant == ("rpe", True) else ()
    for norm in (None, *norms):
        fields = {"norm_type": norm, "gtu_norm": True} if norm else {}
        model = language_model(variant, **fields)
        exact = model(**batch()).logits
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.train()(**batch(), labels=labels()).loss
        loss.backward()
        assert all(p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in model.parameters())
        assert relative_error(model.eval().bfloat16()(**batch()).logits, exact) < 0.05, norm


@pytest.mark.parametrize(
    "initializer, deviation", [("torch", 32**-0.5), ("normal", 0.05), ("small_embeddings", 32**-0.75)]
)
def test_initialisation(initializer, deviation):
    config = tiny_config("rpe", False, initializer=initializer, initializer_range=0.05, vocab_size=5000)
    model = seeded(TnnForMaskedLM, config)
    embeddings, linear = model.model.embed_tokens.weight, model.model.layers[0].mixer.u_proj
    assert embeddings.std().item() == pytest.approx(deviation, rel=0.02)
    bound = 32**-0.5
    assert not model.lm_head.bias.any()
    if initializer == "normal":
        assert linear.weight.std().item() == pytest.approx(0.05, rel=0.1) and linear.bias.abs().max() == 0
    else:
        assert bound * 0.95 < linear.weight.abs().max() <= bound and linear.bias.abs().max() > 0


# Of commit 1c5047e: the first three embeddings, and weights of the last output projection.
FIRST_WEIGHTS = {
    "torch": [-0.041459, -0.208515, 0.190742, 0.019053, 0.039766, 0.096523],
    "normal": [-0.004749, 0.007069, -0.04192, 0.016341, -0.00146, 0.001901],
    "normal_gtu": [-0.041459, -0.208515, 0.190742, -0.026095, -0.025496, 0.000718],
}


@pytest.mark.parametrize("initializer", FIRST_WEIGHTS)
def test_equal_seeds_give_the_weights_of_earlier_versions(initializer):
    model = seeded(TnnForCausalLM, tiny_config(initializer=initializer)).model
    found = [*model.embed_tokens.weight[0, :3].tolist(), *model.layers[1].mixer.o_proj.weight[0, :3].tolist()]
    assert found == pytest.approx(FIRST_WEIGHTS[initializer], abs=1e-6)


def test_a_new_language_model_prefers_no_word():
    """With embeddings of width 1, tied, the token just read is preferred: ln V + 2 here, more in wider models."""
    fields = {"hidden_size": 64, "vocab_size": 1000, "scale_embedding": True, "initializer": "small_embeddings"}
    text = torch.randint(1000, (2, 64), generator=torch.Generator().manual_seed(0))
    for variant in VARIANTS:
        for tied in (True, False):
            model = language_model(variant, tie_word_embeddings=tied, **fields)
            loss = model(input_ids=text, labels=text.roll(-1, 1)).loss.item()
            assert loss == pytest.approx(math.log(1000), abs=0.3), variant


def test_dropout_is_applied_in_training_only():
    model = seeded(TnnModel, tiny_config(hidden_dropout_prob=0.5))
    assert torch.equal(model(**batch())[0], model(**batch())[0])
    model.train()
    assert not torch.equal(model(**batch())[0], model(**batch())[0])
