"""In place of the checks of each task that the tests of pipelines call, which the source archive lacks.

A check builds the pipeline of its task with `get_test_pipeline` and examines it with `run_pipeline_test`, by which
names transformers' tests call it; these run a batch afterwards. What is asked for follows the documentation of the
pipelines.
"""

import torch
from PIL import Image
from transformers import pipeline

TEXTS = ["A short text.", "A text that is a little longer than the other one, to need padding."]


class Check:
    """A pipeline and its examples."""

    task = ""
    examples = TEXTS
    options = {}

    def get_test_pipeline(self, model, tokenizer=None, image_processor=None, dtype="float32", **processors):
        model = model.to(getattr(torch, dtype))
        parts = {"model": model, "tokenizer": tokenizer, "image_processor": image_processor}
        return pipeline(self.task, **parts, device="cpu", **self.options), self.examples

    def run_pipeline_test(self, pipe, examples):
        """Compare what `pipe` returns for the examples with what its task promises."""
        raise NotImplementedError


class FeatureExtractionCheck(Check):
    """Numbers for each token."""

    task = "feature-extraction"

    def run_pipeline_test(self, pipe, examples):
        width = pipe.model.config.hidden_size
        for text, (features,) in zip(examples, pipe(examples), strict=True):
            assert [len(vector) for vector in features] == len(pipe.tokenizer(text).input_ids) * [width]
        assert pipe(examples[0], return_tensors=True).shape[2] == width
        assert len(pipe(examples[1], truncation=True, tokenize_kwargs={"max_length": 5})[0]) == 5


class FillMaskCheck(Check):
    """Tokens for each mask, the likeliest first."""

    task = "fill-mask"
    examples = ["A <mask> text.", "The other text is <mask> longer."]

    def run_pipeline_test(self, pipe, examples):
        for answers in pipe(examples):
            assert len(answers) == 5 and set(answers[0]) == {"sequence", "score", "token", "token_str"}
            scores = [answer["score"] for answer in answers]
            assert scores == sorted(scores, reverse=True) and 0 < sum(scores) <= 1.001
        assert [len(masks) for masks in pipe("<mask> and <mask>", top_k=2)] == [2, 2]
        targets = sorted(pipe.tokenizer.get_vocab())[:3]
        assert {answer["token_str"] for answer in pipe(examples[0], targets=targets)} <= set(targets)
        with_errors(lambda: pipe("No mask at all"), Exception)


class TextClassificationCheck(Check):
    """A label, or a score for each."""

    task = "text-classification"

    def run_pipeline_test(self, pipe, examples):
        labels = set(pipe.model.config.id2label.values())
        assert all(answer["label"] in labels and 0 < answer["score"] <= 1 for answer in pipe(examples))
        every = pipe(examples, top_k=None)
        assert all({answer["label"] for answer in answers} == labels for answers in every)
        assert all(abs(sum(answer["score"] for answer in answers) - 1) < 1e-2 for answers in every)
        raw = pipe(examples[0], top_k=None, function_to_apply="none")
        assert abs(sum(answer["score"] for answer in raw) - 1) > 1e-2
        assert pipe({"text": TEXTS[0], "text_pair": TEXTS[1]})["label"] in labels


class TokenClassificationCheck(Check):
    """A label for each token, or for groups of tokens that lie together."""

    task = "token-classification"

    def run_pipeline_test(self, pipe, examples):
        labels = set(pipe.model.config.id2label.values())
        for text, tags in zip(examples, pipe(examples, ignore_labels=[]), strict=True):
            assert len(tags) == len(pipe.tokenizer(text).input_ids)
            assert all(tag["entity"] in labels and 0 < tag["score"] <= 1 for tag in tags)
            assert [tag["index"] for tag in tags] == list(range(len(tags)))
        groups = pipe(examples[0], aggregation_strategy="simple", ignore_labels=[])
        assert "".join(examples[0][group["start"] : group["end"]] for group in groups) == examples[0]


class TextGenerationCheck(Check):
    """The text and its continuation."""

    task = "text-generation"

    def run_pipeline_test(self, pipe, examples):
        options = {"max_new_tokens": 3, "do_sample": False}
        for text, (answer,) in zip(examples, pipe(examples, **options), strict=True):
            assert answer["generated_text"].startswith(text)
            (alone,) = pipe(text, return_full_text=False, **options)
            assert text + alone["generated_text"] == answer["generated_text"]
            (tokens,) = pipe(text, return_tensors=True, **options)
            assert len(tokens["generated_token_ids"]) == len(pipe.tokenizer(text).input_ids) + 3
        assert len(pipe(examples[0], max_new_tokens=3, do_sample=True, num_return_sequences=2)) == 2
        assert isinstance(pipe("", **options)[0]["generated_text"], str)
        # No text is too long, whatever the model was trained for.
        long = "a " * pipe.model.config.max_position_embeddings
        assert pipe(long, **options)[0]["generated_text"].startswith(long)


class ZeroShotCheck(Check):
    """A score for each candidate."""

    task = "zero-shot-classification"
    options = {"candidate_labels": ["health", "politics"]}

    def run_pipeline_test(self, pipe, examples):
        for answer in pipe(examples):
            assert sorted(answer["labels"]) == ["health", "politics"] and abs(sum(answer["scores"]) - 1) < 1e-2
        several = pipe(examples[0], candidate_labels="sports, health, law", multi_label=True)
        assert all(0 < score < 1 for score in several["scores"]) and len(several["scores"]) == 3
        with_errors(lambda: pipe(examples[0], hypothesis_template="no place"), ValueError)


class ImageClassificationCheck(Check):
    """Labels of a picture."""

    task = "image-classification"
    examples = [Image.new("RGB", (20, 30), "red"), Image.new("L", (9, 9), 100)]

    def run_pipeline_test(self, pipe, examples):
        labels = set(pipe.model.config.id2label.values())
        for answers in pipe(examples):
            assert {answer["label"] for answer in answers} == labels
            assert abs(sum(answer["score"] for answer in answers) - 1) < 1e-2
        assert [len(answers) for answers in pipe(examples, top_k=1)] == [1, 1]


def with_errors(call, error):
    """`call` must raise `error`."""
    try:
        call()
    except error:
        return
    raise AssertionError(f"no {error.__name__}")
