"""Write the card of a model from the measurements of the programs. No number in a card is typed by hand.

The figures of the training, training_args.json and metrics.json, are read from the folder of the model; --evaluation,
--glue, --decoding, --conversion and --kernels name the results of other programs. What was not measured is left out.
--output_dir gets the card, README.md, with the figures that are in it. The same figures give the same card.

Example:
    python scripts/model_card.py outputs/demo --repo_id user/tnn-demo --output_dir model_cards/tnn-demo
"""

import sys
from pathlib import Path

from tnn_programs.cli.errors import importing, report_errors

from tnn_programs.cli.card_options import add_arguments
from tnn_programs.cli.model_path import check_model_path
from tnn_programs.cli.parser import ProgramParser


@report_errors
def main():
    parser = ProgramParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--output_dir", type=Path, required=True)
    args = parser.parse_args()
    check_model_path(args.folder, "folder")
    with importing("scripts"):
        from tnn_programs.training.card_inputs import check_folder, collect, load
        from tnn_programs.training.model_card import write_card
    check_folder(args.output_dir, args.folder)
    collect(args, load(args.folder), args.output_dir)
    write_card(args.output_dir)
    sys.stdout.write(f"card of {args.repo_id} in {args.output_dir}\n")


if __name__ == "__main__":
    main()
