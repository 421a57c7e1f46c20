"""Publish the models of this project with their finished cards, those of `model_cards/`.

Every model is loaded before the first one is published. One whose metrics.json has other figures than its card is
refused: it was trained again, and needs a new card, by `tnn push --dry_run --card_dir`.

Example:
    python docs/research/publish_cards.py outputs --dry_run
    python docs/research/publish_cards.py outputs
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from tnn_programs.cli.errors import report_errors

from tnn_programs.cli.atomic import read_json, write_json
from tnn_programs.cli.parser import ProgramParser
from tnn_programs.training import card_inputs
from tnn_programs.training.model_card import write_card
from tnn_programs.training.publishing import publish, publishing_errors, save

CARDS = Path(__file__).parents[2] / "model_cards"


def stage(card: Path, folder: Path, target: Path) -> str:
    """Write the model in `folder` with its finished card to `target`; the name of its repository."""
    model = card_inputs.load(folder)
    figures = read_json(card / card_inputs.INPUTS["metrics"])
    found = card_inputs.read_metrics(read_json(card_inputs.metrics_file(folder)))
    if found != figures:
        different = sorted(name for name in found | figures if found.get(name) != figures.get(name))
        raise ValueError(f"The model in {folder} is not that of {card}: their {', '.join(different)} differ")
    shutil.copytree(card, target)
    settings = read_json(card / card_inputs.INPUTS["card"])
    write_json(target / card_inputs.INPUTS["card"], settings | {"published": True})
    write_card(target)
    save(model, folder, target, max_shard_size="5GB")
    return settings["repo_id"]


def run(args: argparse.Namespace):
    """Stage all models, then publish them."""
    cards = sorted(path.parent for path in args.cards.glob(f"*/{card_inputs.INPUTS['card']}"))
    if missing := [card.name for card in cards if not (args.folder / card.name).is_dir()]:
        raise ValueError(f"{args.folder} must have a model for each card, got none for {', '.join(missing)}")
    with tempfile.TemporaryDirectory() as folder:
        names = {card: stage(card, args.folder / card.name, Path(folder) / card.name) for card in cards}
        for card, name in names.items():
            if args.dry_run:
                sys.stdout.write(f"would publish the model {name}\n")
                continue
            with publishing_errors(args.folder, "python docs/research/publish_cards.py", f"{name} was not published"):
                sys.stdout.write(f"published at {publish(Path(folder) / card.name, name, args.private)}\n")


@report_errors
def main():
    parser = ProgramParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="Folder of the models, by the names of their cards.")
    parser.add_argument("--cards", type=Path, default=CARDS, help="Folder of the cards.")
    parser.add_argument("--private", action="store_true", help="Make new repositories private.")
    parser.add_argument("--dry_run", action="store_true", help="Load all models, and publish none.")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
