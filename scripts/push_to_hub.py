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
    python scripts/push_to_hub.py outputs/demo --repo_id user/tnn-demo --space
    python scripts/push_to_hub.py outputs/demo --repo_id user/tnn-demo --dry_run --output_dir outputs/to-push
    python scripts/push_to_hub.py outputs/demo --repo_id user/tnn-demo --dry_run --card_dir model_cards/tnn-demo
    python scripts/push_to_hub.py outputs --cards model_cards
"""

import shlex
import sys

from tnn_programs.cli.errors import importing, report_errors

from tnn_programs.cli.card_options import build_publishing_parser
from tnn_programs.cli.model_path import check_model_path


@report_errors
def main():
    parser = build_publishing_parser(__doc__)
    args = parser.parse_args()
    if args.output_dir is not None and not args.dry_run:
        parser.error(f"--output_dir must be given with --dry_run, got {args.output_dir} alone")
    if (args.repo_id is None) == (args.cards is None):
        parser.error("either --repo_id must be given, or --cards")
    if args.cards is None:
        check_model_path(args.folder, "folder")
    elif args.space:
        parser.error("--space must be given with --repo_id, got it with --cards")
    args.published = not args.dry_run
    with importing("scripts"):
        from tnn_programs.training.publishing import rehearse, run
    if args.dry_run:
        sys.stdout.writelines(f"{line}\n" for line in rehearse(args))
        sys.stdout.write("Nothing was published, and the Hub was not contacted.\n")
        return
    for url in run(args, shlex.join(["tnn", "push", *sys.argv[1:]])):
        sys.stdout.write(f"published at {url}\n")


if __name__ == "__main__":
    main()
