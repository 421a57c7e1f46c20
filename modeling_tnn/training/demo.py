"""Train a small language model, load it back, and let it continue a prompt: the work of `tnn demo`."""

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

from tnn_cli.atomic import check_overwriting, claim, new_files, write_json
from tnn_cli.commands import next_steps
from tnn_cli.parser import load_config

from ..data.text import DEMO_CORPUS, load_corpus, pack, train_tokenizer
from ..serving.page import PageArguments, import_gradio, serve
from ..tools.poles import find_unstable
from .grouping_trainer import GroupingTrainer

logger = logging.getLogger("demo")


def build_trainer(args, config: PreTrainedConfig) -> Trainer:
    """The Trainer with corpus, tokenizer and model."""
    corpus = load_corpus(args.dataset_name, args.dataset_config_name, documents=args.documents)
    tokenizer = train_tokenizer(corpus["train"], config.vocab_size)
    config.vocab_size, length = len(tokenizer), config.max_position_embeddings
    blocks = {split: pack(texts, tokenizer, length, split=split) for split, texts in corpus.items()}
    if short := [split for split, packed in blocks.items() if len(packed) == 0]:
        raise ValueError(f"The {short[0]} text must have at least one block of {length} tokens, got fewer")
    model = AutoModelForCausalLM.from_config(config)
    shown = "%s parameters, operator %s; %d training and %d validation blocks of %d tokens"
    sizes = len(blocks["train"]), len(blocks["validation"]), length
    logger.info(shown, f"{model.num_parameters():,}", config.tno_type, *sizes)
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


def continuation(args, use_cache: bool) -> str:
    """The text that the saved model generates after it is loaded."""
    tokenizer = AutoTokenizer.from_pretrained(args.output_dir)
    model = AutoModelForCausalLM.from_pretrained(args.output_dir)
    set_seed(args.seed)
    given = {"max_new_tokens": args.max_new_tokens, "do_sample": True, "top_p": 0.9, "use_cache": use_cache}
    output = model.generate(**tokenizer(args.prompt, return_tensors="pt"), **given)
    return tokenizer.decode(output[0], skip_special_tokens=True)


def run(args, config: PreTrainedConfig):
    """Train, save, load and sample."""
    set_seed(args.seed)
    start, output = time.perf_counter(), Path(args.output_dir)
    trainer = build_trainer(args, config)
    before = perplexity(trainer)
    trainer.train()
    after = perplexity(trainer)
    with new_files(output) as folder:
        trainer.save_model(str(folder))
        write_json(folder / "training_args.json", asdict(args) | {"dataset_name": args.dataset_name or DEMO_CORPUS})
    unstable = find_unstable(trainer.model)
    text = continuation(args, use_cache=not unstable)
    metrics = {
        "perplexity_before": before,
        "perplexity": after,
        "steps": args.max_steps,
        "tokens": args.max_steps * args.per_device_train_batch_size * config.max_position_embeddings,
        "seconds": time.perf_counter() - start,
        "parameters": trainer.model.num_parameters(),
        "torch_threads": torch.get_num_threads(),
        "text": text,
    }
    write_json(output / "metrics.json", metrics)
    logger.info("\nvalidation perplexity: %.1f before, %.1f after training; %.0f s", before, after, metrics["seconds"])
    logger.info("saved in %s; loaded from there, the model continues:\n\n%s\n", args.output_dir, text)
    logger.info("%s", next_steps(args.output_dir, "causal", unstable))


def start(args):
    """Train, save, load and sample, and serve the model with `--serve`. What could not be served is refused first."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    output = Path(args.output_dir)
    config = load_config(args.config_name, {} if args.tno_type is None else {"tno_type": args.tno_type})
    if config.model_type != "tnn":
        raise ValueError(f"--config_name must be a TNN, got {args.config_name} of {config.model_type}")
    if args.serve:
        import_gradio()
    with claim(output):
        check_overwriting(output, args.overwrite_output_dir)
        run(args, config)
    if args.serve:
        serve(PageArguments(args.output_dir))
