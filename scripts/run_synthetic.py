"""Measure what causal models remember and find: Copying, Delay, Recall and Passkey.

The program trains one model for every variant and seed, with transformers' Trainer. Copying and Delay are tasks of
the RTF paper and compare state sizes, of RTF or, with --config_overrides tno_type=s4d, of S4D. Copying trains a
language model, of gated Toeplitz units unless --config_overrides says otherwise, and measures the accuracy on the
tokens to copy. Delay trains a linear model of one operator and measures the root mean square error relative to the
signal. Recall (multi-query associative recall) and Passkey compare any configurations, such as hybrids with attention,
by the accuracy on the tokens to find. The recipes copying.yaml and delay.yaml have the lengths and settings of the
paper; small-*.yaml run in minutes on a CPU.

Example:
    python scripts/run_synthetic.py --recipe synthetic/small-copying --output_dir outputs/a
    python scripts/run_synthetic.py --recipe synthetic/small-recall --output_dir outputs/b
"""

from tnn_scripts.common.errors import importing, report_errors

from tnn_scripts.common.arguments import parse_arguments, training_options
from tnn_scripts.common.declared import changed
from tnn_scripts.options.synthetic import SyntheticArguments


@report_errors
def main():
    args, options = parse_arguments([SyntheticArguments, training_options()], __doc__)
    with importing("training"):
        from tnn_scripts.runs.run_synthetic import start
    start(args, changed(options))


if __name__ == "__main__":
    main()
