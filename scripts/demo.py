"""Train a small TNN language model on real text, save it, load it back and let it continue a prompt.

Example:
    python scripts/demo.py --max_steps 300 --prompt "In the beginning"
    python scripts/demo.py --dataset_name my_book.txt --tno_type rtf
    python scripts/demo.py --serve
"""

from tnn_scripts.common.errors import importing, report_errors

from tnn_scripts.common.arguments import parse_arguments
from tnn_scripts.options.demo import DemoArguments


@report_errors
def main():
    (args,) = parse_arguments([DemoArguments], __doc__)
    with importing("demo"):
        from tnn_scripts.runs.demo import start
    start(args)


if __name__ == "__main__":
    main()
