"""Texts that the experiment log names: `docs/research/texts.py` makes them of novels, articles and reviews."""

import runpy
from pathlib import Path

from datasets import Dataset, DatasetDict

TEXTS = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "research" / "texts.py"))
LINES = [
    "\n",
    " = A title = \n",
    " Words of it . \n",
    " = = A section = = \n",
    " More . \n",
    " = Another = \n",
    " End . \n",
]


def books() -> DatasetDict:
    def rows(titles: list[str], parts: int, author: str = "Jane Austen") -> Dataset:
        places = [(title, part) for title in titles for part in range(parts)]
        return Dataset.from_dict(
            {
                "text": [f"{title} {part} " * 100 for title, part in places],
                "title": [title for title, _ in places],
                "author": [author] * len(places),
                "part": [part for _, part in places],
            }
        )

    train = ["Emma", "Hard Times", "Love and Friendship and Other Early Works"]
    return DatasetDict(
        train=rows(train, 3), validation=rows(["Persuasion"], 2), test=rows(["Middlemarch", "Dracula"], 5)
    )


def lines() -> DatasetDict:
    return DatasetDict({split: Dataset.from_dict({"text": LINES}) for split in ("train", "validation", "test")})


def reviews() -> DatasetDict:
    return DatasetDict({s: Dataset.from_dict({"text": ["Good.<br /><br />Very  good."]}) for s in ("train", "test")})


def test_articles_begin_with_their_title():
    assert TEXTS["articles"](LINES) == ["".join(LINES[1:5]), "".join(LINES[5:])]


def test_texts_of_causal_models():
    splits = TEXTS["small_causal"](books(), lines())
    assert {name: len(rows) for name, rows in splits.items()} == {
        "train": 9 + 2,
        "validation": 2 + 2,
        "validation-small": 1 + 2,
        "test": 2 * 4,
    }
    assert splits["test"]["text"][4].startswith("Dracula 0")


def test_texts_of_masked_models():
    splits = TEXTS["small_masked"](books(), lines(), reviews())
    train = list(splits["train"]["text"])
    assert train[2] == "Good. Very good." and len(train) == 2 + 1 + 5
    assert [text[:6] for text in train[3:5]] == ["Emma 0", "Emma 2"]


def test_texts_of_pairs():
    pairs = TEXTS["kinds"](books(), lines(), reviews())["train"]
    assert pairs["title"] == ["reviews", "articles", "Middlemarch"] and pairs["text"][2].count("\n\n") == 4
    assert TEXTS["novels"](books())["train"]["text"][1].startswith("Love and Friendship")


def test_passages_of_the_test_are_from_another_novel():
    splits = TEXTS["authors"](books())
    assert [len(splits[name]) for name in ("train", "test")] == [1500, 125]
    assert all("Emma" in text and len(text.split()) == 64 for text in splits["test"]["text"])
    assert not any("Emma" in text for text in splits["train"]["text"])


def test_reviews_keep_their_class():
    """A fixed choice, without columns that another copy of the data may have."""
    rows = {"text": [f"Film {i}." for i in range(13_000)], "label": [i % 2 for i in range(13_000)]}
    imdb = DatasetDict({split: Dataset.from_dict(rows | {"idx": rows["label"]}) for split in ("train", "test")})
    splits = TEXTS["film_reviews"](imdb)
    assert [len(splits[name]) for name in ("train", "test")] == [12_000, 1_000]
    assert all(int(row["text"][5:-1]) % 2 == row["label"] and len(row) == 2 for row in splits["test"])
    assert sum(splits["test"]["label"]) != 500
