"""Train variants of a small language model by one recipe and compare their validation perplexity.

A variant is `name` or `name:field=value,field=value`, with the fields of the configuration that it changes. Causal
models predict the next token, bidirectional models (causal=false) predict masked tokens. All models are scored on the
same tokens at every length, and masked models with the same masks. configuration/recipes/ablations/ has one recipe
for each table of ablations of the papers.

Example:
    python scripts/run_ablation.py --recipe ablations/rpe-input --output_dir outputs/input
    python scripts/run_ablation.py --output_dir outputs/decay --variants "0.9:decay=0.9" "0.99:decay=0.99"
"""

from tnn_scripts.common.errors import importing, report_errors

from tnn_scripts.common.arguments import parse_arguments, training_options
from tnn_scripts.common.declared import changed
from tnn_scripts.options.ablation import AblationArguments


@report_errors
def main():
    args, options = parse_arguments([AblationArguments, training_options()], __doc__)
    with importing("training"):
        from tnn_scripts.runs.run_ablation import start
    start(args, changed(options))


if __name__ == "__main__":
    main()
