"""In place of transformers' tests of generation, which the source archive lacks: what they ask for, in our words.

That all ways of decoding give the same tokens is in `tests/generation/test_equalities.py`; here are
their results and arguments.
"""

import tempfile

import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache
from transformers.generation import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput

NEW_TOKENS = 4
WAYS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 10, "top_p": 0.7, "temperature": 0.7, "num_return_sequences": 2},
    "beams": {"do_sample": False, "num_beams": 2, "length_penalty": 2.0, "num_return_sequences": 2},
    "beam sampling": {"do_sample": True, "num_beams": 2},
}


class GenerationTesterMixin:
    """Over `all_generative_model_classes`."""

    def generative_models(self):
        """Each model with a small padded batch; none ends before its time."""
        for model_class in self.all_generative_model_classes:
            config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
            config.eos_token_id = None
            torch.manual_seed(0)
            yield model_class(config).eval(), {name: value[:2] for name, value in inputs.items()}

    def test_generate_lengths(self):
        """Every way with logits processors, with and without a cache."""
        processors = {"repetition_penalty": 1.2, "bad_words_ids": [[1, 0]], "remove_invalid_values": True}
        for model, inputs in self.generative_models():
            for name, options in WAYS.items():
                for use_cache in (True, False):
                    with self.subTest(f"{name}, use_cache={use_cache}"):
                        tokens = model.generate(
                            **inputs, max_new_tokens=NEW_TOKENS, use_cache=use_cache, **processors, **options
                        )
                        rows, length = inputs["input_ids"].shape
                        rows *= options.get("num_return_sequences", 1)
                        self.assertEqual(tuple(tokens.shape), (rows, length + NEW_TOKENS))

    def test_generate_dict_outputs(self):
        """Scores, logits and hidden states of each step have the shapes that the documentation of generate gives."""
        asked = ("return_dict_in_generate", "output_scores", "output_logits", "output_hidden_states")
        for model, inputs in self.generative_models():
            for name, options in WAYS.items():
                with self.subTest(name):
                    output = model.generate(
                        **inputs, max_new_tokens=NEW_TOKENS, **dict.fromkeys(asked, True), **options
                    )
                    kind = GenerateBeamDecoderOnlyOutput if "num_beams" in options else GenerateDecoderOnlyOutput
                    self.assertIsInstance(output, kind)
                    self.check_steps(model, inputs["input_ids"], output, options)

    def check_steps(self, model, prompt, output, options):
        rows, length = prompt.shape
        rows *= max(options.get("num_beams", 1), options.get("num_return_sequences", 1))
        for steps in (output.scores, output.logits):
            self.assertEqual([tuple(step.shape) for step in steps], NEW_TOKENS * [(rows, model.config.vocab_size)])
        self.assertEqual(len(output.hidden_states), NEW_TOKENS)
        for index, step in enumerate(output.hidden_states):
            shape = (rows, 1 if index else length, model.config.hidden_size)
            self.assertEqual([tuple(layer.shape) for layer in step], (model.config.num_hidden_layers + 1) * [shape])
        self.assertIsInstance(output.past_key_values, Cache)
        self.assertEqual(output.past_key_values.get_seq_length(), length + NEW_TOKENS - 1)
        self.assertEqual(len(output.past_key_values.layers), model.config.num_hidden_layers)

    def test_generate_without_input_ids(self):
        """From the first token of the configuration."""
        for model, _ in self.generative_models():
            tokens = model.generate(max_new_tokens=NEW_TOKENS, do_sample=False)
            self.assertEqual(tuple(tokens.shape), (1, NEW_TOKENS + 1))
            self.assertEqual(tokens[0, 0].item(), model.config.bos_token_id)

    def test_generate_from_inputs_embeds(self):
        """As from the ids, also with beams and where both are given; other embeddings give another text."""
        for model, inputs in self.generative_models():
            ids, mask = inputs["input_ids"], torch.ones_like(inputs["input_ids"])
            embeddings = model.get_input_embeddings()(ids)
            for num_beams in (1, 2):
                options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "num_beams": num_beams}
                options |= {"output_scores": True, "return_dict_in_generate": True, "attention_mask": mask}
                expected = model.generate(ids, **options)
                both = model.generate(ids, inputs_embeds=embeddings, **options)
                alone = model.generate(inputs_embeds=embeddings, **options)
                self.assertTrue(torch.equal(both.sequences, expected.sequences))
                self.assertTrue(torch.equal(alone.sequences, expected.sequences[:, ids.shape[1] :]))
                others = model.generate(inputs_embeds=torch.rand_like(embeddings), **options)
                self.assertGreater((others.scores[0] - expected.scores[0]).abs().max().item(), 0.0)

    def test_generate_with_all_logits(self):
        """`logits_to_keep` of the prompt changes nothing but memory."""
        for model, inputs in self.generative_models():
            options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
            expected = model.generate(**inputs, **options)
            self.assertTrue(torch.equal(model.generate(**inputs, **options, logits_to_keep=0), expected))

    def test_generate_stops(self):
        """At the end token, after which rows are padded, and at stop strings of ids."""
        for model, inputs in self.generative_models():
            tokens = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
            length = inputs["input_ids"].shape[1]
            end = tokens[0, length].item()
            stopped = model.generate(
                **inputs, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=end, pad_token_id=1
            )
            self.assertEqual(stopped[0, length].item(), end)
            self.assertTrue((stopped[0, length + 1 :] == 1).all())

    def test_generation_config_is_saved(self):
        """With the model, and used when it is loaded."""
        for model, inputs in self.generative_models():
            model.generation_config = GenerationConfig(max_new_tokens=2, bos_token_id=0, pad_token_id=1)
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                loaded = type(model).from_pretrained(folder)
            self.assertEqual(loaded.generate(**inputs).shape[1], inputs["input_ids"].shape[1] + 2)
