"""The promises of decoding with a cache, which every kind of causal model inherits: a subclass names models.

    class TestGaussian(CacheTests):
        kinds = {"gaussian": {"tno_type": "gaussian", "num_gaussians": 3}}

Tokens are compared in float64, where no tie can be broken by rounding. A test that asks for `chosen` instead of
`model` runs over the kinds in `few`: it reaches a model through the same cache and the same passes as the rest.
"""

import copy
import io
import pickle

import pytest
import torch
from transformers import DynamicCache, StaticCache

from helpers.hybrids import HYBRIDS
from helpers.mixers import MIXED
from helpers.models import lively_language_model, relative_error, slow
from modeling_tnn.cache_tnn import max_crop
from modeling_tnn.compile.token_loop import write_tokens
from modeling_tnn.inputs import pool_tokens
from modeling_tnn.serving.scheduler import BatchScheduler
from modeling_tnn.tools.comparing import memory_per_sequence, state_bytes
from modeling_tnn.tools.embedding import embed_texts

MODELS = {
    "rpe": {"tno_type": "rpe", "decay": 0.9},
    "rpe-medium-decay": {"tno_type": "rpe", "decay": 0.94},  # the history is a ring
    "rpe-learnable-decay": {"tno_type": "rpe", "decay": 0.8, "learnable_decay": True},
    "rpe-no-decay": {"tno_type": "rpe", "decay": None},
    "fd": {"tno_type": "fd", "fd_resolution": 32},
    "rtf": {"tno_type": "rtf"},
    "s4d": {"tno_type": "s4d"},
    "modal": {"tno_type": "modal"},
    "explicit": {"tno_type": "explicit", "max_position_embeddings": 50},
    "implicit": {"tno_type": "hyena", "hyena_filter_length": 50} | MIXED["hyena"],
    "converted": {"tno_type": "rpe", "decay": 0.9},
    "reduced": {"tno_type": "rtf", "rtf_state_size": 12},
    "sinusoidal": {"tno_type": "rtf", "position_embedding": "sinusoidal"},
    "hyena": {"tno_type": "rtf"} | MIXED["hyena"],
    "s4": {"tno_type": "rtf"} | MIXED["s4"],
    "groups": {"tno_type": "rpe", "decay": 0.9, "num_filter_groups": 16},
    "multihyena": {"tno_type": "rtf"} | MIXED["multihyena"],
    "multihyena-s4d": {"tno_type": "s4d"} | MIXED["multihyena"],
    "hybrid": {"tno_type": "rpe", "decay": 0.9} | HYBRIDS["full"],
    "sliding": {"tno_type": "rtf"} | HYBRIDS["sliding"],
    "attention": HYBRIDS["attention"],
    "layers": HYBRIDS["layers"],
}
TEXT = torch.randint(2, 99, (2, 160), generator=torch.Generator().manual_seed(0))


def model_of(name, **fields):
    model = lively_language_model(**MODELS[name] | fields)
    return model.to_recurrent(order=8, window=4)[0] if name in ("converted", "reduced") else model


def text_of(length, rows=2):
    return torch.randint(2, 99, (rows, length), generator=torch.Generator().manual_seed(length))


class Puts(list):
    """A streamer that notes what it gets."""

    def put(self, value):
        self.append(value.tolist())

    def end(self):
        self.append("end")


def states_of(cache):
    """The decoding states of all layers."""
    return [state for layer in cache.layers for state in layer.states.values()]


def generate(model, prompt, new, **options):
    """Greedy unless the options say otherwise; from the same random state every time."""
    torch.manual_seed(7)
    return model.generate(prompt, max_new_tokens=new, **{"do_sample": False} | options)


def cache_of(model, text=None, **options):
    """A cache that has read a text, and can take back tokens of windows too."""
    cache = DynamicCache(config=model.config)
    if "sliding_attention" in (model.config.layer_types or ()):
        cache.activate_past_recording()
    if text is not None:
        model(text, past_key_values=cache, **options)
    return cache


def passes(model, text, sizes, mask=None, cache=None):
    """The logits of a text that comes in pieces, after what the cache holds."""
    cache, logits = DynamicCache(config=model.config) if cache is None else cache, []
    end = int(cache.get_seq_length())  # a static one gives its own tensor, which `+=` would change
    for piece in text[:, end:].split(sizes, dim=1):
        end += piece.shape[1]
        given = None if mask is None else mask[:, :end]
        logits.append(model(piece, attention_mask=given, past_key_values=cache).logits)
    return torch.cat(logits, dim=1)


def gradients(model, logits):
    return torch.autograd.grad(logits.logsumexp(-1).mean(), list(model.parameters()))


def loaded_by_torch(cache):
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class CacheTests:
    """Promises of decoding; see above.

    Attributes:
        kinds: fields of the configurations of models, by names.
        few: the kinds that show what does not depend on them; the usual tests have the first two.
        slow: the kinds that `make test-slow` adds.
    """

    kinds: dict[str, dict] = {}
    few: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()

    def pytest_generate_tests(self, metafunc):
        usual = [name for name in self.kinds if name not in self.slow]
        for fixture, names in (("model", usual + slow(*self.slow)), ("chosen", [*self.few[:2], *slow(*self.few[2:])])):
            if fixture in metafunc.fixturenames:
                metafunc.parametrize(fixture, names, indirect=True)

    def build(self, name: str):
        return model_of(name) if name in MODELS else lively_language_model(**self.kinds[name])

    @pytest.fixture
    def model(self, request):
        return self.build(request.param)

    @pytest.fixture
    def chosen(self, request):
        return self.build(request.param)

    def test_greedy_tokens_are_those_without_a_cache(self, model):
        """After a short prompt and one beyond the trained length; in chunks, with a static cache, from embeddings."""
        for length, new, size in ((7, 40, 5), (300, 9, 128)):
            prompt = text_of(length)
            tokens = generate(model, prompt, new)
            logits = model(tokens[:, :-1], use_cache=False).logits[:, length - 1 :]
            assert torch.equal(tokens[:, length:], logits.argmax(-1))
            assert length > 7 or min(len(set(row)) for row in tokens.tolist()) > 10, "a text depends on its past"
            for options in ({"cache_implementation": "static"}, {"prefill_chunk_size": size}):
                assert torch.equal(generate(model, prompt, new, **options), tokens)
        embeds, expected = model.get_input_embeddings()(text_of(7)), generate(model, text_of(7), 10, use_cache=False)
        assert torch.equal(generate(model, None, 10, inputs_embeds=embeds), expected[:, 7:])

    def test_several_tokens_for_each_launch(self, model):
        """They are those of `generate`: greedy and sampled, after padding on the left, with an end in one row."""
        loop = {"cache_implementation": "static", "custom_generate": write_tokens}
        if "sliding_attention" in (model.config.layer_types or ()):
            with pytest.raises(ValueError, match="no layer may have a sliding window, got.* StaticSlidingWindowLayer"):
                generate(model, text_of(7), 9, **loop)
            return
        mask = torch.arange(12) >= torch.tensor([[4], [0]])
        sampled = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.2}
        for count, options in ((16, {}), (4, sampled | {"min_new_tokens": 14}), (1, sampled)):
            options = options | {"attention_mask": mask.long(), "pad_token_id": 1}
            free = generate(model, text_of(12), 43, **options)
            options["eos_token_id"] = int(free[0, 12 + 20])
            expected = generate(model, text_of(12), 43, **options)
            assert torch.equal(generate(model, text_of(12), 43, tokens_per_launch=count, **loop, **options), expected)

    def test_launches_of_texts_that_come_and_go(self, model):
        """A scheduler writes the same with 4 tokens in a step: greedy or drawn, with ends in a launch, and streams."""
        if "sliding_attention" in (model.config.layer_types or ()):
            with pytest.raises(ValueError, match="no layer may have a sliding window"):
                BatchScheduler(model, tokens_per_launch=4)
            return
        found, steps = [], []
        for count in (1, 4):
            scheduler, requests, puts = BatchScheduler(model, max_batch_size=4, tokens_per_launch=count), [], []
            for seed, (length, new) in enumerate([(5, 30), (30, 25), (1, 40), (7, 25), (90, 9), (20, 13), (3, 1)]):
                options = {
                    "max_new_tokens": new,
                    "do_sample": seed % 3 > 0,
                    "eos_token_id": [*range(10, 10 + 20 * (seed % 2))] or None,
                    "pad_token_id": 0,
                }
                if options["do_sample"]:
                    options |= {"temperature": 0.8, "top_p": 0.9, "top_k": 20 * (seed % 2)}
                options |= {"repetition_penalty": 1.3 if seed == 5 else 1.0, "logprobs": 2 if seed == 4 else None}
                puts.append(Puts())
                requests.append(scheduler.submit(text_of(length, 1), seed, streamer=puts[-1], **options))
                scheduler.step()
            steps.append(sum(scheduler.step() for _ in range(99)))
            found.append([(one.tokens, one.reason, len(one.logprobs)) for one in requests] + puts)
        assert found[0] == found[1] and steps[1] < steps[0] and {one.reason for one in requests} == {"stop", "length"}
        assert not {token for one in requests[1::2] for token in one.tokens[:-1]} & {*range(10, 30)}  # the end tokens

    def test_a_left_padded_batch_is_one_by_one(self, model):
        """In chunks too."""
        texts = [text_of(length, 1) for length in (30, 10, 29)]
        padding = [30 - text.shape[1] for text in texts]
        batch = torch.cat(
            [torch.nn.functional.pad(text, (n, 0), value=1) for text, n in zip(texts, padding, strict=True)]
        )
        options = {"attention_mask": torch.stack([torch.arange(30) >= n for n in padding]).long()}
        generated = generate(model, batch, 9, **options)
        assert torch.equal(generate(model, batch, 9, prefill_chunk_size=3, **options), generated)
        for row, (text, n) in enumerate(zip(texts, padding, strict=True)):
            assert torch.equal(generated[row : row + 1, n:], generate(model, text, 9))

    @torch.no_grad()
    def test_pieces_are_the_whole_text(self, model):
        """After a first piece of any length, steps and chunks, with padding anywhere in it."""
        text = text_of(344)
        expected = model(text, use_cache=False).logits
        for length in (1, 301):
            assert relative_error(passes(model, text, [length, 1, 1, 40, 302 - length]), expected) < 1e-10
        for padding in (slice(0, 207), slice(94, 301)):
            mask = torch.ones_like(text)
            mask[0, padding] = 0
            expected = model(text, attention_mask=mask, use_cache=False).logits
            found = passes(model, text, [301, 1, 1, 41], mask)
            assert relative_error(found[mask.bool()], expected[mask.bool()]) < 1e-10

    def test_embeddings_in_chunks_are_those_of_one_pass(self, model):
        """With padding before and behind the text, also of whole chunks."""
        text, base = text_of(101), model.model
        mask = torch.ones_like(text)
        mask[0, 60:], mask[1, :45] = 0, 0
        for given in ({}, {"attention_mask": mask}):
            with torch.no_grad():
                states = base(text, use_cache=False, **given).last_hidden_state
            for pooling in ("mean", "last"):
                expected = pool_tokens(pooling, states, given.get("attention_mask"))
                for size in (1, 40, 101):
                    found = embed_texts(base, text, pooling=pooling, chunk_size=size, **given)
                    assert relative_error(found, expected) < 1e-10

    @torch.no_grad()
    def test_what_is_taken_back_was_never_there(self, model):
        """All of a prompt, nearly all of a long one, and the steps after one; a reset cache is empty."""
        for length, removed in ((40, 40), (1000, 999), (47, 7), (40, None)):
            cache = cache_of(model, text_of(length))
            for token in text_of(7).split(1, dim=1) if removed == 7 else ():
                model(token, past_key_values=cache)
            if removed:
                removable = [max_crop(layer) for layer in cache.layers if hasattr(layer, "states")]
                assert min(removable, default=removed) >= removed
                cache.crop(-removed)
            elif "full_attention" in (model.config.layer_types or ()):
                continue  # transformers 5.17 leaves its keys
            else:
                cache.reset()
            kept = cache.get_seq_length()
            assert kept == (length if removed == 7 else length - (removed or length))
            text = torch.cat([text_of(length)[:, :kept], text_of(50)], dim=1)
            expected = model(text, use_cache=False).logits[:, kept:]
            assert relative_error(passes(model, text, [1, 1, 48], cache=cache), expected) < 1e-10

    @torch.no_grad()
    def test_copies_and_other_rows_of_a_cache_go_on(self, model):
        """Pickled, saved by torch, copied, in the memory of another device; after a prompt and after steps."""
        for steps in (0, 5):
            held, text = 340 + steps, text_of(390, 3)
            cache = cache_of(model)
            with torch.inference_mode(steps > 0):
                passes(model, text[:, :held], [340] + [1] * steps, cache=cache)
                cache.reorder_cache(torch.tensor([2, 0, 1]))
                cache.batch_repeat_interleave(2)
                cache.batch_select_indices(torch.tensor([0, 5]))
            for layer in cache.layers:
                layer.offload()
                layer.prefetch()
            text, twin = text[[2, 1]], copy.deepcopy(model)
            expected = model(text, use_cache=False).logits[:, held:]
            twice = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(cache))))
            for one in (twice, loaded_by_torch(cache), copy.deepcopy(cache), cache):
                assert len(one) == len(cache) and one.get_seq_length() == held and memory_per_sequence(one) > 0
                found = passes(twin, text, [1, 1, 30, 18 - steps], cache=one)
                assert relative_error(found, expected) < 1e-10
        with pytest.raises(ValueError, match="The input must have 2 sequences, as `past_key_values` has, got 1"):
            model(text[:1], past_key_values=cache)

    @torch.no_grad()
    def test_the_first_token_brings_the_state_to_its_size(self, model):
        """Less than a tenth is freed by 100 more tokens: places for a crop of the prompt go at once."""
        for length in (20, 512):
            cache = cache_of(model, text_of(length, 1))
            model(text_of(1, 1), past_key_values=cache)
            size = memory_per_sequence(cache)
            if not any(getattr(layer, "record_past", False) for layer in cache.layers):
                assert sum(state_bytes(model, length).values()) == size
            for token in text_of(100, 1).split(1, dim=1):
                model(token, past_key_values=cache)
            assert size <= 1.1 * memory_per_sequence(cache)

    @torch.no_grad()
    def test_a_text_goes_on_outside_of_inference_mode_and_in_it(self, model):
        text = text_of(160)
        expected = model(text, use_cache=False).logits
        for cache in (DynamicCache(), StaticCache(config=model.config, max_cache_len=160)):
            with torch.inference_mode():
                found = [passes(model, text[:, :121], [20, 100, 1], cache=cache)]
            found.append(passes(model, text[:, :130], [1, 8], cache=cache))
            with torch.inference_mode():
                found.append(passes(model, text, [1, 29], cache=cache))
            assert relative_error(torch.cat(found, dim=1), expected) < 1e-10

    def test_precision(self, model):
        for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.05), (torch.float16, 0.05)):
            model, prompt = model.to(dtype), text_of(301)
            output = generate(model, prompt, 6, output_logits=True, return_dict_in_generate=True)
            uncached = model(output.sequences[:, :-1], use_cache=False).logits[:, 300:]
            assert relative_error(torch.stack(output.logits, dim=1), uncached) < tolerance, dtype

    def test_the_call_that_fills_a_cache_has_gradients_and_a_later_one_refuses(self, chosen):
        """Of a static cache too. Logits are the same with gradients; operators and keys alone are refused as well."""
        expected = gradients(chosen, chosen(TEXT[:, :100], use_cache=False).logits)
        for cache in (DynamicCache(), StaticCache(config=chosen.config, max_cache_len=200)):
            chosen.requires_grad_(True)
            found = gradients(chosen, chosen(TEXT[:, :100], past_key_values=cache).logits)
            assert all(relative_error(a, e) < 1e-10 for a, e in zip(found, expected, strict=True))
            chosen.requires_grad_(False)
            for layer in chosen.model.layers:
                (getattr(layer.mixer, "tno", None) or layer.attention.k_proj).requires_grad_()
            logits = passes(chosen, TEXT, [1, 59], cache=cache)
            assert relative_error(logits, chosen(TEXT, use_cache=False).logits[:, 100:]) < 1e-10
            with pytest.raises(RuntimeError, match="continues a cache has no gradients.*through an empty cache or"):
                logits.sum().backward()
            assert all(parameter.grad is None for parameter in chosen.parameters())

    def test_an_empty_cache_decodes_with_the_present_weights(self, chosen):
        """Filled outside of `inference_mode` or in it; what an earlier cache computed is not used again."""
        prompt = text_of(20)
        with torch.inference_mode():
            saved = pickle.loads(pickle.dumps(cache_of(chosen, prompt[:, :12])))
        assert torch.equal(generate(chosen, prompt, 9, past_key_values=saved), generate(chosen, prompt, 9))
        with torch.no_grad():
            for parameter in chosen.parameters():
                parameter.mul_(1.1)
        expected = generate(chosen, prompt, 10, use_cache=False)
        for empty in (DynamicCache(), DynamicCache(config=chosen.config)):
            assert torch.equal(generate(chosen, prompt, 10, past_key_values=empty), expected)
            assert len(empty) == 2 and empty.get_seq_length() == 29

    def test_sampling_and_beams_are_those_without_a_cache(self, chosen):
        """With a dynamic and a static cache."""
        for options in ({"top_k": 20, "temperature": 0.8, "num_return_sequences": 3}, {"num_beams": 3}):
            for length, new in ((7, 20), (300, 5)):
                options |= {"do_sample": "top_k" in options or length == 300}
                expected = generate(chosen, text_of(length), new, use_cache=False, **options)
                for kind in (None, "static"):
                    found = generate(chosen, text_of(length), new, cache_implementation=kind, **options)
                    assert torch.equal(found, expected)

    def test_drafts_are_taken_back(self, chosen):
        """Those of another model and of the prompt, some of them long: the greedy tokens."""
        for length in (7, 300):
            prompt = text_of(length, 1).repeat(1, 2)
            expected = generate(chosen, prompt, 12)
            drafting = model_of("rpe" if chosen.config.tno_type == "rtf" else "rtf")
            assert torch.equal(generate(chosen, prompt, 12, assistant_model=drafting), expected)
            assert torch.equal(generate(chosen, prompt, 12, prompt_lookup_num_tokens=4), expected)
            many = {"prompt_lookup_num_tokens": 300, "max_matching_ngram_size": 1}
            assert torch.equal(generate(chosen, prompt, 12, **many), expected)

    @torch.no_grad()
    def test_more_steps_can_be_taken_back_from_now_on(self, chosen):
        """Also if the cache has read a text before: more than without `activate_past_recording`."""
        text, cache = text_of(150), cache_of(chosen, text_of(150)[:, :40])
        cache.activate_past_recording()
        for token in text[:, 40:140].split(1, dim=1):
            chosen(token, past_key_values=cache)
        cache.crop(-90)
        expected = chosen(text, use_cache=False).logits[:, 50:]
        assert relative_error(passes(chosen, text, [1, 99], cache=cache), expected) < 1e-10

    def test_continuing_is_one_run(self, chosen):
        """From the cache that `generate` returns, and from a state that is repeated for each continuation."""
        prompt = text_of(40)
        first = generate(chosen, prompt, 20, return_dict_in_generate=True)
        mask = torch.ones_like(first.sequences)  # the text may have the padding token in it
        more = generate(chosen, first.sequences, 20, past_key_values=first.past_key_values, attention_mask=mask)
        assert torch.equal(more, generate(chosen, prompt, 40))
        cache = cache_of(chosen)
        with torch.no_grad():
            chosen(prompt[:1], past_key_values=cache)
        cache.batch_repeat_interleave(3)
        texts = torch.cat([prompt[:1].repeat(3, 1), text_of(5, 3)], dim=1)
        together = generate(chosen, texts, 9, past_key_values=cache)
        for row in range(3):
            assert torch.equal(together[row : row + 1], generate(chosen, texts[row : row + 1], 9))
