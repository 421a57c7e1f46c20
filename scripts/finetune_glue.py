"""Fine-tune a model on GLUE tasks, or on files of the same form, with transformers' Trainer.

The options are those of run_glue.py of transformers. --sweep trains with each learning rate and seed, and keeps the
model with the best validation score for each task.

Example:
    python scripts/finetune_glue.py --model_name_or_path outputs/masked --task_name sst2 --do_train --do_eval \\
        --learning_rate 1e-3 --num_train_epochs 3 --output_dir outputs/sst2
    python scripts/finetune_glue.py --model_name_or_path outputs/masked --task_name all --sweep \\
        --output_dir outputs/glue
    python scripts/finetune_glue.py --model_name_or_path outputs/masked --train_file train.csv \\
        --validation_file validation.csv --do_train --do_eval --output_dir outputs/mine
"""

from tnn_scripts.common.errors import importing, report_errors

from tnn_scripts.common.arguments import parse_arguments, training_options
from tnn_scripts.common.declared import changed
from tnn_scripts.options.glue import TRAINING, GlueArguments


@report_errors
def main():
    args, options = parse_arguments([GlueArguments, training_options(**TRAINING)], __doc__)
    with importing("training"):
        from tnn_scripts.runs.finetune_glue import start
    start(args, changed(options))


if __name__ == "__main__":
    main()
