"""Train a small TNN language model on real text, save it, load it back and let it continue a prompt.

The training is one of `tnn pretrain`, and has its options.

Example:
    python scripts/demo.py --max_steps 300 --prompt "In the beginning"
    python scripts/demo.py --dataset_name my_book.txt --config_overrides tno_type=rtf
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from tnn_programs.cli.errors import importing, report_errors

from tnn_programs.cli.atomic import read_json, write_json
from tnn_programs.cli.commands import next_steps
from tnn_programs.cli.parser import load_config, parse_arguments, require
from tnn_programs.cli.training_arguments import PretrainArguments

logger = logging.getLogger("demo")


@dataclass(kw_only=True)
class DemoArguments(PretrainArguments):
    """The options of `tnn pretrain`, some with other defaults, and those of the text that the model writes."""

    output_dir: str = "outputs/demo"
    max_steps: int = 300
    per_device_train_batch_size: int | None = 16
    learning_rate: float | None = 4e-3
    torch_compile: bool | None = False
    prompt: str = "And God said unto"
    max_new_tokens: int = 60

    def __post_init__(self):
        super().__post_init__()
        require(self, "objective", self.objective == "clm", "clm for a model that writes")


def continuation(args: DemoArguments, use_cache: bool) -> str:
    """The text that the saved model generates after it is loaded."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

    tokenizer = AutoTokenizer.from_pretrained(args.output_dir)
    model = AutoModelForCausalLM.from_pretrained(args.output_dir)
    set_seed(args.seed)
    given = {"max_new_tokens": args.max_new_tokens, "do_sample": True, "top_p": 0.9, "use_cache": use_cache}
    output = model.generate(**tokenizer(args.prompt, return_tensors="pt"), **given)
    return tokenizer.decode(output[0], skip_special_tokens=True)


@report_errors
def main():
    """Train, save, load and sample."""
    (args,) = parse_arguments([DemoArguments], __doc__)
    with importing("demo"):
        from tnn_programs.training import pretrain
    model_type = load_config(args.config_name).model_type
    if model_type != "tnn":
        raise ValueError(f"--config_name must be a TNN, got {args.config_name} of {model_type}")
    metrics = pretrain.run(args)
    unstable = metrics["unstable_layers"]
    text = continuation(args, use_cache=not unstable)
    file = Path(args.output_dir) / "metrics.json"
    write_json(file, read_json(file) | {"text": text})
    logger.info("saved in %s; loaded from there, the model continues:\n\n%s\n", args.output_dir, text)
    logger.info("%s", next_steps(args.output_dir, "causal", unstable))


if __name__ == "__main__":
    main()
