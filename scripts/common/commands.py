"""The subcommands of `tnn`: which program each runs, and what it does in a line."""

import shutil
import sys
from pathlib import Path

# Subcommand -> (module of a program, summary).
COMMANDS = {
    "demo": ("demo", "train a small model on real text, save it, load it and let it write"),
    "pretrain": ("pretrain", "pretrain a causal or masked language model, on one device or many"),
    "finetune-glue": ("finetune_glue", "fine-tune on GLUE tasks or on files of sentences with labels"),
    "evaluate": ("evaluate_lm", "measure perplexity by the length of the context"),
    "generate": ("generate", "continue prompts"),
    "chat": ("chat", "write in turns with a model, in the terminal"),
    "serve": ("serve", "serve a page on which a model writes and shows its kernels"),
    "plot-kernels": ("plot_kernels", "draw the kernels of a model"),
    "to-recurrent": ("to_recurrent", "convert a causal model to a recurrence of low order"),
    "convert": ("convert_original", "convert a checkpoint of the released implementations"),
    "push": ("push_to_hub", "publish a model with its card on the Hub"),
    "card": ("model_card", "write the card of a model"),
    "lra": ("run_lra", "train on a task of the Long Range Arena"),
    "images": ("run_image_classification", "train an image classifier"),
    "synthetic": ("run_synthetic", "train on the synthetic tasks of the RTF paper"),
    "ablation": ("run_ablation", "compare variants of a model"),
    "benchmark": ("benchmark", "measure speed and memory beside peers"),
}
# What one may do with a trained language model: subcommands with their options.
NEXT_STEPS = (
    'generate --model_name_or_path {folder} --prompt "In the beginning" --do_sample true',
    "serve --model_name_or_path {folder}",
    "plot-kernels --model_name_or_path {folder} --output_dir {folder}/kernels",
    "push {folder} --repo_id USER/NAME",
)
FINE_TUNE = "finetune-glue --model_name_or_path {folder} --task_name sst2 --do_train --output_dir outputs/sst2"
COMMAND_OF = {module: command for command, (module, _) in COMMANDS.items()}


def next_steps(folder: str, causal: bool = True) -> str:
    """Commands to go on with the model in `folder`, as lines."""
    steps = NEXT_STEPS if causal else (FINE_TUNE, *NEXT_STEPS[2:])
    # `make demo` runs in a virtual environment that its user has not entered.
    tool = "tnn" if shutil.which("tnn") else str(Path(sys.executable).with_name("tnn"))
    return "next:\n" + "\n".join(f"    {tool} {step.format(folder=folder)}" for step in steps)
