"""Make the text files that the commands of the experiment log and of the results name.

The novels are not on the Hub in this form. `--books` is a folder that `datasets` loads, with the splits train,
validation and test and the columns text, title, author and part: rows of about 100,000 characters, in their order.

Example:
    python docs/research/texts.py --books classic_books --output_dir texts
    python docs/research/texts.py --books classic_books --wikitext folder --imdb folder --output_dir texts
"""

import argparse
import re
from itertools import groupby
from pathlib import Path

import numpy as np
from datasets import Dataset, DatasetDict, load_dataset

TITLE = re.compile(r"^ = [^=].*[^=] = \n$")
# A novel each whose passages are for the test.
HELD_OUT = {
    "Oliver Twist",
    "Emma",
    "White Fang",
    "The Warden",
    "The Secret Agent",
    "The Spy",
    "The Prince and the Pauper",
    "The House of the Seven Gables",
}
PASSAGE = 64  # words


def articles(lines: list[str]) -> list[str]:
    """The articles of WikiText, whose rows are lines."""
    found: list[list[str]] = [[]]
    for line in lines:
        if TITLE.match(line):
            found.append([])
        found[-1].append(line)
    return [text for text in map("".join, found) if text.strip()]


def whole(books: Dataset) -> dict[str, str]:
    """Title and text of each novel, its rows joined."""
    rows = zip(books["title"], books["text"], strict=True)
    return {title: "\n\n".join(text for _, text in parts) for title, parts in groupby(rows, key=lambda row: row[0])}


def small_causal(books: DatasetDict, wikitext: DatasetDict) -> dict[str, Dataset]:
    """Novels and articles; the validation text has a short form, and the test text four rows a novel."""
    held_out = articles(wikitext["validation"]["text"])
    validation, test = books["validation"], books["test"]
    beginnings = [
        text[:50_000] for text, part in zip(validation["text"], validation["part"], strict=True) if part == 0
    ]
    first = [text for text, part in zip(test["text"], test["part"], strict=True) if part < 4]
    texts = {
        "train": list(books["train"]["text"]) + articles(wikitext["train"]["text"]),
        "validation": list(validation["text"]) + held_out,
        "validation-small": beginnings + held_out[:6],
        "test": first,
    }
    return {name: Dataset.from_dict({"text": rows}) for name, rows in texts.items()}


def small_masked(books: DatasetDict, wikitext: DatasetDict, imdb: DatasetDict) -> dict[str, Dataset]:
    """Articles, reviews without line breaks, and every second row of the novels."""
    reviews = [" ".join(text.replace("<br />", " ").split()) for text in imdb["train"]["text"]]
    texts = {
        "train": articles(wikitext["train"]["text"]) + reviews + books["train"]["text"][::2],
        "validation": articles(wikitext["validation"]["text"])[:20],
    }
    return {name: Dataset.from_dict({"text": rows}) for name, rows in texts.items()}


def kinds(books: DatasetDict, wikitext: DatasetDict, imdb: DatasetDict) -> dict[str, Dataset]:
    texts = {
        "reviews": "\n".join(imdb["test"]["text"][:1500]),
        "articles": "".join(wikitext["validation"]["text"]),
        "Middlemarch": whole(books["test"])["Middlemarch"],
    }
    return {"train": Dataset.from_dict({"title": list(texts), "text": list(texts.values())})}


def novels(books: DatasetDict) -> dict[str, Dataset]:
    texts = whole(books["train"])
    titles = ["Hard Times", "Love and Friendship and Other Early Works"]
    return {"train": Dataset.from_dict({"title": titles, "text": [texts[title] for title in titles]})}


def passages(texts: list[str], count: int, random: np.random.Generator) -> list[str]:
    """`count` passages of `PASSAGE` words from random places."""
    words = " ".join(texts).split()
    starts = random.integers(len(words) - PASSAGE, size=count)
    return [" ".join(words[start : start + PASSAGE]) for start in starts]


def authors(books: DatasetDict) -> dict[str, Dataset]:
    """1,500 passages of each of eight novelists for training, and 125 from another novel of theirs for the test."""
    train = books["train"]
    rows = list(zip(train["author"], train["title"], train["text"], strict=True))
    names = sorted({author for author, title, _ in rows if title in HELD_OUT})
    random = np.random.default_rng(0)
    splits = {}
    for split, count, held_out in (("train", 1500, False), ("test", 125, True)):
        texts, labels = [], []
        for label, name in enumerate(names):
            own = [text for author, title, text in rows if author == name and (title in HELD_OUT) == held_out]
            texts += passages(own, count, random)
            labels += [label] * count
        splits[split] = Dataset.from_dict({"text": texts, "label": labels})
    return splits


def film_reviews(imdb: DatasetDict) -> dict[str, Dataset]:
    """12,000 film reviews with their class for training, and 1,000 for the test."""
    counts = {"train": 12_000, "test": 1_000}
    chosen = {split: imdb[split].shuffle(seed=0).select(range(count)) for split, count in counts.items()}
    return {split: rows.select_columns(["text", "label"]) for split, rows in chosen.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--books", required=True, help="Folder of the novels.")
    parser.add_argument("--wikitext", default="Salesforce/wikitext", help="Hub id or folder of WikiText.")
    parser.add_argument("--imdb", help="Folder with a configuration `imdb`; stanfordnlp/imdb unless given.")
    parser.add_argument("--output_dir", default="texts", help="A folder in it for each set of texts.")
    args = parser.parse_args()
    books, wikitext = load_dataset(args.books), load_dataset(args.wikitext, "wikitext-2-v1")
    imdb = load_dataset(args.imdb, "imdb") if args.imdb else load_dataset("stanfordnlp/imdb")
    sets = {
        "small-causal": small_causal(books, wikitext),
        "small-masked": small_masked(books, wikitext, imdb),
        "kinds": kinds(books, wikitext, imdb),
        "novels": novels(books),
    }
    for name, splits in sets.items():
        (folder := Path(args.output_dir, name)).mkdir(parents=True, exist_ok=True)
        for split, rows in splits.items():
            rows.to_parquet(folder / f"{split}.parquet")
            print(f"{folder / split}.parquet: {len(rows)} rows, {sum(map(len, rows['text'])):,} characters")
    for name, splits in {"authors": authors(books), "reviews": film_reviews(imdb)}.items():
        for split, rows in splits.items():
            rows.to_csv(file := Path(args.output_dir, f"{name}-{split}.csv"))
            print(f"{file}: {len(rows)} texts")


if __name__ == "__main__":
    main()
