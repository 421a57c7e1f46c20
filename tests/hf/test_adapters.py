"""The examples of the documentation for chats and PEFT, run with the real libraries."""

import re

import peft
import pytest
import torch
from packaging.version import Version
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments, pipeline

from helpers.models import lively_language_model
from helpers.scripts import ROOT, save_model
from modeling_tnn.cache_tnn import CACHE

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
