"""Serve a page on which a causal model continues texts and shows the kernels of its layers.

The page needs Gradio: `pip install "modeling-tnn[space]"`. Tokens stream to it, with their number per second, until
the text ends or its user presses Stop. Several users can write at the same time. No text changes another.

Example:
    python scripts/serve.py --model_name_or_path outputs/demo
    python scripts/serve.py --model_name_or_path outputs/demo --host 0.0.0.0 --port 8000 --max_batch_size 4
"""

import logging

from tnn_programs.cli.errors import importing, report_errors

from tnn_programs.cli.parser import ProgramParser
from tnn_programs.cli.serving_arguments import PageArguments


@report_errors
def main():
    args = PageArguments(**vars(ProgramParser([PageArguments], __doc__).parse_args()))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with importing("scripts,space"):
        from tnn_programs.serving.page import serve
    serve(args)


if __name__ == "__main__":
    main()
