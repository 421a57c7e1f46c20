"""MTEB and sentence-transformers, TRL, zero-shot pipelines, and the examples for chats and PEFT."""

import re

import peft
import pytest
import torch
from datasets import Dataset
from packaging.version import Version
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainingArguments,
    pipeline,
)

from helpers.ecosystem import SENTENCES, Matrix, log_likelihood, save_head
from helpers.models import VALUES, lively_language_model, relative_error, seeded, slow, tiny_config, values_with_gaps
from helpers.scripts import ROOT, save_model
from modeling_tnn import TnnForCausalLM, TnnForSequenceClassification, TnnModel
from modeling_tnn.cache_tnn import CACHE
from modeling_tnn.data.text import train_tokenizer

heads = Matrix()


def retrieval(queries: list[str], corpus: list[str]):
    """A retrieval task of MTEB on local texts: the i-th query asks for the i-th text."""
    tasks = pytest.importorskip("mteb.abstasks")
    described = pytest.importorskip("mteb.abstasks.task_metadata").TaskMetadata(
        name="Local", description="Texts of this test.", dataset={"path": "local/texts", "revision": "1"},
        type="Retrieval", category="t2t", eval_langs=["eng-Latn"], main_score="ndcg_at_10",
    )  # fmt: skip

    class Local(tasks.AbsTaskRetrieval):
        metadata = described

        def load_data(self, **options):
            rows = {name: [{"id": f"{i}", "text": text, "title": ""} for i, text in enumerate(texts)]
                    for name, texts in (("queries", queries), ("corpus", corpus))}  # fmt: skip
            split = {name: Dataset.from_list(found) for name, found in rows.items()}
            split |= {"relevant_docs": {f"{i}": {f"{i}": 1} for i in range(len(queries))}, "top_ranked": None}
            self.dataset, self.data_loaded = {"default": {"test": split}}, True

    return Local()


@heads(TnnModel)
def test_mteb(head, folder):
    """The score of a retrieval task is that of the cosines of the mean-pooled vectors."""
    library = pytest.importorskip("sentence_transformers")
    mteb = pytest.importorskip("mteb")
    encoder = library.SentenceTransformer(str(folder), device="cpu")
    queries = [SENTENCES[1][:4], SENTENCES[0][:20], SENTENCES[2][:5]]
    task = retrieval(queries, SENTENCES)
    found = mteb.evaluate(encoder, task, cache=None, show_progress_bar=False).task_results[0].scores["test"][0]
    cosines = library.util.cos_sim(encoder.encode(queries), encoder.encode(SENTENCES))
    ranks = (cosines > cosines.diagonal()[:, None]).sum(1)  # (3,), 0 for the best
    assert set(ranks.tolist()) != {0}, "every query would score 1"
    assert found["ndcg_at_10"] == pytest.approx((1 / torch.log2(ranks + 2.0)).mean().item(), abs=1e-4)


@heads(TnnModel)
def test_sentence_transformers_training(head, folder, tmp_path):
    """Contrastive training brings pairs together, and what was trained is saved and loaded."""
    library = pytest.importorskip("sentence_transformers")
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    encoder = library.SentenceTransformer(str(folder), device="cpu")
    pairs = Dataset.from_dict({"anchor": SENTENCES * 4, "positive": [text[::-1] for text in SENTENCES] * 4})
    args = library.SentenceTransformerTrainingArguments(
        str(tmp_path / "run"), max_steps=12, per_device_train_batch_size=3, learning_rate=3e-3, use_cpu=True,
        report_to="none", save_strategy="no", logging_steps=1, batch_sampler="no_duplicates", seed=0,
    )  # fmt: skip
    loss = losses.MultipleNegativesRankingLoss(encoder)
    trainer = library.SentenceTransformerTrainer(encoder, args, train_dataset=pairs, loss=loss)
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged[-1] < 0.5 * logged[0], logged
    encoder.eval().save_pretrained(str(tmp_path / "encoder"))
    loaded = library.SentenceTransformer(str(tmp_path / "encoder"), device="cpu")
    vectors = torch.from_numpy(loaded.encode(SENTENCES))
    torch.testing.assert_close(vectors, torch.from_numpy(encoder.encode(SENTENCES)))


STARTS, ENDS = [text[:9] for text in SENTENCES], [text[9:] for text in SENTENCES]


def settings(trainer: str, output_dir, **options):
    """The configuration of a trainer of TRL, for a few steps without files."""
    trl = pytest.importorskip("trl")
    common = {"learning_rate": 3e-3, "logging_steps": 1, "report_to": "none", "save_strategy": "no", "seed": 0}
    common |= {"use_cpu": True, "bf16": False}  # as TRL takes bfloat16 unless told otherwise
    return getattr(trl, f"{trainer}Config")(str(output_dir / "run"), **common | options)


def logged(trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@heads(TnnForCausalLM)
@pytest.mark.parametrize("packing", [True, *slow(False)])
def test_trl_sft(head, folder, packing, tmp_path):
    """Packed texts do not see each other: the loss of a batch is that of its texts one by one. The loss falls."""
    args = settings("SFT", tmp_path, packing=packing, max_length=64, max_steps=8, per_device_train_batch_size=2)
    from trl import SFTTrainer

    trainer = SFTTrainer(str(folder), args, train_dataset=Dataset.from_dict({"text": SENTENCES * 8}))
    batch = next(iter(trainer.get_train_dataloader()))
    assert ("position_ids" in batch) == packing
    model = trainer.model.eval()
    with torch.no_grad():
        whole = model(**batch).loss
        parts = [model(text[None], labels=text[None]) for text in texts_of(batch)]
    counts = torch.tensor([part.logits.shape[1] - 1 for part in parts])
    alone = (torch.stack([part.loss for part in parts]) * counts).sum() / counts.sum()
    assert len(parts) > 1 and relative_error(whole, alone) < 1e-5
    trainer.train()
    losses = logged(trainer, "loss")
    assert losses[-1] < 0.8 * losses[0], losses


def texts_of(batch) -> list[torch.Tensor]:
    """The tokens of each text, packed in one row or padded."""
    if "position_ids" in batch:
        starts = (batch["position_ids"][0] == 0).nonzero()[:, 0].tolist()
        return list(batch["input_ids"][0].tensor_split(starts[1:]))
    return [row[mask.bool()] for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]


@heads(TnnForCausalLM)
def test_trl_dpo(head, folder, tokenizer, tmp_path):
    """The first loss is log 2; then the chosen texts become likelier than the rejected ones."""
    args = settings("DPO", tmp_path, max_steps=8, per_device_train_batch_size=4)
    from trl import DPOTrainer

    rejected = [" of the", " jug", " daft"]
    data = Dataset.from_dict({"prompt": STARTS * 8, "chosen": ENDS * 8, "rejected": rejected * 8})
    trainer = DPOTrainer(str(folder), args=args, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    assert logged(trainer, "loss")[0] == pytest.approx(0.6931, abs=1e-3)
    before, after = AutoModelForCausalLM.from_pretrained(folder).eval(), trainer.model.eval()
    for start, good, bad in zip(STARTS, ENDS, rejected, strict=True):
        margins = [
            log_likelihood(model, tokenizer, start, good) - log_likelihood(model, tokenizer, start, bad)
            for model in (before, after)
        ]
        assert margins[1] > margins[0] + 1, start


@pytest.mark.slow
@heads(TnnForCausalLM)
def test_trl_grpo(head, tokenizer, tmp_path):
    """The reward, the number of even tokens, rises. The texts come from `generate` and its cache."""
    args = settings("GRPO", tmp_path, max_steps=16, learning_rate=2e-2, per_device_train_batch_size=16,
                    num_generations=8, max_completion_length=8)  # fmt: skip
    from trl import GRPOTrainer

    def reward(completion_ids: list[list[int]], **columns) -> list[float]:
        return [float(sum(token % 2 == 0 for token in ids)) for ids in completion_ids]

    # Untied: a random model with tied embeddings repeats its last token.
    folder = save_head(head, tokenizer, tmp_path / "model", tie_word_embeddings=False)
    data = Dataset.from_dict({"prompt": STARTS * 8})
    trainer = GRPOTrainer(str(folder), reward, args=args, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    rewards = logged(trainer, "reward")
    assert rewards[0] < 5 and rewards[-1] > 6.5, rewards


IDS = torch.arange(3, 21).view(2, 9)
CAUSAL = {"task_type": "CAUSAL_LM"}
VIRTUAL = CAUSAL | {"num_virtual_tokens": 4, "num_attention_heads": 1}
WORKING = {
    "LoRA": lambda: peft.LoraConfig(target_modules="all-linear", **CAUSAL),
    "LoRA by name": lambda: peft.LoraConfig(target_modules=["u_proj", "v_proj", "o_proj"], **CAUSAL),
    "IA3": lambda: peft.IA3Config(target_modules=["v_proj", "o_proj"], feedforward_modules=["o_proj"], **CAUSAL),
    "prompt tuning": lambda: peft.PromptTuningConfig(**VIRTUAL),
    "P-tuning": lambda: peft.PromptEncoderConfig(**VIRTUAL),
}

# PEFT puts its soft prompts before every token where the cache is not called `past_key_values`: with transformers 5.24
# GPT-2 and Llama write other tokens with a cache, too.
SOFT_PROMPTS = pytest.mark.xfail(
    CACHE == "cache" and Version(peft.__version__) <= Version("0.21.2"), reason="PEFT 0.21.2", strict=True
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=SOFT_PROMPTS if name.endswith("tuning") else ()) for name in WORKING]
)
def test_adapters(name):
    """The adapter alone has gradients, and the cache gives the tokens of the full forward pass."""
    model = peft.get_peft_model(lively_language_model(vocab_size=300).float(), WORKING[name]())
    model.train()(input_ids=IDS, attention_mask=torch.ones_like(IDS), labels=IDS).loss.backward()
    gradients = {key for key, value in model.named_parameters() if value.grad is not None and value.grad.any()}
    assert gradients and gradients <= {key for key, value in model.named_parameters() if value.requires_grad}
    options = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 5, "do_sample": False}
    cached, full = (model.eval().generate(input_ids=IDS, use_cache=cache, **options) for cache in (True, False))
    assert torch.equal(cached, full) and cached.shape == (2, 14)


@pytest.mark.parametrize("task", [None, "FEATURE_EXTRACTION", "SEQ_CLS"])
@pytest.mark.parametrize("name", VALUES)
def test_adapters_of_real_values(name, task):
    """PEFT gives every head of a task `input_ids=None`. The adapter alone has gradients."""
    head, fields, key = VALUES[name]
    config = peft.LoraConfig(target_modules="all-linear", task_type=task)
    model = peft.get_peft_model(seeded(head, tiny_config("s4d", False, **fields)), config)
    model(**{key: values_with_gaps(2, 9, fields["input_channels"])})[0].square().sum().backward()
    gradients = {key for key, value in model.named_parameters() if value.grad is not None and value.grad.any()}
    assert any("lora" in key for key in gradients)
    assert gradients <= {key for key, value in model.named_parameters() if value.requires_grad}


def test_prefix_tuning_is_refused():
    tuned = peft.get_peft_model(lively_language_model(vocab_size=300).float(), peft.PrefixTuningConfig(**VIRTUAL))
    with pytest.raises(ValueError, match="must be a cache for TNNs"):
        tuned(input_ids=IDS, attention_mask=torch.ones_like(IDS), labels=IDS)


def test_chats(tmp_path):
    """The snippet of the guide, a step of Trainer with what it makes; the saved template, in a pipeline too."""
    text = (ROOT / "docs" / "guides" / "finetune.md").read_text()
    snippet = re.search(r"## Chats.*?```python\n(.*?)```", text, re.DOTALL)[1]
    made = {}
    folder = save_model(tmp_path / "model")
    exec(compile(snippet.replace("outputs/demo", str(folder)), "guides/finetune.md", "exec"), made)
    tokenizer, model, inputs, labels = (made[name] for name in ("tokenizer", "model", "inputs", "labels"))
    shown = "<|user|>Who made the light?<|assistant|>God made it.</s>"
    assert tokenizer.decode(inputs["input_ids"]) == shown
    assert tokenizer.decode([label for label in labels if label != -100]) == "God made it.</s>"
    row = {name: inputs[name] for name in ("input_ids", "attention_mask")} | {"labels": labels}
    arguments = TrainingArguments(str(tmp_path / "run"), max_steps=1, report_to="none", save_strategy="no")
    assert Trainer(model, arguments, DataCollatorForSeq2Seq(tokenizer), [row, row]).train().training_loss > 0
    tokenizer.save_pretrained(tmp_path / "saved")
    prompt = AutoTokenizer.from_pretrained(tmp_path / "saved").apply_chat_template(
        made["chat"][:1], add_generation_prompt=True, return_tensors="pt"
    )
    ids = prompt["input_ids"]
    assert tokenizer.decode(ids[0]).endswith("<|assistant|>")
    assert model.generate(ids, max_new_tokens=3).shape[1] > ids.shape[1]
    model.eval().save_pretrained(tmp_path / "saved")
    chat = pipeline("text-generation", model=str(tmp_path / "saved"), device="cpu")
    answered = chat(made["chat"][:1], max_new_tokens=3, do_sample=False)[0]["generated_text"]
    expected = tokenizer.decode(model.generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :], True)
    assert answered == [*made["chat"][:1], {"role": "assistant", "content": expected}]


def test_matrix_of_the_page():
    heads.check()


def test_zero_shot_classification():
    """A classifier of entailment scores labels of any words."""
    tokenizer = train_tokenizer(Dataset.from_dict({"text": SENTENCES}), 300)
    labels = {"contradiction": 0, "neutral": 1, "entailment": 2}
    names = {number: name for name, number in labels.items()}
    config = tiny_config("rpe", False, vocab_size=len(tokenizer), num_labels=3, label2id=labels, id2label=names)
    classify = pipeline("zero-shot-classification", seeded(TnnForSequenceClassification, config), tokenizer=tokenizer)
    found = classify(SENTENCES[0], ["politics", "a long walk"])
    assert sum(found["scores"]) == pytest.approx(1) and set(found["labels"]) == {"politics", "a long walk"}
    alone = classify(SENTENCES[0], ["politics"], multi_label=True)["scores"][0]
    text = tokenizer(SENTENCES[0], "This example is politics.", return_tensors="pt", truncation="only_first")
    logits = classify.model(**text).logits[0, [0, 2]]
    assert alone == pytest.approx(logits.softmax(-1)[1].item(), rel=1e-4)
