"""Pretrain a causal or masked language model, on one device or many, and save it with its tokenizer.

Example:
    python scripts/pretrain.py --config_name tnn-tiny --train_file book.txt --output_dir outputs/book --max_steps 500
    python scripts/pretrain.py --recipe wikitext2 --checkpointing_steps 100
    python scripts/pretrain.py --recipe wikitext2 --resume_from_checkpoint latest
    python scripts/pretrain.py --streaming --dataset_name HuggingFaceFW/fineweb code/ --tokenizer_name gpt2 \\
        --vocab_size 50257 --interleave_probabilities 0.8 0.2 --checkpointing_steps 1000
    accelerate launch --config_file configuration/accelerate/ddp.yaml scripts/pretrain.py --recipe wikitext103
"""

from tnn_programs.cli.errors import importing, report_errors

from tnn_programs.cli.parser import parse_arguments
from tnn_programs.cli.training_arguments import PretrainArguments


@report_errors
def main():
    (args,) = parse_arguments([PretrainArguments], __doc__)
    with importing("training"):
        from tnn_programs.training.pretrain import start
    start(args)


if __name__ == "__main__":
    main()
