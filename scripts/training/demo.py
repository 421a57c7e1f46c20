"""Pretrain a small language model, load it back, and let it continue a prompt: the work of `tnn demo`."""

import logging
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from tnn_programs.cli.atomic import read_json, write_json
from tnn_programs.cli.commands import next_steps
from tnn_programs.cli.parser import load_config
from tnn_programs.training import pretrain

logger = logging.getLogger("demo")


def continuation(args, use_cache: bool) -> str:
    """The text that the saved model generates after it is loaded."""
    tokenizer = AutoTokenizer.from_pretrained(args.output_dir)
    model = AutoModelForCausalLM.from_pretrained(args.output_dir)
    set_seed(args.seed)
    given = {"max_new_tokens": args.max_new_tokens, "do_sample": True, "top_p": 0.9, "use_cache": use_cache}
    output = model.generate(**tokenizer(args.prompt, return_tensors="pt"), **given)
    return tokenizer.decode(output[0], skip_special_tokens=True)


def start(args):
    """Train, save, load and sample."""
    model_type = load_config(args.config_name).model_type
    if model_type != "tnn":
        raise ValueError(f"--config_name must be a TNN, got {args.config_name} of {model_type}")
    metrics = pretrain.run(args.pretraining())
    unstable = metrics["unstable_layers"]
    text = continuation(args, use_cache=not unstable)
    file = Path(args.output_dir) / "metrics.json"
    write_json(file, read_json(file) | {"text": text})
    logger.info("saved in %s; loaded from there, the model continues:\n\n%s\n", args.output_dir, text)
    logger.info("%s", next_steps(args.output_dir, "causal", unstable))
