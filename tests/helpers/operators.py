"""The tests that every operator inherits: a subclass gives the name of the operator, and fields of a small one.

    class TestGaussian(OperatorTests):
        tno_type = "gaussian"
        fields = {"num_gaussians": 3}

pytest then runs each test below, in the directions that the operator has. They serve an operator that
`register_operator` has added from a file outside this package as well.
"""

import copy

import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from helpers.models import UNALIGNED, relative_error, seeded, tiny_config
from modeling_tnn import TnnForCausalLM, TnnForMaskedLM, TnnModel
from modeling_tnn.cache_tnn import TnnCacheLayer
from modeling_tnn.history import SLACK
from modeling_tnn.tno import continue_sequence, is_convolution
from modeling_tnn.tno_auto import OPERATORS, build_tno


def random_input(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Standard normal numbers, the same for the same shape."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).to(dtype)


def random_operator(tno_type: str, causal: bool, **fields):
    """An operator in float64 whose parameters are all random, biases too."""
    operator = seeded(build_tno, tiny_config(tno_type, causal, **fields)).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        operator.reset_parameters()
        for name, parameter in operator.named_parameters():
            scale = 0.1 if operator.is_recurrence else 0.5
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
            if name == "log_poles":  # positive ones grow
                parameter.abs_().neg_()
    return operator


def advance(layer: TnnCacheLayer, v: torch.Tensor, operator) -> torch.Tensor:
    """The outputs for `v`, which continues the text in `layer`."""
    return continue_sequence(operator, layer, v)


class OperatorTests:
    """Properties of an operator; see above.

    Attributes:
        tno_type: its name.
        fields: fields of the configuration that make a small one.
        lengths: lengths at which it is compared with its dense matrix.
    """

    tno_type = ""
    fields: dict = {}
    lengths = (1, 2, 17, 64, 101)

    def pytest_generate_tests(self, metafunc):
        cls = OPERATORS[self.tno_type]
        directions = [
            causal for causal in (True, False) if (cls.supports_causal, cls.supports_bidirectional)[not causal]
        ]
        if "operator" in metafunc.fixturenames:
            names = ["causal" if causal else "bidirectional" for causal in directions]
            metafunc.parametrize("operator", directions, ids=names, indirect=True)
        if "causal" in metafunc.fixturenames:
            metafunc.parametrize("causal", directions)
        if "decoded" in metafunc.fixturenames:
            metafunc.parametrize("decoded", [True] if True in directions else [], indirect=True)

    def build(self, causal: bool):
        return random_operator(self.tno_type, causal, **self.fields)

    def model(self, causal: bool, head=None):
        head = head or (TnnForCausalLM if causal else TnnForMaskedLM)
        return seeded(head, tiny_config(self.tno_type, causal, eos_token_id=None, **self.fields)).double()

    def test_equals_its_dense_matrix(self, operator):
        """In values and in all gradients, by the fused product and by PyTorch's own operations, in float32 too."""
        for length in self.lengths:
            v = random_input(2, length, operator.channels).requires_grad_()
            cotangent = random_input(2, length, operator.channels) + 1
            inputs = [v, *operator.parameters()]
            dense = torch.einsum("dij,bjd->bid", operator.dense(length), v)
            found = []
            for implementation in ("eager", "fused"):
                operator.implementation = implementation
                found.append(operator(v))
                assert relative_error(found[-1], dense) < 1e-12, length
            gradients = [
                torch.autograd.grad((y * cotangent).sum(), inputs, allow_unused=True, materialize_grads=True)
                for y in (found[-1], dense)
            ]
            for actual, expected in zip(*gradients, strict=True):
                assert (actual - expected).abs().max() <= 1e-11 * expected.abs().max().clamp(min=1.0), length
            single = copy.deepcopy(operator).float()
            assert relative_error(single(v.float()), dense) < 2e-5, length

    def test_coefficients_do_not_depend_on_the_length(self, operator):
        """So a causal operator gives a prefix of a text what it gives the text."""
        for shorter, longer in [(1, 2), (17, 64), (63, 100), (200, 300)]:
            narrow, wide = operator.coefficients(shorter), operator.coefficients(longer, torch.device("cpu"))
            assert wide.shape == (operator.channels, longer if operator.causal else 2 * longer - 1)
            first = 0 if operator.causal else longer - shorter
            assert relative_error(narrow, wide[:, first : first + narrow.shape[1]]) < 1e-12
            if operator.causal:
                v = random_input(2, longer, operator.channels)
                assert relative_error(operator(v[:, :shorter]), operator(v)[:, :shorter]) < 1e-12

    def test_groups(self, causal):
        """Channels that share a filter: bit for bit its product with each. Gradients and decoding, too."""
        operator = random_operator(self.tno_type, causal, **{"num_filter_groups": 16} | self.fields)
        v = random_input(2, 37, 64).requires_grad_()
        apart = torch.stack([operator(v[..., first::4]) for first in range(4)], dim=3).flatten(2)
        together = operator(v)
        assert torch.equal(together, apart) or not is_convolution(operator)
        assert relative_error(together, apart) < 1e-14
        inputs = [v, *operator.parameters()]
        found = (torch.autograd.grad(y.square().sum(), inputs, materialize_grads=True) for y in (together, apart))
        assert all(relative_error(*pair) < 1e-12 for pair in zip(*found, strict=True))
        if causal:
            layer = TnnCacheLayer()
            parts = [advance(layer, part.detach(), operator) for part in v.split([20, 1, 1, 15], dim=1)]
            assert relative_error(torch.cat(parts, dim=1), apart) < 1e-11

    def test_causality(self, operator):
        """Rows are independent, and a causal operator does not see the future."""
        length, position = 33, 20
        v = random_input(1, length, operator.channels).requires_grad_()
        (gradient,) = torch.autograd.grad(operator(v)[0, position].sum(), v)
        assert gradient[0, : position + 1].abs().max() > 0
        after = gradient[0, position + 1 :].abs().max()
        assert after < 1e-12 if operator.causal else after > 1e-3
        v = random_input(5, 63, operator.channels)
        assert relative_error(operator(v)[3:4], operator(v[3:4])) < 1e-14

    def test_half_precision(self, operator):
        """bfloat16 parameters, and autocast: the coefficients are those of the rounded parameters in float32."""
        operator.bfloat16()
        v = random_input(2, 200, operator.channels, dtype=torch.bfloat16)
        rounded = operator(v)
        exact = operator.double()(v.double())
        assert rounded.dtype == torch.bfloat16
        assert relative_error(rounded, exact) < 1e-2
        operator.float()
        with torch.autocast("cpu", torch.bfloat16):
            assert relative_error(operator(v.float()), exact) < 2e-5

    def test_decoding(self, decoded):
        """A first text, single tokens and chunks against the whole product; wrong tokens are fed and taken back."""
        operator, layer = decoded, TnnCacheLayer()
        v, wrong = random_input(2, 400, operator.channels), 3 * random_input(2, 40, operator.channels)
        expected, position = operator(v), 0
        for count in [7, *[1] * 150, 40, *[1] * 30, 130]:
            if position and position % 5 == 0:
                advance(layer, wrong[:, : min(SLACK, position)], operator)
                layer.crop(-min(40, SLACK, position))
            y = advance(layer, v[:, position : position + count], operator)
            assert relative_error(y, expected[:, position : position + y.shape[1]]) < 1e-11
            position += y.shape[1]
            assert layer.get_seq_length() == position

    def test_every_parameter_learns(self, causal):
        model = self.model(causal).train()
        ids = torch.randint(3, 99, (2, 40), generator=torch.Generator().manual_seed(0))
        model(ids, labels=ids).loss.backward()
        silent = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
        assert not silent

    def test_padding_changes_nothing(self, causal):
        """Nor does what is not a number there: outputs and gradients of both products are finite."""
        model, results = self.model(causal, TnnModel), []
        embeds = random_input(1, 30, model.config.hidden_size)
        for left, right, implementation in [(0, 0, "fused"), (9, 0, "eager"), (0, 9, "fused"), (4, 11, "eager")]:
            for layer in model.layers:
                layer.mixer.tno.implementation = implementation
            given = torch.nn.functional.pad(embeds, (0, 0, left, right), value=torch.nan).requires_grad_()
            mask = torch.nn.functional.pad(torch.ones(1, 30, dtype=torch.long), (left, right))
            states = model(inputs_embeds=given, attention_mask=mask, use_cache=False).last_hidden_state
            assert states.isfinite().all()
            real = states[:, left : left + 30]
            found = torch.autograd.grad(real.square().sum(), [given, *model.parameters()], materialize_grads=True)
            assert found[0][mask == 0].abs().sum() <= 1e-10 * found[0].abs().sum()
            results.append([real, found[0][:, left : left + 30], *found[1:]])
        for bare, *padded in zip(*results, strict=True):
            assert all((one - bare).abs().max() <= 1e-8 * bare.abs().max().clamp(min=1.0) for one in padded)

    def test_packed_texts_do_not_meet(self, causal):
        model = self.model(causal, TnnModel)
        ids = torch.randint(3, 99, (1, 50), generator=torch.Generator().manual_seed(0))
        positions = torch.cat([torch.arange(n) for n in (20, 1, 29)])[None]
        packed = model(ids, position_ids=positions, use_cache=False).last_hidden_state
        alone = [model(part, use_cache=False).last_hidden_state for part in ids.split([20, 1, 29], dim=1)]
        assert relative_error(packed, torch.cat(alone, dim=1)) < 1e-9

    def test_generate(self, decoded):
        """Token for token what the model gives without a cache, for a batch with padding."""
        model = self.model(causal=True)
        ids = torch.randint(3, 99, (2, 9), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
        options = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 1, "attention_mask": mask}
        assert torch.equal(model.generate(ids, **options), model.generate(ids, use_cache=False, **options))

    def test_save_and_load(self, causal, tmp_path):
        model = self.model(causal).float()
        model.save_pretrained(tmp_path)
        auto = AutoModelForCausalLM if causal else AutoModelForMaskedLM
        loaded = auto.from_pretrained(tmp_path)
        ids = torch.randint(3, 99, (2, 30), generator=torch.Generator().manual_seed(0))
        assert loaded.config.tno_type == self.tno_type
        assert relative_error(loaded(ids).logits, model(ids).logits) < UNALIGNED
