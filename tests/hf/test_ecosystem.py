"""The tools around transformers, each run with the real library on every head that it applies to.

The matrix of the page on tools is checked against the heads that the tests name. Trainers of TRL, embeddings and
runtimes have files of their own.
"""

import json
import re
import sys
from pathlib import Path
from threading import Thread

import pytest
import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import (
    AutoModel,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    TextIteratorStreamer,
    Trainer,
    TrainingArguments,
    default_data_collator,
    pipeline,
)

from helpers import processes
from helpers.ecosystem import SENTENCES, Matrix, batch_for, first_output, log_likelihood
from helpers.mixers import MIXED
from helpers.models import AUTO, VALUES, VARIANTS, relative_error, seeded, slow, tiny_config, values_with_gaps
from modeling_tnn import (
    TnnForCausalLM,
    TnnForMaskedLM,
    TnnForMultipleChoice,
    TnnForQuestionAnswering,
    TnnForSequenceClassification,
    TnnForTokenClassification,
    TnnModel,
)
from modeling_tnn.tools.checks import CheckpointMismatchError, check_before_loading

heads = Matrix()
LANGUAGE_MODELS = (TnnForMaskedLM, TnnForCausalLM)
OTHERS = [head for head in AUTO if head not in LANGUAGE_MODELS]

TASKS = {
    TnnModel: "feature-extraction",
    TnnForCausalLM: "text-generation",
    TnnForMaskedLM: "fill-mask",
    TnnForSequenceClassification: "text-classification",
    TnnForTokenClassification: "token-classification",
}


@heads(*TASKS)
def test_pipeline(head, folder):
    """A pipeline of each task, by its name; a padded batch gives the same results as single texts."""
    options = {"max_new_tokens": 5, "do_sample": False} if head is TnnForCausalLM else {}
    texts = [text.replace("quick", "<mask>") for text in SENTENCES[::2]] if head is TnnForMaskedLM else SENTENCES
    pipe = pipeline(TASKS[head], model=str(folder), device="cpu")
    assert type(pipe.model) is head
    one_by_one = [pipe(text, **options) for text in texts]
    if head is TnnForSequenceClassification:
        one_by_one = [result for (result,) in one_by_one]
    batched = pipe(texts, batch_size=len(texts), **options)
    if head is TnnModel:
        one_by_one, batched = [features for (features,) in one_by_one], [features for (features,) in batched]
    expected, found = leaves(one_by_one), leaves(batched)
    # Features of padding, which a single text has none of, come after those of the text.
    assert {place: found[place] for place in expected} == pytest.approx(expected, abs=1e-5)


def leaves(nested) -> dict:
    """Numbers and texts of nested lists and dictionaries, by where they are."""
    if isinstance(nested, list | dict):
        items = nested.items() if isinstance(nested, dict) else enumerate(nested)
        return {f"{key}/{place}": leaf for key, value in items for place, leaf in leaves(value).items()}
    return {"": nested}


@heads(TnnForTokenClassification, slow=(TnnForCausalLM, TnnForMaskedLM, TnnForSequenceClassification))
def test_trainer(head, folder, tokenizer, tmp_path):
    """The loss falls, a checkpoint loads, and the trained model is what was saved."""
    rows = [tokenizer(text, return_token_type_ids=False) for text in SENTENCES] * 8
    data = Dataset.from_list(
        [{"input_ids": row["input_ids"], "attention_mask": row["attention_mask"]} for row in rows]
    )
    collator = None
    if head is TnnForSequenceClassification:
        data = data.add_column("label", [0, 1, 0] * 8)
    elif head is TnnForTokenClassification:
        data = data.add_column("labels", [[token % 2 for token in row["input_ids"]] for row in rows])
        collator = DataCollatorForTokenClassification(tokenizer)
    else:
        collator = DataCollatorForLanguageModeling(tokenizer, mlm=head is TnnForMaskedLM, seed=0)
    args = TrainingArguments(str(tmp_path / "run"), max_steps=20, learning_rate=3e-3, logging_steps=5, save_steps=20,
                             per_device_train_batch_size=12, use_cpu=True, seed=0)  # fmt: skip
    model = AUTO[head].from_pretrained(folder)
    trainer = Trainer(model=model, args=args, train_dataset=data, data_collator=collator, processing_class=tokenizer)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.9 * losses[0], losses
    loaded = AUTO[head].from_pretrained(tmp_path / "run" / "checkpoint-20")
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in model.state_dict().items())


def test_predictions_of_answers(tmp_path):
    """Trainer's own evaluation without labels, as in `run_qa.py`, gives two arrays: no state, no loss."""
    rows = [{"input_ids": [5, 6, 7, 8], "attention_mask": [1, 1, 1, 0], "example_id": "a"}] * 5
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", per_device_eval_batch_size=2)
    for causal in (True, False):
        model = seeded(TnnForQuestionAnswering, tiny_config(causal=causal))
        found = Trainer(model, args, default_data_collator).predict(Dataset.from_list(rows)).predictions
        assert [part.shape for part in found] == [(5, 4)] * 2


LLAMA_PATTERNS = ["v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
WAYS = {
    "all-linear": {"target_modules": "all-linear"},
    "patterns": {"target_modules": LLAMA_PATTERNS},
    "DoRA": {"target_modules": "all-linear", "use_dora": True},
}


@heads(TnnForCausalLM, slow=[TnnForMaskedLM, *OTHERS])
def test_lora(head, folder, inputs, tmp_path):
    """Adapters sit on the GTU and the GLU, are trained, change the output; merged, saved and taken off again.

    By patterns of names and as DoRA in causal models.
    """
    peft = pytest.importorskip("peft")
    for name, options in WAYS.items() if head is TnnForCausalLM else [("all-linear", WAYS["all-linear"])]:
        base = AUTO[head].from_pretrained(folder).eval()
        before = first_output(base, inputs)
        model = peft.get_peft_model(base, peft.LoraConfig(r=4, init_lora_weights=False, **options)).eval()
        adapted = {path.split(".")[-1] for path, part in model.named_modules() if hasattr(part, "lora_A")}
        assert {*LLAMA_PATTERNS, *([] if name == "patterns" else ["u_proj"])} <= adapted - {"lm_head"} == adapted
        model(**inputs)[0].square().mean().backward()
        adapters = {path: part.grad for path, part in model.named_parameters() if "lora_" in path}
        assert all(grad is not None and grad.abs().max() > 0 for grad in adapters.values()), "an adapter is not used"
        assert any("magnitude" in path for path in adapters) == (name == "DoRA")
        after = first_output(model, inputs)
        assert relative_error(after, before) > 1e-3
        model.save_pretrained(tmp_path / name)
        again = peft.PeftModel.from_pretrained(AUTO[head].from_pretrained(folder), tmp_path / name).eval()
        assert relative_error(first_output(again, inputs), after) < 1e-6
        with model.disable_adapter():
            assert torch.equal(first_output(model, inputs), before)
        assert relative_error(first_output(again.merge_and_unload(), inputs), after) < 1e-4
        assert torch.equal(first_output(model.unload(), inputs), before)


def weight_only(bits: int):
    """The weight-only quantization of transformers that works on a CPU."""
    torchao = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    if bits == 8:
        return TorchAoConfig(torchao.Int8WeightOnlyConfig())
    groups = torchao.granularity.PerGroup(32)
    return TorchAoConfig(torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=groups))


@heads(TnnForMaskedLM, slow=[TnnForCausalLM, *OTHERS])
def test_quantized(head, folder, inputs, tmp_path):
    """Weights of the GTU and the GLU are integers, those of kernels are not; outputs stay close; saved and loaded."""
    expected = first_output(AUTO[head].from_pretrained(folder), inputs)
    for bits, tolerance in ((8, 0.01), (4, 0.15)):
        quantized = AUTO[head].from_pretrained(folder, quantization_config=weight_only(bits))
        mixer = quantized.base_model.layers[0].mixer
        assert "Int" in type(mixer.u_proj.weight.data).__name__
        assert type(mixer.tno.rpe.out.linear.weight.data) is torch.Tensor
        output = first_output(quantized, inputs)
        assert 0 < relative_error(output, expected) < tolerance
        quantized.save_pretrained(tmp_path / str(bits))
        assert torch.equal(first_output(AUTO[head].from_pretrained(tmp_path / str(bits)), inputs), output)


class Ordered(torch.nn.Linear):
    """A layer that reads its input as if it were contiguous, as those of bitsandbytes do on some CPUs."""

    def forward(self, x):
        return super().forward(x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride()))


MIXERS = [*MIXED.values(), {"layer_types": ["full_attention", "toeplitz"], "num_attention_heads": 4}]


def test_layers_of_quantizers_get_contiguous_inputs():
    """All linear layers are of the class that quantizers replace."""
    for head, fields in [*((TnnForCausalLM, fields) for fields in MIXERS), *((head, {}) for head in AUTO)]:
        causal = head is not TnnForMaskedLM
        model = seeded(head, tiny_config(causal=causal, classifier_pooling="last" if causal else "mean", **fields))
        x = torch.randn(32, 7, 2).permute(2, 1, 0)  # (B, L, d)
        x = x[:, None] if head is TnnForMultipleChoice else x
        options = {"logits_to_keep": 2} if head is TnnForCausalLM else {}
        expected = model(inputs_embeds=x, **options)[0]
        for name, part in model.named_modules():
            if isinstance(part, torch.nn.Linear):
                assert type(part) is torch.nn.Linear, name
                part.__class__ = Ordered
        assert relative_error(model(inputs_embeds=x, **options)[0], expected) < 1e-6, (head, fields)


def test_a_saved_folder_of_any_quantizer_is_not_measured(tmp_path):
    """Its numbers are packed: names and shapes are the quantizer's. A bomb stays one."""
    config = tiny_config(quantization_config={"quant_method": "gptq", "bits": 4})
    model = seeded(TnnForCausalLM, tiny_config())
    config.save_pretrained(tmp_path)
    packed = {name.replace("_proj.weight", "_proj.qweight"): value for name, value in model.state_dict().items()}
    packed = {name: value.flatten()[: -(-value.numel() // 8)].clone() for name, value in packed.items()}
    save_file(packed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check_before_loading(TnnForCausalLM, tmp_path, {})
    with pytest.raises(CheckpointMismatchError, match="declares more than the checkpoint holds"):
        check_before_loading(TnnForCausalLM, tmp_path, {"num_hidden_layers": 99})


@pytest.mark.parametrize("variant", VARIANTS[::2] + slow(*zip(VARIANTS[1::2])))
def test_lora_and_int8_on_every_operator(variant, tmp_path):
    """Tools that look for `nn.Linear` find none in an operator, of any mixer: adapters, and the quantizers' calls."""
    peft, torchao = pytest.importorskip("peft"), pytest.importorskip("torchao.quantization")
    of_torch = pytest.importorskip("torch.ao.quantization")
    ids = {"input_ids": torch.arange(22).view(2, 11)}
    for mixer in ({}, *MIXED.values()):
        seeded(TnnModel, tiny_config(*variant, hidden_size=64, **mixer)).save_pretrained(tmp_path)
        plain, called = (AutoModel.from_pretrained(tmp_path) for _ in range(2))
        expected = first_output(plain, ids)
        kept = {name for name, _ in plain.named_parameters() if re.search(r"\.(tno|short)\.", name)}
        torchao.quantize_(called, torchao.Int8WeightOnlyConfig())
        loaded = AutoModel.from_pretrained(tmp_path, quantization_config=weight_only(8))
        for quantized in (called, loaded, of_torch.quantize_dynamic(plain, {torch.nn.Linear})):
            error = relative_error(first_output(quantized, ids), expected)
            # The heads of MultiHyena multiply three projections.
            assert 0 < error < (0.1 if mixer.get("toeplitz_mixer") == "multihyena" else 0.05)
            assert kept <= {name for name, part in quantized.named_parameters() if type(part.data) is torch.Tensor}
        lora = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(AutoModel.from_pretrained(tmp_path), lora).eval()
        assert not any(".tno." in name for name, _ in model.named_parameters() if "lora_" in name)
        after = first_output(model, ids)
        assert relative_error(after, expected) > 1e-3
        assert relative_error(first_output(model.merge_and_unload(), ids), after) < 1e-4


def test_heads_of_real_values_are_quantized_by_each_call():
    """The map of the values is no linear layer to quantizers, as a table of embeddings is none."""
    torchao, of_torch = pytest.importorskip("torchao.quantization"), pytest.importorskip("torch.ao.quantization")
    for head, fields, name in VALUES.values():
        inputs = {name: values_with_gaps(2, 11, fields["input_channels"])}
        called, plain = (seeded(head, tiny_config(hidden_size=64, **fields)).eval() for _ in range(2))
        expected = first_output(plain, inputs)
        torchao.quantize_(called, torchao.Int8WeightOnlyConfig())
        for quantized in (called, of_torch.quantize_dynamic(plain, {torch.nn.Linear})):
            assert 0 < relative_error(first_output(quantized, inputs), expected) < 0.05


@heads(*LANGUAGE_MODELS, slow=OTHERS)
def test_device_map_with_offload_to_disk(head, folder, inputs, tmp_path):
    """Layers that do not fit into the memory of accelerate stay on disk until they run."""
    expected = AUTO[head].from_pretrained(folder)
    size = sum(value.numel() * value.element_size() for value in expected.base_model.layers.parameters())
    loaded = AUTO[head].from_pretrained(
        folder, device_map="auto", max_memory={"cpu": size // 2 * 2 - 1000}, offload_folder=tmp_path / "offload"
    )
    assert "disk" in loaded.hf_device_map.values() and "cpu" in loaded.hf_device_map.values()
    assert torch.equal(first_output(loaded, inputs), first_output(expected, inputs))


@heads(slow=[*AUTO])
def test_export(head, folder, inputs, tokenizer):
    """One program for all batch sizes and lengths, padded ones too."""
    model = AUTO[head].from_pretrained(folder, use_cache=False).eval()
    model.base_model.layers = model.base_model.layers[:1]
    sizes = {name: dict.fromkeys(range(value.dim()), torch.export.Dim.DYNAMIC) for name, value in inputs.items()}
    if head is TnnForMultipleChoice:  # of two texts
        sizes = {name: free | {1: torch.export.Dim.STATIC} for name, free in sizes.items()}
    program = torch.export.export(model, (), inputs, dynamic_shapes=sizes, strict=False).module()
    other = batch_for(head, tokenizer, [text[::2] for text in SENTENCES[:2] * 2])
    for batch in (inputs, other):
        assert relative_error(first_output(program, batch), first_output(model, batch)) < 1e-5


@heads(TnnForCausalLM)
def test_text_iterator_streamer(head, folder):
    """Pieces of text arrive while `generate` runs in a thread."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AUTO[head].from_pretrained(folder)
    prompt = dict(tokenizer("The quick", return_tensors="pt", return_token_type_ids=False))
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = tokenizer.decode(model.generate(**prompt, **options)[0], skip_special_tokens=True)
    streamer = TextIteratorStreamer(tokenizer, skip_special_tokens=True, timeout=60)
    thread = Thread(target=model.generate, kwargs=prompt | options | {"streamer": streamer})
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces) == expected and len(pieces) > 2


@heads(TnnModel)
def test_sentence_transformers(head, folder, tokenizer, inputs, tmp_path):
    """The mean over the real tokens of the bidirectional model; padding does not change it; saved and loaded."""
    library = pytest.importorskip("sentence_transformers")
    encoder = library.SentenceTransformer(str(folder), device="cpu")
    vectors = torch.from_numpy(encoder.encode(SENTENCES))
    hidden, mask = first_output(AutoModel.from_pretrained(folder), inputs), inputs["attention_mask"][..., None]
    torch.testing.assert_close(vectors, (hidden * mask).sum(1) / mask.sum(1), atol=1e-5, rtol=1e-5)
    alone = torch.from_numpy(encoder.encode(SENTENCES[1:2]))
    torch.testing.assert_close(alone, vectors[1:2], atol=1e-5, rtol=1e-5)
    encoder.save_pretrained(str(tmp_path / "encoder"))
    loaded = library.SentenceTransformer(str(tmp_path / "encoder"), device="cpu")
    torch.testing.assert_close(torch.from_numpy(loaded.encode(SENTENCES)), vectors)


LM_EVAL_TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{text}"
doc_to_target: {target}
{rest}
"""
START = "{{start}}"
KINDS = {
    "choices": ("multiple_choice", START, 0, 'doc_to_choice: "{{choices}}"\nmetric_list: [{metric: acc}]'),
    "rolling": ("loglikelihood_rolling", "", '"{{text}}"', "metric_list: [{metric: byte_perplexity}]"),
    "greedy": ("generate_until", START, '"x"', """
generation_kwargs: {until: ["@"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match}]"""),
}  # fmt: skip


def continued(model, tokenizer, start: str) -> str:
    """The text of six more tokens."""
    prompt = tokenizer(start, return_tensors="pt", return_token_type_ids=False)
    tokens = model.generate(**prompt, max_new_tokens=6, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    return tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.slow
@heads(TnnForCausalLM)
def test_lm_evaluation_harness(head, folder, tmp_path):
    """`lm_eval --model hf` on tasks of each kind, in a process that does not import the package."""
    pytest.importorskip("lm_eval")
    documents = [{"start": text[:9], "choices": [text[9:], " of the", "zz"], "text": text} for text in SENTENCES]
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps(document) for document in documents))
    for name, (kind, text, target, rest) in KINDS.items():
        task = LM_EVAL_TASK.format(
            name=name, file=tmp_path / "data.jsonl", kind=kind, text=text, target=target, rest=rest
        )
        (tmp_path / f"{name}.yaml").write_text(task)
    arguments = ["--model", "hf", "--model_args", f"pretrained={folder},trust_remote_code=True,dtype=float32",
                 "--tasks", ",".join(KINDS), "--include_path", tmp_path, "--device", "cpu", "--batch_size", 2,
                 "--log_samples", "--output_path", tmp_path / "out"]  # fmt: skip
    processes.run([sys.executable, "-m", "lm_eval", *arguments], check=True)
    model, tokenizer = AUTO[head].from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for sample, document in zip(samples(tmp_path, "choices"), documents, strict=True):
        found = [float(response[0]) for response in sample["filtered_resps"]]
        expected = [log_likelihood(model, tokenizer, document["start"], f" {one}") for one in document["choices"]]
        assert found == pytest.approx(expected, abs=1e-3)
    for sample in samples(tmp_path, "rolling"):
        expected = log_likelihood(model, tokenizer, "<s>", sample["doc"]["text"])
        assert float(sample["filtered_resps"][0]) == pytest.approx(expected, abs=1e-3)
    for sample in samples(tmp_path, "greedy"):
        assert sample["filtered_resps"][0] == continued(model, tokenizer, sample["doc"]["start"])


def samples(folder: Path, task: str) -> list[dict]:
    """The samples of a task that the harness logged, in the order of the documents."""
    (file,) = folder.glob(f"out/**/samples_{task}_*.jsonl")
    return sorted(map(json.loads, file.read_text().splitlines()), key=lambda sample: sample["doc_id"])


@heads(TnnForCausalLM)
def test_lighteval(head, folder):
    """Its backend for models of transformers scores continuations and generates, as the model itself does."""
    backend = pytest.importorskip("lighteval.models.transformers.transformers_model")
    requests = pytest.importorskip("lighteval.tasks.requests")
    settings = {"model_name": str(folder), "batch_size": 2, "dtype": "float32", "trust_remote_code": True}
    evaluated = backend.TransformersModel(backend.TransformersModelConfig(**settings))
    model, tokenizer = AUTO[head].from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    fields = {"gold_index": 0, "task_name": "continue|0"}
    documents = [requests.Doc(query=text[:9], choices=[text[9:], " of the"], id=text, **fields) for text in SENTENCES]
    for document, response in zip(documents, evaluated.loglikelihood(documents), strict=True):
        expected = [log_likelihood(model, tokenizer, document.query, choice) for choice in document.choices]
        assert response.logprobs == pytest.approx(expected, abs=1e-3)
    for document in documents:
        document.generation_size, document.stop_sequences = 6, []
    for document, response in zip(documents, evaluated.greedy_until(documents), strict=True):
        assert response.text == [continued(model, tokenizer, document.query)]


def test_matrix_of_the_page():
    heads.check()
