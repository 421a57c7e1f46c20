"""Train small models on signals and time series: do they classify and forecast as well as what is usual for them?

Classification: bidirectional models with the same settings for all data sets, which aeon ships with their splits; the
inputs are standardised by the training set. MultiRocket of aeon is beside them, with its defaults. The accuracy is in
per cent.

Forecasts: causal models, trained on windows of the years before the test. The mean absolute error is over all windows
of the test that begin `step` values after each other. Beside them is the seasonal naive forecast, which repeats the
last season. Weekly CO2 has missing values: neither the models nor the errors have them.

The figures are in `figures/signals-classification.json` and `figures/signals-forecast.json`, and the forecast that
`draw.py` draws is in `figures/signals/airline.json`.

Example:
    pip install aeon statsmodels
    python docs/research/signals.py
"""

import argparse
import json
import statistics
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from theory import FIGURES, rounded, write

from modeling_tnn import TnnConfig, TnnForSequenceClassification, TnnForTimeSeriesPrediction

SEEDS = (0, 1, 2)
# Names of aeon, and of the form with equal lengths that MultiRocket needs.
DATA_SETS = {"BasicMotions": None, "ItalyPowerDemand": None, "JapaneseVowels": "JapaneseVowels_eq"}
MODEL = {"hidden_size": 64, "num_hidden_layers": 2, "gtu_expansion": 1, "norm_type": "layernorm", "s4d_state_size": 16}


@dataclass(frozen=True)
class Series:
    """A time series and how it is predicted.

    Attributes:
        file: of the package that ships it, "package/path".
        column: that of the values.
        past, future: numbers of values that a model reads and predicts.
        season: number of values after which the naive forecast repeats.
        test: number of last values that no model is trained on.
        step: number of values between the starts of the windows of the test.
    """

    file: str
    column: str
    past: int
    future: int
    season: int
    test: int
    step: int

    def values(self) -> torch.Tensor:
        """`(n, 1)`, NaN where a value is missing."""
        package, path = self.file.split("/", 1)
        folder = Path(find_spec(package).submodule_search_locations[0])
        return torch.tensor(pd.read_csv(folder / path)[self.column].to_numpy(np.float32))[:, None]


SERIES = {
    "airline passengers, monthly": Series("aeon/datasets/data/Airline/Airline.csv", "Passengers", 36, 12, 12, 36, 1),
    "sunspots, yearly": Series("statsmodels/datasets/sunspots/sunspots.csv", "SUNACTIVITY", 44, 11, 11, 55, 1),
    "CO2, weekly": Series("statsmodels/datasets/co2/co2.csv", "co2", 104, 52, 52, 520, 13),
}


def train(model, batches, learning_rate: float):
    """One step of AdamW for each batch, with a rate that rises for a tenth of them and falls to 0."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=len(batches), pct_start=0.1)
    model.train()
    for batch in batches:
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.eval()


def random_rows(count: int, steps: int, size: int) -> list[torch.Tensor]:
    """The rows of each batch: all rows in a random order, again and again."""
    orders = torch.cat([torch.randperm(count) for _ in range(steps * size // count + 1)])
    return list(orders[: steps * size].split(size))


def read_classes(name: str, split: str) -> tuple[list[torch.Tensor], list[str]]:
    """The signals `(L, C)` and their classes."""
    from aeon.datasets import load_classification  # takes 15 seconds to import

    signals, classes = load_classification(name, split=split)
    return [torch.tensor(np.asarray(one, dtype=np.float32)).t() for one in signals], list(classes)


def padded(signals: list[torch.Tensor], mean: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    """The standardised signals as one batch."""
    pad = torch.nn.utils.rnn.pad_sequence
    mask = pad([torch.ones(len(one), dtype=torch.long) for one in signals], batch_first=True)
    return {
        "input_values": pad([(one - mean) / scale for one in signals], batch_first=True),
        "attention_mask": mask,
    }


def classify(name: str, seed: int, steps: int) -> float:
    """The accuracy of a model on the test set."""
    torch.manual_seed(seed)
    (signals, classes), (others, truth) = read_classes(name, "train"), read_classes(name, "test")
    names, together = sorted(set(classes)), torch.cat(signals)
    mean, scale = together.mean(0), together.std(0)
    channels, longest = together.shape[1], max(map(len, signals))
    fields = {"tno_type": "s4d", "causal": False, "input_channels": channels, "num_labels": len(names)}
    model = TnnForSequenceClassification(TnnConfig(max_position_embeddings=longest, **fields, **MODEL))
    inputs, labels = padded(signals, mean, scale), torch.tensor([names.index(one) for one in classes])
    rows = random_rows(len(labels), steps, 16)
    train(model, [{k: v[r] for k, v in inputs.items()} | {"labels": labels[r]} for r in rows], 4e-3)
    with torch.no_grad():
        found = torch.cat([model(**padded(others[i : i + 64], mean, scale)).logits for i in range(0, len(others), 64)])
    return 100 * statistics.mean(names[i] == one for i, one in zip(found.argmax(1).tolist(), truth, strict=True))


def rocket(name: str, seed: int) -> float:
    """The accuracy of MultiRocket."""
    from aeon.classification.convolution_based import MultiRocketClassifier

    (signals, classes), (others, truth) = read_classes(name, "train"), read_classes(name, "test")
    arrays = [np.stack([one.t().numpy() for one in each]) for each in (signals, others)]
    return 100 * MultiRocketClassifier(random_state=seed).fit(arrays[0], np.array(classes)).score(
        arrays[1], np.array(truth)
    )


def classification(steps: int) -> list[dict]:
    rows = []
    for name, equal in DATA_SETS.items():
        signals, classes = read_classes(name, "train")
        row = {"data": name, "train": len(signals), "test": len(read_classes(name, "test")[0])}
        row |= {"length": max(map(len, signals)), "channels": signals[0].shape[1], "classes": len(set(classes))}
        row["tnn"] = [rounded(classify(name, seed, steps)) for seed in SEEDS]
        rows.append(row | {"rocket": [rounded(rocket(equal or name, seed)) for seed in SEEDS]})
    return rows


def forecaster(series: Series, seed: int, steps: int) -> TnnForTimeSeriesPrediction:
    """A model trained on windows of the values before the test."""
    torch.manual_seed(seed)
    values, window = series.values()[: -series.test], series.past + series.future
    fields = {"tno_type": "s4d", "input_channels": 1, "prediction_length": series.future}
    model = TnnForTimeSeriesPrediction(TnnConfig(max_position_embeddings=series.past, **fields, **MODEL))
    windows = values[:, 0].unfold(0, window, 1)[..., None]  # (n, past + future, 1)
    batches = [
        windows[rows].split([series.past, series.future], dim=1) for rows in random_rows(len(windows), steps, 32)
    ]
    train(model, [{"past_values": past, "future_values": future} for past, future in batches], 2e-3)
    return model


def naive(past: torch.Tensor, length: int, season: int) -> torch.Tensor:
    """The last season of `(B, L, 1)` again and again, `(B, length, 1)`."""
    return past[:, -season:].repeat(1, -(-length // season), 1)[:, :length]


def absolute_error(predictions: torch.Tensor, truth: torch.Tensor) -> float:
    return (predictions - truth).abs().nanmean().item()


def forecasts(steps: int) -> list[dict]:
    rows = []
    for name, series in SERIES.items():
        values, window = series.values(), series.past + series.future
        tested = values[-series.test - series.past :, 0].unfold(0, window, series.step)[..., None]
        past, future = tested.split([series.past, series.future], dim=1)
        row = {"data": name, "train": len(values) - series.test, "past": series.past, "future": series.future}
        repeated = naive(past, series.future, series.season)
        both = future.where(repeated.isfinite(), torch.nan)  # the errors of both are over the same values
        models = [forecaster(series, seed, steps) for seed in SEEDS]
        row["tnn"] = [rounded(absolute_error(model.generate(past).sequences[:, 0], both)) for model in models]
        rows.append(row | {"naive": absolute_error(repeated, both), "windows": len(past)})
        if name.startswith("airline"):
            draw_rollout(series, models[0])
    return rows


def draw_rollout(series: Series, model: TnnForTimeSeriesPrediction):
    """Write a forecast of the whole test, from the values before it alone, for the picture."""
    values = series.values()
    past, future = values[: -series.test][None, -series.past :], values[-series.test :]
    found = {"model": model.generate(past, prediction_length=series.test).sequences[0, 0]}
    found |= {
        "naive": naive(past, series.test, series.season)[0],
        "values": values,
        "first": len(values) - series.test,
    }
    errors = {f"error_{name}": absolute_error(found[name], future) for name in ("model", "naive")}
    written = {key: one.flatten().tolist() if isinstance(one, torch.Tensor) else one for key, one in found.items()}
    (FIGURES / "signals").mkdir(exist_ok=True)
    (FIGURES / "signals/airline.json").write_text(json.dumps(written | errors) + "\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="Steps of each training.")
    steps = parser.parse_args().steps
    for name, measure in {"signals-forecast": forecasts, "signals-classification": classification}.items():
        write(name, measure(steps))


if __name__ == "__main__":
    main()
