"""Publish a model on the Hub: weights, tokenizer, configuration, code and a card with the measurements.

The model is loaded and saved again. So the published model is complete, is in safetensors with shards of limited size,
and carries the code of this package. The upload is a single commit, so an interrupted push publishes nothing.

No number in the card is typed by hand. The figures of the training, training_args.json and metrics.json, are read from
the folder of the model; --evaluation, --glue, --decoding, --conversion and --kernels name results of other programs.
What was not measured is left out. The card of a --dry_run says that the model is not on the Hub yet.

Example:
    python scripts/push_to_hub.py outputs/demo --repo_id user/tnn-demo --private
    python scripts/push_to_hub.py outputs/wikitext --repo_id user/tnn-wikitext --evaluation outputs/lengths.json \\
        --kernels outputs/kernels --card_dir model_cards/tnn-wikitext
    python scripts/push_to_hub.py outputs/demo --repo_id user/tnn-demo --dry_run --output_dir outputs/to-push
    python scripts/push_to_hub.py outputs/demo --repo_id user/tnn-demo --dry_run --card_dir model_cards/tnn-demo
"""

import argparse
import shlex
import sys
from pathlib import Path

from tnn_programs.cli.errors import importing, report_errors

from tnn_programs.cli.model_path import check_model_path
from tnn_programs.cli.parser import ProgramParser


def build_parser() -> argparse.ArgumentParser:
    parser = ProgramParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="Saved model, with the metrics.json of its training.")
    parser.add_argument("--repo_id", required=True, help="Name of the repository: USER/NAME.")
    parser.add_argument("--description", default="", help="One or two sentences for the top of the card.")
    parser.add_argument("--data", default="", help="Training data; from training_args.json unless given.")
    parser.add_argument("--dataset_id", default="", help="Hub id of the data; from training_args.json unless given.")
    parser.add_argument("--license", help="Licence of the weights, by its name on the Hub, such as apache-2.0.")
    parser.add_argument("--language", help="Language of the texts, such as en; that of known data unless given.")
    parser.add_argument("--evaluation", type=Path, help="JSON file of evaluate_lm.py: perplexity by length.")
    parser.add_argument("--glue", type=Path, help="results.json of finetune_glue.py with --sweep.")
    parser.add_argument("--decoding", type=Path, help="JSON file of generate.py: speed.")
    parser.add_argument("--conversion", type=Path, help="JSON file of to_recurrent.py; from the folder unless given.")
    parser.add_argument("--kernels", type=Path, help="Output folder of plot_kernels.py.")
    parser.set_defaults(published=True)
    parser.add_argument("--private", action="store_true", help="Make a new repository private.")
    parser.add_argument("--max_shard_size", default="5GB", help="Largest size of a file of weights.")
    parser.add_argument("--card_dir", type=Path, help="Folder for a copy of the card and its inputs.")
    parser.add_argument("--dry_run", action="store_true", help="Show the files without contacting the Hub, and end.")
    parser.add_argument("--output_dir", type=Path, help="With --dry_run: a new folder for the files.")
    return parser


@report_errors
def main():
    parser = build_parser()
    args = parser.parse_args()
    if args.output_dir is not None and not args.dry_run:
        parser.error(f"--output_dir must be given with --dry_run, got {args.output_dir} alone")
    check_model_path(args.folder, "folder")
    args.published = not args.dry_run
    with importing("scripts"):
        from tnn_programs.training.publishing import rehearse, run
    if args.dry_run:
        sys.stdout.writelines(f"{line}\n" for line in rehearse(args))
        sys.stdout.write("Nothing was published, and the Hub was not contacted.\n")
        return
    sys.stdout.write(f"published at {run(args, shlex.join(['tnn', 'push', *sys.argv[1:]]))}\n")


if __name__ == "__main__":
    main()
