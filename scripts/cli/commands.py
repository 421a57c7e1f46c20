"""The commands of `tnn`, and those that a program names when it has ended."""

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

# Subcommand -> (module of a program, summary).
COMMANDS = {
    "demo": ("demo", "train a small model on real text, save it, load it and let it write"),
    "presets": ("presets", "list the presets and recipes, with sizes, learning rates and minutes"),
    "pretrain": ("pretrain", "pretrain a causal or masked language model, on one device or many"),
    "finetune-glue": ("finetune_glue", "fine-tune on GLUE tasks or on files of sentences with labels"),
    "plan": ("plan", "estimate memory and speed of a training step on GPUs"),
    "evaluate": ("evaluate_lm", "measure perplexity by the length of the context"),
    "generate": ("generate", "continue prompts, or chat in the terminal"),
    "serve": ("serve", "serve a web page that continues texts and shows the kernels of a model"),
    "api": ("api", "serve the routes of OpenAI's API to many clients at once"),
    "plot-kernels": ("plot_kernels", "draw the kernels of a model"),
    "to-recurrent": ("to_recurrent", "convert a causal model to a recurrence of low order"),
    "convert": ("convert_original", "convert a checkpoint of the released implementations"),
    "push": ("push_to_hub", "publish a model with its card on the Hub, or write them"),
    "lra": ("run_lra", "train on a task of the Long Range Arena"),
    "images": ("run_image_classification", "train an image classifier"),
    "synthetic": ("run_synthetic", "train on synthetic tasks: copying, delay, recall, passkey"),
    "ablation": ("run_ablation", "compare variants of a model"),
}
# Suggestions for a trained model: subcommands with their options.
OF_TNN = ("plot-kernels --model_name_or_path {folder} --output_dir {folder}/kernels",)
LAST_STEP = ("push {folder} --repo_id USER/NAME",)
FIRST_STEP = {
    "causal": ('generate --model_name_or_path {folder} --prompt "{prompt}"', "serve --model_name_or_path {folder}"),
    "unstable": ('generate --model_name_or_path {folder} --prompt "{prompt}" --use_cache false',),
    "masked": ("finetune-glue --model_name_or_path {folder} --task_name sst2 --do_train --output_dir outputs/sst2",),
    "dna": (
        "finetune-glue --model_name_or_path {folder} --do_train --do_eval "
        "--dataset_name katarinagresova/Genomic_Benchmarks_human_enhancers_cohn --output_dir outputs/enhancers",
    ),
    "classifier": (),
}
UNSTABLE = (
    "The training ended with poles outside the unit circle: {layers}. Longer texts may overflow, and none can be "
    "continued from a cache. Train again with --config_overrides rtf_constraint=l1_montel, the default of new "
    "configurations, or with --max_pole_radius 0.99.\n"
)
COMMAND_OF = {module: command for command, (module, _) in COMMANDS.items()}


def next_steps(folder: str, kind: str, unstable: Sequence[object] = (), prompt: str = "In the beginning") -> str:
    """The next commands for the model in `folder`, a line each; before them what its `unstable` layers prevent."""
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    steps = FIRST_STEP["unstable" if unstable and kind == "causal" else kind]
    steps += (OF_TNN if config["model_type"] == "tnn" else ()) + LAST_STEP
    # `make demo` runs in a virtual environment that is not active in the user's shell.
    tool = "tnn" if shutil.which("tnn") else str(Path(sys.executable).with_name("tnn"))
    warning = UNSTABLE.format(layers="; ".join(map(str, unstable))) if unstable else ""
    lines = [f"    {tool} {step.format(folder=folder, prompt=prompt)}" for step in steps]
    return "\n".join([f"{warning}next:", *lines])
