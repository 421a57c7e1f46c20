"""The subcommands of `tnn`: the program of each, and its summary in one line."""

import json
import shutil
import sys
from pathlib import Path

# Subcommand -> (module of a program, summary).
COMMANDS = {
    "demo": ("demo", "train a small model on real text, save it, load it and let it write"),
    "pretrain": ("pretrain", "pretrain a causal or masked language model, on one device or many"),
    "finetune-glue": ("finetune_glue", "fine-tune on GLUE tasks or on files of sentences with labels"),
    "plan": ("plan", "count memory and communication of training on several devices"),
    "evaluate": ("evaluate_lm", "measure perplexity by the length of the context"),
    "generate": ("generate", "continue prompts"),
    "chat": ("chat", "chat with a model in the terminal"),
    "serve": ("serve", "serve a web page that continues texts and shows the kernels of a model"),
    "api": ("api", "serve the routes of OpenAI's API to many clients at once"),
    "plot-kernels": ("plot_kernels", "draw the kernels of a model"),
    "to-recurrent": ("to_recurrent", "convert a causal model to a recurrence of low order"),
    "convert": ("convert_original", "convert a checkpoint of the released implementations"),
    "push": ("push_to_hub", "publish a model with its card on the Hub"),
    "card": ("model_card", "write the card of a model"),
    "hub-kernel": ("hub_kernel", "write the Triton product as a kernel of the Hub"),
    "lra": ("run_lra", "train on a task of the Long Range Arena"),
    "images": ("run_image_classification", "train an image classifier"),
    "synthetic": ("run_synthetic", "train on synthetic tasks: copying, delay, recall, passkey"),
    "ablation": ("run_ablation", "compare variants of a model"),
    "benchmark": ("benchmark", "compare speed and memory with peers"),
}
# Suggestions for a trained model: subcommands with their options.
OF_TNN = ("plot-kernels --model_name_or_path {folder} --output_dir {folder}/kernels",)
LAST_STEP = ("push {folder} --repo_id USER/NAME",)
FIRST_STEP = {
    "causal": (
        'generate --model_name_or_path {folder} --prompt "In the beginning" --do_sample true',
        "serve --model_name_or_path {folder}",
    ),
    "masked": ("finetune-glue --model_name_or_path {folder} --task_name sst2 --do_train --output_dir outputs/sst2",),
    "classifier": (),
}
COMMAND_OF = {module: command for command, (module, _) in COMMANDS.items()}


def next_steps(folder: str, kind: str) -> str:
    """The next commands for the model in `folder`, one on each line. `kind` is causal, masked or classifier."""
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    steps = FIRST_STEP[kind] + (OF_TNN if config["model_type"] == "tnn" else ()) + LAST_STEP
    # `make demo` runs in a virtual environment that is not active in the user's shell.
    tool = "tnn" if shutil.which("tnn") else str(Path(sys.executable).with_name("tnn"))
    return "next:\n" + "\n".join(f"    {tool} {step.format(folder=folder)}" for step in steps)
