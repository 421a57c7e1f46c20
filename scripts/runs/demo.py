"""Train a small TNN language model on real text, save it, load it back and let it continue a prompt."""

import logging
import math
import time
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    PreTrainedConfig,
    Trainer,
    TrainingArguments,
    set_seed,
)

from modeling_tnn import find_unstable
from tnn_scripts.common.arguments import load_config
from tnn_scripts.common.atomic import check_overwriting, claim, holds_model, new_files, write_json
from tnn_scripts.common.commands import next_steps
from tnn_scripts.common.grouping_trainer import GroupingTrainer
from tnn_scripts.data.text import DEMO_CORPUS, load_corpus, pack, train_tokenizer
from tnn_scripts.options.demo import DemoArguments
from tnn_scripts.serving.page import PageArguments, import_gradio, serve

logger = logging.getLogger("demo")


def build_config(args: DemoArguments) -> PreTrainedConfig:
    """The configuration of the preset with the chosen operator.

    Raises:
        ValueError: it is no TNN, or the operator is not causal.
    """
    config = load_config(args.config_name, {} if args.tno_type is None else {"tno_type": args.tno_type})
    if config.model_type != "tnn":
        raise ValueError(f"--config_name must be a TNN, got {args.config_name} of {config.model_type}")
    return config


def build_trainer(args: DemoArguments, config: PreTrainedConfig) -> Trainer:
    """The Trainer with corpus, tokenizer and model."""
    corpus = load_corpus(args.dataset_name, args.dataset_config_name, documents=args.documents)
    tokenizer = train_tokenizer(corpus["train"], config.vocab_size)
    config.vocab_size = len(tokenizer)
    length = config.max_position_embeddings
    blocks = {split: pack(texts, tokenizer, length, split=split) for split, texts in corpus.items()}
    model = AutoModelForCausalLM.from_config(config)
    logger.info(
        "%s parameters, operator %s; %d training and %d validation blocks of %d tokens",
        f"{model.num_parameters():,}",
        config.tno_type,
        len(blocks["train"]),
        len(blocks["validation"]),
        config.max_position_embeddings,
    )
    training = TrainingArguments(
        output_dir=args.output_dir,
        max_steps=args.max_steps,
        per_device_train_batch_size=args.per_device_train_batch_size,
        per_device_eval_batch_size=args.per_device_train_batch_size,
        learning_rate=args.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,
        weight_decay=0.1,
        max_grad_norm=1.0,
        logging_steps=10,
        save_strategy="no",
        dataloader_pin_memory=torch.cuda.is_available(),
        seed=args.seed,
    )
    return GroupingTrainer(
        model=model,
        args=training,
        train_dataset=blocks["train"],
        eval_dataset=blocks["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )


def perplexity(trainer: Trainer) -> float:
    return math.exp(trainer.evaluate()["eval_loss"])


def continuation(folder: str, prompt: str, max_new_tokens: int, seed: int, use_cache: bool) -> str:
    """The text that the saved model generates after it is loaded."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    set_seed(seed)
    output = model.generate(
        **tokenizer(prompt, return_tensors="pt"),
        max_new_tokens=max_new_tokens,
        do_sample=True,
        top_p=0.9,
        use_cache=use_cache,
    )
    return tokenizer.decode(output[0], skip_special_tokens=True)


def run(args: DemoArguments, config: PreTrainedConfig):
    """Train, save, load and sample.

    Raises:
        ValueError: the text or the options are wrong.
        SavingError: the model could not be written.
    """
    set_seed(args.seed)
    start = time.perf_counter()
    trainer = build_trainer(args, config)
    before = perplexity(trainer)
    trainer.train()
    after = perplexity(trainer)
    with new_files(Path(args.output_dir)) as folder:
        trainer.save_model(str(folder))
        write_json(folder / "training_args.json", asdict(args) | {"dataset_name": args.dataset_name or DEMO_CORPUS})
    unstable = find_unstable(trainer.model)
    text = continuation(args.output_dir, args.prompt, args.max_new_tokens, args.seed, use_cache=not unstable)
    metrics = {
        "perplexity_before": before,
        "perplexity": after,
        "steps": args.max_steps,
        "tokens": args.max_steps * args.per_device_train_batch_size * trainer.model.config.max_position_embeddings,
        "seconds": time.perf_counter() - start,
        "parameters": trainer.model.num_parameters(),
        "torch_threads": torch.get_num_threads(),
        "text": text,
    }
    write_json(Path(args.output_dir) / "metrics.json", metrics)
    logger.info("\nvalidation perplexity: %.1f before, %.1f after training; %.0f s", before, after, metrics["seconds"])
    logger.info("saved in %s; loaded from there, the model continues:\n\n%s\n", args.output_dir, text)
    logger.info("%s", next_steps(args.output_dir, "causal", unstable))


def check_serving(args: DemoArguments):
    """Refuse, before the training, what could not be served, and what can be served without.

    Raises:
        ImportError: there is nothing to serve a page with.
        ValueError: the folder has a model already.
    """
    import_gradio()
    if holds_model(Path(args.output_dir)) and not args.overwrite_output_dir:
        raise ValueError(
            f"output_dir={args.output_dir} holds a model: `tnn serve --model_name_or_path {args.output_dir}` serves "
            "it. Give --overwrite_output_dir to train another one in its place."
        )


def start(args: DemoArguments):
    """Train, save, load and sample, and serve the model with `--serve`."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config = build_config(args)
    if args.serve:
        check_serving(args)
    with claim(Path(args.output_dir)):
        check_overwriting(Path(args.output_dir), args.overwrite_output_dir)
        run(args, config)
    if args.serve:
        serve(PageArguments(args.output_dir))
