"""The options of `push_to_hub.py`, with which trainings publish as well."""

import argparse
from pathlib import Path

from tnn_programs.cli.parser import ProgramParser


def build_publishing_parser(description: str = "") -> argparse.ArgumentParser:
    """The parser of these options."""
    parser = ProgramParser(description=description)
    parser.add_argument("folder", type=Path, help="Saved model, with the metrics.json of its training.")
    parser.add_argument("--repo_id", help="Name of the repository: USER/NAME.")
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
    parser.add_argument("--cards", type=Path, help="A folder of finished cards, each published with FOLDER/NAME.")
    parser.add_argument("--private", action="store_true", help="Make a new repository private.")
    parser.add_argument("--max_shard_size", default="5GB", help="Largest size of a file of weights.")
    parser.add_argument("--card_dir", type=Path, help="Folder for a copy of the card and its inputs.")
    parser.add_argument("--dry_run", action="store_true", help="Show the files without contacting the Hub, and end.")
    parser.add_argument("--output_dir", type=Path, help="With --dry_run: a new folder for the files.")
    parser.add_argument("--space", action="store_true", help="Publish a Space with a page of the model, too.")
    parser.add_argument("--package", help="What pip installs in the Space; this release of modeling-tnn unless given.")
    return parser
