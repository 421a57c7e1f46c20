"""Texts that the experiment log names: `docs/research/texts.py` makes them of novels, articles and reviews."""

import runpy

from datasets import Dataset, DatasetDict

from helpers.scripts import ROOT

TEXTS = runpy.run_path(str(ROOT / "docs" / "research" / "texts.py"))
LINES = ["\n", " = A title = \n", " Words of it . \n", " = = A section = = \n", " More . \n", " = Another = \n",
         " End . \n"]  # fmt: skip


def splits_of(names: tuple[str, ...], **columns) -> DatasetDict:
    return DatasetDict({split: Dataset.from_dict(columns) for split in names})


def books() -> DatasetDict:
    def rows(titles: list[str], parts: int) -> Dataset:
        places = [(title, part) for title in titles for part in range(parts)]
        columns = {
            "text": [f"{title} {part} " * 100 for title, part in places],
            "author": ["Jane Austen"] * len(places),
        }
        titles, parts = ([place[i] for place in places] for i in (0, 1))
        return Dataset.from_dict(columns | {"title": titles, "part": parts})

    train = rows(["Emma", "Hard Times", "Love and Friendship and Other Early Works"], 3)
    return DatasetDict(train=train, validation=rows(["Persuasion"], 2), test=rows(["Middlemarch", "Dracula"], 5))


BOOKS, ARTICLES = books(), splits_of(("train", "validation", "test"), text=LINES)
REVIEWS = splits_of(("train", "test"), text=["Good.<br /><br />Very  good."])


def test_texts_of_models():
    """Of causal and of masked ones; articles begin with their title."""
    assert TEXTS["articles"](LINES) == ["".join(LINES[1:5]), "".join(LINES[5:])]
    splits = TEXTS["small_causal"](BOOKS, ARTICLES)
    counts = {"train": 9 + 2, "validation": 2 + 2, "validation-small": 1 + 2, "test": 2 * 4}
    assert {name: len(rows) for name, rows in splits.items()} == counts
    assert splits["test"]["text"][4].startswith("Dracula 0")
    train = list(TEXTS["small_masked"](BOOKS, ARTICLES, REVIEWS)["train"]["text"])
    assert train[2] == "Good. Very good." and len(train) == 2 + 1 + 5
    assert [text[:6] for text in train[3:5]] == ["Emma 0", "Emma 2"]


def test_texts_of_kinds_and_authors():
    """Passages of the test are from another novel."""
    pairs = TEXTS["kinds"](BOOKS, ARTICLES, REVIEWS)["train"]
    assert pairs["title"] == ["reviews", "articles", "Middlemarch"] and pairs["text"][2].count("\n\n") == 4
    assert TEXTS["novels"](BOOKS)["train"]["text"][1].startswith("Love and Friendship")
    splits = TEXTS["authors"](BOOKS)
    assert [len(splits[name]) for name in ("train", "test")] == [1500, 125]
    assert all("Emma" in text and len(text.split()) == 64 for text in splits["test"]["text"])
    assert not any("Emma" in text for text in splits["train"]["text"])


def test_reviews_keep_their_class():
    """A fixed choice, without columns that another copy of the data may have."""
    labels = [i % 2 for i in range(13_000)]
    imdb = splits_of(("train", "test"), text=[f"Film {i}." for i in range(13_000)], label=labels, idx=labels)
    splits = TEXTS["film_reviews"](imdb)
    assert [len(splits[name]) for name in ("train", "test")] == [12_000, 1_000]
    assert all(int(row["text"][5:-1]) % 2 == row["label"] and len(row) == 2 for row in splits["test"])
    assert sum(splits["test"]["label"]) != 500
