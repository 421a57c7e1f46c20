"""The tests that every head inherits: a subclass gives the class of each direction, and what its labels are.

    class TestTokenClassification(TextHeadTests):
        heads = both(TnnForTokenClassification)

        def labels(self, ids, mask):
            return {"labels": (ids % 2).where(mask, -100)}

pytest then runs each test below in the directions that the head has. A subclass with other `fields` asks all of it of
another mixer, norm or operator.
"""

import copy
import pickle

import pytest
import torch
from transformers import (
    AutoModelForAudioClassification,
    AutoModelForImageClassification,
    AutoModelForTimeSeriesPrediction,
)

from helpers.models import AUTO, UNALIGNED, checkpoint_activations, relative_error, seeded, slow, tiny_config
from modeling_tnn import (
    TnnForAudioClassification,
    TnnForCausalLM,
    TnnForImageClassification,
    TnnForMaskedLM,
    TnnForTimeSeriesPrediction,
    TnnModel,
)

TEXTS = [torch.randint(3, 99, (n,), generator=torch.Generator().manual_seed(n)) for n in (1, 5, 17, 9)]
IDS = torch.randint(3, 99, (3, 11), generator=torch.Generator().manual_seed(0))
HOLES = torch.tensor([[0, 1, 0, 1, 1, 0, 0, 1, 0, 1, 0], [1] * 7 + [0] * 4, [0] * 11]).bool()  # the last row is empty
ONES = torch.ones(2, 5, dtype=torch.long)
REFUSED = [
    ({"input_ids": [[1, 2]]}, r"`input_ids` must be a tensor of shape .*, got list"),
    ({"input_ids": ONES.float()}, "`input_ids` must hold torch.int64 or torch.int32, got torch.float32"),
    ({"input_ids": ONES.bool()}, "`input_ids` must hold .*, got torch.bool"),
    ({"input_ids": ONES + 98}, r"Entries of `input_ids` must be in \[0, vocab_size=99\), got 99"),
    ({"input_ids": ONES - 2}, r"Entries of `input_ids` must be in \[0, vocab_size=99\), got -1"),
    ({"input_ids": ONES[0]}, r"`input_ids` must have shape .*, got \(5,\)"),
    ({"input_ids": ONES[:, :0]}, r"length of the sequence must be at least 1, got \(2, 0, 32\)"),
    ({"input_ids": ONES, "attention_mask": [[1] * 5] * 2}, "`attention_mask` must be a tensor .*, got list"),
    ({"input_ids": ONES, "attention_mask": ONES.numpy()}, "`attention_mask` must be a tensor .*, got ndarray"),
    ({"input_ids": ONES, "attention_mask": {}}, "`attention_mask` must be a tensor .*, got dict"),
    ({"input_ids": ONES, "attention_mask": torch.ones(3, 5)}, r"`attention_mask` must have shape .*, got \(3, 5\)"),
    ({"input_ids": ONES, "attention_mask": torch.ones(2, 4)}, r"`attention_mask` .* \(2, 5\), got \(2, 4\)"),
    ({"input_ids": ONES, "attention_mask": torch.ones(2, 1, 5, 5)}, r"`attention_mask` .*, got \(2, 1, 5, 5\)"),
    ({"inputs_embeds": torch.ones(2, 5, 31)}, r"`inputs_embeds` must have shape \(B, L, 32\), got"),
    ({"inputs_embeds": torch.ones(2, 32)}, r"`inputs_embeds` must have shape \(B, L, 32\), got \(2, 32\)"),
    ({"inputs_embeds": torch.ones(2, 5, 32).long()}, "`inputs_embeds` must hold torch.float32 or"),
    ({"input_ids": ONES, "position_ids": [0, 1]}, "`position_ids` must be a tensor"),
    ({"input_ids": ONES, "seq_ids": ONES}, "`seq_ids` is not an argument of this model"),
    ({}, "Exactly one of `input_ids` and `inputs_embeds` must be given, got none"),
]


OTHER_AUTO = {
    TnnForAudioClassification: AutoModelForAudioClassification,
    TnnForImageClassification: AutoModelForImageClassification,
    TnnForTimeSeriesPrediction: AutoModelForTimeSeriesPrediction,
}


# What depends on the class and not on the direction; `make test-slow` has the other one too.
IN_ONE_DIRECTION = ("test_save_and_load", "test_half_precision")


def both(head: type) -> dict[bool, type]:
    """A head that may be causal or not."""
    return dict.fromkeys((True, False), head)


def around(texts: list[torch.Tensor], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The texts as one batch with tokens that mean something around them, and where they are real, both `(B, L)`."""
    length = max(map(len, texts)) + 3
    ids, mask = torch.full((len(texts), length), 7), torch.zeros(len(texts), length, dtype=torch.bool)
    for row, text in enumerate(texts):
        first = {"left": length - len(text), "right": 0, "both": 2}[side]
        ids[row, first : first + len(text)], mask[row, first : first + len(text)] = text, True
    return ids, mask


class HeadTests:
    """Properties of a head of texts or images; see above.

    Attributes:
        heads: the class for each direction, causal or not.
        fields: fields of its configuration.
        refused: arguments and the words of the error.
        silent: ends of names of parameters that no loss depends on.
    """

    heads: dict[bool, type] = {}
    fields: dict = {}
    refused: list[tuple[dict, str]] = []
    silent: tuple[str, ...] = ()

    def pytest_generate_tests(self, metafunc):
        if "causal" in metafunc.fixturenames:
            names = ["causal" if causal else "bidirectional" for causal in self.heads]
            directions = list(self.heads)
            if metafunc.function.__name__ in IN_ONE_DIRECTION and len({*self.heads.values()}) == 1:
                directions = directions[:1] + slow(*directions[1:])
            metafunc.parametrize("causal", directions, ids=names)

    def build(self, causal: bool, **fields):
        config = tiny_config(**{"causal": causal, "hidden_dropout_prob": 0.0} | self.fields | fields)
        return seeded(self.heads[causal], config)

    def batch(self) -> dict:
        """Three rows, with their labels."""
        raise NotImplementedError

    def answers(self, outputs) -> torch.Tensor:
        return outputs.logits

    def loss(self, outputs) -> torch.Tensor:
        return outputs.loss

    def gradients(self, model, batch: dict) -> list[torch.Tensor]:
        model.zero_grad()
        self.loss(model(**batch)).backward()
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]

    def test_outputs(self, causal):
        """As a tuple too, with the states of each layer; the loss is one number."""
        model, states = self.build(causal), []
        with model.base_model.register_forward_hook(lambda module, args, given: states.append(given[0])):
            outputs = model(**self.batch(), output_hidden_states=True)
        as_tuple = model(**self.batch(), output_hidden_states=True, return_dict=False)
        for one, other in zip(as_tuple, outputs.to_tuple(), strict=True):
            assert not isinstance(one, torch.Tensor) or torch.equal(one, other)
        assert len(outputs.hidden_states) == model.config.num_hidden_layers + 1
        assert all(one.shape == states[0].shape for one in outputs.hidden_states)
        assert torch.equal(outputs.hidden_states[-1], states[0])
        assert self.loss(outputs).ndim == 0 and self.loss(outputs).isfinite()
        model.config.return_dict = False
        assert torch.equal(model(**self.batch())[0], as_tuple[0])

    def test_every_parameter_gets_a_gradient(self, causal):
        """The same one where activations are computed again."""
        model = self.build(causal, norm_type="gatedrmsnorm", learnable_decay=True).train()
        expected = self.gradients(model, self.batch())
        for (name, _), gradient in zip(model.named_parameters(), expected, strict=True):
            assert gradient.isfinite().all(), name
            assert gradient.abs().max() > 0 or name.endswith(self.silent), name
        for reentrant in (True, False):
            checkpoint_activations(model, {"use_reentrant": reentrant})
            assert all(layer.gradient_checkpointing for layer in model.base_model.layers)
            for found, gradient in zip(self.gradients(model, self.batch()), expected, strict=True):
                assert relative_error(found, gradient) < 1e-5

    def test_half_precision(self, causal):
        """A model in half precision, and autocast, stay close to float32; autocast has gradients in float32."""
        for dtype, tolerance in ((torch.bfloat16, 0.05), (torch.float16, 0.01)):
            model, batch = self.build(causal), self.batch()
            exact = self.answers(model(**batch))
            with torch.autocast("cpu", dtype):
                outputs = model(**batch)
            self.loss(outputs).backward()
            assert all(p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in model.parameters())
            rounded = {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}
            half = self.answers(model.to(dtype)(**rounded))
            assert half.dtype == dtype
            assert relative_error(self.answers(outputs), exact) < tolerance and relative_error(half, exact) < tolerance

    def test_save_and_load(self, causal, tmp_path):
        """Bit for bit, by the class and by its Auto class; copies too."""
        model, batch = self.build(causal), self.batch()
        expected = self.answers(model(**batch))
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(self.answers(twin(**batch)), expected)
        model.save_pretrained(tmp_path)
        head, autos = self.heads[causal], AUTO | OTHER_AUTO
        for cls in {head, autos.get(head, head)}:
            loaded = cls.from_pretrained(tmp_path)
            assert type(loaded) is head and relative_error(self.answers(loaded(**batch)), expected) < UNALIGNED
            assert all(torch.equal(loaded.state_dict()[n], weight) for n, weight in model.state_dict().items())

    def test_refused(self, causal):
        model = self.build(causal)
        for given, words in self.refused:
            with pytest.raises((TypeError, ValueError), match=words):
                model(**given)


class TextHeadTests(HeadTests):
    """Properties of a head of texts, over those of all heads.

    Attributes:
        per_token: whether it answers for each token, or once for a row.
        packs: whether a row may be several documents; if not, the loss is a mean over rows.
        sizes: numbers of rows of a batch: with one without tokens, without it, and none.
        name: the argument that the embeddings replace.
    """

    name = "input_ids"
    per_token, packs, sizes = True, True, (3, 2, 0)

    def given(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> dict:
        """Arguments of the model for texts `(B, L)`."""
        return {"input_ids": ids} | ({} if mask is None else {"attention_mask": mask.long()})

    def labels(self, ids: torch.Tensor, mask: torch.Tensor) -> dict:
        return {}

    def labelled(self, ids: torch.Tensor, mask: torch.Tensor) -> dict:
        return self.given(ids, mask) | self.labels(ids, mask)

    def batch(self) -> dict:
        ids, mask = around(TEXTS[1:], "right")
        return self.labelled(ids, mask)

    def test_padding(self, causal):
        """On each side of texts of other lengths: answers and loss are those of the texts alone."""
        model = self.build(causal).double()
        alone = [model(**self.labelled(text[None], torch.ones(1, len(text)).bool())) for text in TEXTS]
        for side in ("left", "right", "both"):
            ids, mask = around(TEXTS, side)
            outputs = model(**self.labelled(ids, mask))
            for row, one in enumerate(alone):
                answer = self.answers(outputs)[row][mask[row] if self.per_token else ...]
                assert relative_error(answer, self.answers(one)[0]) < 1e-9, side
            if "loss" in outputs:
                counts = [self.count(text[None], torch.ones(1, len(text)).bool()) for text in TEXTS]
                total = sum(one.loss.nan_to_num() * count for one, count in zip(alone, counts, strict=True))
                assert outputs.loss.item() == pytest.approx(total.item() / sum(counts), rel=1e-6), side
        assert self.packs or not model.accepts_loss_kwargs
        if self.packs and "loss" in outputs:  # Trainer's number for accumulated gradients
            found = model(**self.labelled(ids, mask), num_items_in_batch=torch.tensor(2 * sum(counts))).loss
            assert found.item() == pytest.approx(outputs.loss.item() / 2, rel=1e-5)

    def count(self, ids: torch.Tensor, mask: torch.Tensor) -> int:
        """The number of answers that the loss is a mean of."""
        return int((self.labels(ids, mask)["labels"] != -100).sum()) if self.packs else len(ids)

    def test_padding_reaches_nothing(self, causal):
        """NaN and infinity at padding, in holes too, change neither answers nor gradients, which do not reach it."""
        model, results = self.build(causal), []
        given = self.given(IDS, HOLES)
        embeds = model.get_input_embeddings()(given.pop(self.name)).detach()
        padding = given["attention_mask"][..., None] == 0
        for filler in (0.5, torch.nan, torch.inf):
            model.zero_grad()
            filled = embeds.masked_fill(padding, filler).requires_grad_()
            answers = self.answers(model(inputs_embeds=filled, **given))
            assert answers.isfinite().all()
            real = answers[HOLES] if self.per_token else answers[:2]
            real.square().sum().backward()
            results.append([real, filled.grad, *(p.grad for p in model.parameters() if p.grad is not None)])
        for clean, *poisoned in zip(*results, strict=True):
            assert clean.isfinite().all() and all(torch.equal(clean, one) for one in poisoned)
        gradient = results[0][1]
        assert gradient.masked_select(padding).abs().max() < 1e-5 * gradient.abs().max()

    def test_rows_without_tokens(self, causal):
        """An empty row leaves the others, and a batch may have no rows."""
        model = self.build(causal)
        three, two, *none = (self.answers(model(**self.given(IDS[:n], HOLES[:n]))) for n in self.sizes)
        assert three.isfinite().all() and relative_error(three[:2], two) < 5e-6
        for one in none:
            assert one.shape == (0, *three.shape[1:])
            one.sum().backward()

    def test_equal_inputs(self, causal):
        """A mask of ones is none, whatever its type, and embeddings are their tokens."""
        model, given = self.build(causal), self.given(IDS, torch.ones_like(IDS))
        expected, mask = self.answers(model(**self.given(IDS))), given["attention_mask"]
        for dtype in (torch.int64, torch.bool, torch.float32):
            assert torch.equal(self.answers(model(**given | {"attention_mask": mask.to(dtype)})), expected)
        embeds = model.get_input_embeddings()(given[self.name])
        assert torch.equal(self.answers(model(inputs_embeds=embeds, attention_mask=mask)), expected)

    def test_packed_rows(self, causal):
        """Documents in a row are alone, values and gradients; a head with one answer for a row refuses them."""
        model = self.build(causal).double()
        given = self.given(torch.cat(TEXTS)[None])
        positions = torch.cat([torch.arange(len(text)) for text in TEXTS])
        rows = self.given(IDS[:1], IDS[:1])["attention_mask"].flatten(0, -2).shape[0]
        given["position_ids"] = positions.expand(rows, -1)
        if not self.packs:
            with pytest.raises(ValueError, match="must be one document"):
                model(**given)
            return
        alone = torch.cat([self.answers(model(**self.given(text[None]))) for text in TEXTS], dim=1)
        packed = self.answers(model(**given))
        assert relative_error(packed, alone) < 1e-9
        if not isinstance(model, TnnModel):
            assert relative_error(self.answers(model(**self.given(torch.cat(TEXTS)[None]))), alone) > 1e-4
        gradients = (torch.autograd.grad(one.square().sum(), list(model.parameters())) for one in (packed, alone))
        assert all(relative_error(found, expected) < 1e-8 for found, expected in zip(*gradients, strict=True))

    def test_refused(self, causal):
        model = self.build(causal)
        takes_ids = self.given(ONES).get("input_ids", IDS[0]).dim() == 2
        for given, words in [*(REFUSED if takes_ids else []), *self.refused]:
            with pytest.raises((TypeError, ValueError), match=words):
                model(**given)


class LanguageModelTests(TextHeadTests):
    """Language models with `fields`: a subclass for each mixer, norm or position embedding."""

    heads = {True: TnnForCausalLM, False: TnnForMaskedLM}
    refused = [
        ({"input_ids": ONES, "labels": [[1] * 5] * 2}, "`labels` must be a tensor"),
        ({"input_ids": ONES, "labels": ONES.float()}, "`labels` must hold torch.int64"),
        ({"input_ids": ONES, "labels": ONES[:, :4]}, r"`labels` must have shape .* \(2, 5\), .*, got \(2, 4\)"),
        ({"input_ids": ONES, "labels": ONES + 98}, r"Entries of `labels` must be in \[0, vocab_size=99\), got 99"),
        ({"input_ids": ONES, "labels": ONES - 3}, "Entries of `labels` must be in .*, got -2"),
    ]

    def labels(self, ids, mask):
        """Without the first token of a text: the padding before it would predict it."""
        return {"labels": ids.where(mask & (mask.cumsum(1) > 1), -100)}


class LayerTests(LanguageModelTests):
    """What of a language model depends on its layers: their mixers, norms and positions."""

    test_outputs = test_equal_inputs = test_refused = None
