"""Properties of every configuration, length, mask and batch; hypothesis searches for a counterexample.

Everything is compared in float64, so that a difference is a mistake and not a rounding.
`--hypothesis-profile thorough` tries twenty times as many (see conftest.py).
"""

import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import DynamicCache

from helpers.models import relative_error
from helpers.strategies import configs, lengths, noise, seeds, splits, tokens
from modeling_tnn import TnnForCausalLM, TnnForMaskedLM, TnnForSequenceClassification, TnnModel
from modeling_tnn.cache_tnn import max_crop
from modeling_tnn.tno_auto import build_tno
from modeling_tnn.tools import recurrent

# Not 1e-12: where a row is nearly zero, an RMS norm makes up to 1e8 times as much of its rounding.
EXACT = 1e-8


def shaken(module: torch.nn.Module, seed: int, scale: float = 0.3) -> torch.nn.Module:
    """`module` in float64, no parameter at the value that its initialisation gives."""
    module = module.double().eval()
    with torch.no_grad():
        for index, (name, parameter) in enumerate(module.named_parameters()):
            parameter.add_(noise(*parameter.shape, seed=seed + index), alpha=scale)
            if name.endswith("log_poles"):  # with a positive one, the last outputs hide the first
                parameter.abs_().neg_()
    return module


def build(head, config, seed):
    torch.manual_seed(seed)
    return shaken(head(config), seed)


@given(configs(), lengths, seeds)
def test_an_operator_is_its_dense_matrix(config, length, seed):
    operator = build_tno(config)
    operator.reset_parameters()
    operator = shaken(operator, seed, 0.1)
    v = noise(2, length, operator.channels, seed=seed).requires_grad_()
    weight = noise(2, length, operator.channels, seed=seed + 1)
    fast, dense = operator(v), torch.einsum("dij,bjd->bid", operator.dense(length), v)
    assert relative_error(fast, dense) < EXACT
    inputs = [v, *operator.parameters()]
    gradients = [
        torch.autograd.grad((y * weight).sum(), inputs, allow_unused=True, materialize_grads=True)
        for y in (fast, dense)
    ]
    for actual, expected in zip(*gradients, strict=True):
        assert (actual - expected).abs().max() <= EXACT * expected.abs().max().clamp(min=1.0)


@given(configs(), st.integers(2, 5), lengths, lengths, seeds)
def test_rows_of_a_batch_do_not_meet_and_the_future_changes_nothing(config, rows, length, more, seed):
    model = build(TnnModel, config, seed)
    ids = tokens(rows, length + more, seed)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        together = model(ids).last_hidden_state
        assert relative_error(model(ids[order]).last_hidden_state, together[order]) < EXACT
        assert relative_error(model(ids[:1]).last_hidden_state, together[:1]) < EXACT
        if config.causal:
            assert relative_error(model(ids[:, :length]).last_hidden_state, together[:, :length]) < EXACT


@given(configs(), lengths, st.integers(0, 40), st.integers(0, 40), seeds)
def test_padding_around_a_text_changes_nothing(config, length, left, right, seed):
    model = build(TnnForSequenceClassification, config, seed)
    text, around = tokens(1, length, seed), tokens(1, left + right, seed + 1)
    ids = torch.cat([around[:, :left], text, around[:, left:]], dim=1)
    mask = torch.tensor([[0] * left + [1] * length + [0] * right])
    with torch.no_grad():
        # With a mask: without, a causal classifier takes pad tokens at the end of a text for padding.
        alone = model(text, attention_mask=torch.ones_like(text)).logits
        assert relative_error(model(ids, attention_mask=mask).logits, alone) < EXACT
        hidden = model.model(ids, attention_mask=mask).last_hidden_state[:, left : left + length]
        assert relative_error(hidden, model.model(text).last_hidden_state) < EXACT


@given(configs(), st.lists(st.booleans(), min_size=1, max_size=60), seeds)
def test_what_stands_at_padding_does_not_matter(config, real, seed):
    """Any pattern, gaps inside the text too; every real position keeps its distance to the others."""
    assume(any(real))
    model = build(TnnModel, config, seed)
    mask = torch.tensor([real])
    ids, others = tokens(1, len(real), seed), tokens(1, len(real), seed + 1)
    with torch.no_grad():
        one = model(ids, attention_mask=mask.long()).last_hidden_state
        other = model(torch.where(mask, ids, others), attention_mask=mask.long()).last_hidden_state
    assert one.isfinite().all()
    assert relative_error(other[mask], one[mask]) < EXACT


@given(configs(causal=True), splits(), st.integers(0, 30), seeds)
def test_a_text_in_chunks_is_the_text(config, chunks, left, seed):
    """Through the cache, with padding before one of two rows."""
    model = build(TnnForCausalLM, config, seed)
    ids = tokens(2, sum(chunks), seed)
    mask = torch.ones_like(ids)
    mask[0, : min(left, chunks[0] - 1)] = 0
    cache, seen, outputs = DynamicCache(config=config), 0, []
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, use_cache=False).logits
        for size in chunks:
            chunk, so_far = ids[:, seen : seen + size], mask[:, : seen + size]
            outputs.append(model(chunk, attention_mask=so_far, past_key_values=cache).logits)
            seen += size
    assert relative_error(torch.cat(outputs, dim=1)[mask.bool()], whole[mask.bool()]) < EXACT


@given(configs(causal=True), st.integers(2, 60), st.integers(1, 40), st.integers(0, 60), seeds)
def test_what_is_taken_back_was_never_there(config, length, more, removed, seed):
    model = build(TnnModel, config, seed)
    removed = min(removed, length + more - 1)
    ids, kept = tokens(1, length + more, seed), length + more - removed
    last = tokens(1, 3, seed + 1)
    cache = DynamicCache(config=config)
    with torch.no_grad():
        model(ids[:, :length], past_key_values=cache)
        model(ids[:, length:], past_key_values=cache)
        assume(all(max_crop(layer) >= removed for layer in cache.layers))
        cache.crop(-removed)
        continued = model(last, past_key_values=cache).last_hidden_state
        fresh = model(torch.cat([ids[:, :kept], last], dim=1), use_cache=False).last_hidden_state[:, kept:]
    assert relative_error(continued, fresh) < EXACT


@given(configs(), st.lists(st.integers(1, 30), min_size=1, max_size=5), seeds)
def test_packed_documents_are_alone(config, sizes, seed):
    """A row without any position above 0 is one document."""
    assume(max(sizes) > 1)
    model = build(TnnModel, config, seed)
    texts = [tokens(1, size, seed + i) for i, size in enumerate(sizes)]
    positions = torch.cat([torch.arange(size) for size in sizes])[None]
    with torch.no_grad():
        packed = model(torch.cat(texts, dim=1), position_ids=positions, use_cache=False).last_hidden_state
        alone = torch.cat([model(text, use_cache=False).last_hidden_state for text in texts], dim=1)
    assert relative_error(packed, alone) < EXACT


@given(configs(), st.sampled_from((torch.float64, torch.float32, torch.bfloat16, torch.float16)), seeds)
def test_saving_and_loading_is_the_identity(tmp_path_factory, config, dtype, seed):
    model = build(TnnForCausalLM if config.causal else TnnForMaskedLM, config, seed).to(dtype)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    loaded = type(model).from_pretrained(folder, dtype="auto")
    # What stays in float32 comes back so, also where the file has it in half precision, which can hold its values.
    expected, actual = model.state_dict(), loaded.state_dict()
    assert expected.keys() == actual.keys()
    assert all(torch.equal(actual[name].to(expected[name].dtype), expected[name]) for name in expected)
    saved, read = model.config.to_dict(), loaded.config.to_dict()
    assert {name: read[name] for name in saved if name != "_name_or_path"} == {
        name: saved[name] for name in saved if name != "_name_or_path"
    }


@given(
    configs(causal=True, tno_types=("rpe", "fd")),
    st.sampled_from((2, 5, 8, 16, 64)),
    st.sampled_from((1, 4, 16)),
    st.sampled_from((torch.float32, torch.float64, torch.bfloat16)),
    seeds,
)
def test_a_conversion_does_what_it_reports(monkeypatch, config, order, window, dtype, seed):
    """Against the kernel itself, tap by tap, in every precision."""
    monkeypatch.setattr(recurrent, "MOST_TAPS", 512)
    model = build(TnnForCausalLM, config, seed).to(dtype)
    converted, reports = model.to_recurrent(order=order, window=window)
    assert len(reports) == config.num_hidden_layers
    for layer, fitted, report in zip(model.model.layers, converted.model.layers, reports, strict=True):
        exact = layer.mixer.tno.coefficients(report.taps).double()
        taps = fitted.mixer.tno.coefficients(report.taps).double()
        error, (order_found, window_found) = taps - exact, (report.order, report.window)
        l2 = (error.norm(dim=1) / exact.norm(dim=1)).nan_to_num(0.0)
        measured = l2.max(), l2.median(), error.norm() / exact.norm()
        for found, told in zip(measured, (report.l2_worst, report.l2_median, report.l2_layer), strict=True):
            assert abs(found.item() - told) <= 1e-3 * told + (1e-9 if dtype == torch.float64 else 1e-7)
        assert (order_found, window_found) == (order, window) and report.largest_pole < 1
        assert torch.equal(taps[:, :window], exact[:, :window])
