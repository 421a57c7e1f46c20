"""The official metrics of GLUE, from `evaluate` if it can load them, or else from scikit-learn and scipy."""

from collections.abc import Callable

import evaluate
import numpy as np
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef, mean_squared_error

# The main metric of a task; the papers give F1 for MRPC.
MAIN_METRIC = {"cola": "matthews_correlation", "mrpc": "f1", "stsb": "spearmanr"}
Metric = Callable[[np.ndarray, np.ndarray], dict[str, float]]


def _accuracy(predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
    return {"accuracy": float(accuracy_score(references, predictions))}


def _accuracy_and_f1(predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
    return _accuracy(predictions, references) | {"f1": float(f1_score(references, predictions))}


def _matthews(predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
    return {"matthews_correlation": float(matthews_corrcoef(references, predictions))}


def _correlations(predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
    pearson, spearman = pearsonr(predictions, references), spearmanr(predictions, references)
    return {"pearson": float(pearson.statistic), "spearmanr": float(spearman.statistic)}


def _squared_error(predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
    return {"mse": float(mean_squared_error(references, predictions))}


OWN_METRICS = {"cola": _matthews, "mrpc": _accuracy_and_f1, "qqp": _accuracy_and_f1, "stsb": _correlations}


def load_metric(task: str | None, regression: bool = False) -> Metric:
    """The metric of a task, a function of predictions and references `(N,)`; for files, accuracy or squared error."""
    if task is None:
        return _squared_error if regression else _accuracy
    own = OWN_METRICS.get(task, _accuracy)
    try:
        official = evaluate.load("glue", task)
    except (OSError, ImportError):
        return own
    return lambda predictions, references: official.compute(predictions=predictions, references=references)


def main_metric(task: str | None, regression: bool = False) -> str:
    """The name of the main metric of a task."""
    return MAIN_METRIC.get(task, "mse" if regression else "accuracy")
