"""The presets with the learning rate and schedule that each was trained with, from `configuration/training.yaml`.

The file says what was measured. It is read without transformers, for programs that answer at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

# What a preset takes from its recipe.
SCHEDULE = ("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "max_steps")


@dataclass(frozen=True, kw_only=True)
class PresetTraining:
    """One preset: what it is, and how it was trained.

    Attributes:
        kind: causal, masked, images or classifier.
        learning_rate: None where neither a measurement nor a paper gives one.
        figures: the file of `docs/research/figures/` in which the rate was measured; None for the rate of a paper.
        minutes: of the recipe on one core of a CPU, if it was run.
        max_steps: steps of the recipe, to which `warmup_steps` and `lr_scheduler_kwargs` belong.
    """

    name: str
    kind: str
    parameters: int
    recipe: str | None = None
    figures: str | None = None
    minutes: float | None = None
    learning_rate: float | None = None
    lr_scheduler_type: str = "cosine"
    lr_scheduler_kwargs: Mapping[str, Any] | None = None
    warmup_steps: float = 0.1
    max_steps: int | None = None

    @property
    def source(self) -> str:
        """Where the rate comes from, for a line of a program."""
        if self.figures is not None:
            return f"measured for {self.name}, docs/research/figures/{self.figures}.json"
        return f"of the recipe {self.recipe}, after a paper; not measured here"

    def schedule(self, max_steps: int) -> dict:
        """The options of the schedule for a run of `max_steps`: warm-up and decay have the recipe's shares of it."""
        scale = max_steps / (self.max_steps or max_steps)
        warmup = self.warmup_steps if self.warmup_steps < 1 else max(round(self.warmup_steps * scale), 1)
        further = {
            name: round(value * scale) if name.endswith("_steps") else value
            for name, value in (self.lr_scheduler_kwargs or {}).items()
        }
        return {"lr_scheduler_type": self.lr_scheduler_type, "lr_scheduler_kwargs": further, "warmup_steps": warmup}


def read_presets() -> dict[str, PresetTraining]:
    """All presets by name: `tnn-tiny`, `lra/tnn-text`, ..., small ones first."""
    return {name: _preset(name, entry) for name, entry in _read("training.yaml")["presets"].items()}


def find_training(config_name: str) -> PresetTraining | None:
    """The preset that `config_name` names or whose folder it is; None for any other configuration."""
    folder = Path(config_name)
    for name, entry in _read("training.yaml")["presets"].items():
        if config_name in (name, Path(name).name) or folder.resolve() == (configuration() / name).resolve():
            return _preset(name, entry)
    return None


def rule_of(hidden_size: int, is_tnn: bool) -> PresetTraining:
    """What the rule gives a model without a rate of its own: the rate falls with the width."""
    rule = _read("training.yaml")["rule"]
    rate = rule["learning_rate"] * rule["hidden_size"] / hidden_size * (1 if is_tnn else rule["other_models"])
    schedule = {name: rule[name] for name in ("lr_scheduler_type", "warmup_steps")}
    return PresetTraining(name="", kind="", parameters=0, learning_rate=float(f"{rate:.2g}"), **schedule)


def fine_tuning_of(hidden_size: int) -> tuple[float, str] | None:
    """The learning rate at which a TNN of such a width is fine-tuned, and where it comes from; None for a wide one."""
    known = _read("training.yaml")["fine_tuning"]
    if hidden_size > known["hidden_size"]:
        return None
    source = f"measured for TNNs up to {known['hidden_size']} wide, docs/research/figures/{known['figures']}.json"
    return known["learning_rate"], source


def configuration() -> Path:
    """The folder `configuration/`, found without importing the package that may contain it."""
    package = Path(find_spec("modeling_tnn").origin).parent
    installed = package / "configuration"
    return installed if installed.is_dir() else package.parent / "configuration"


def _preset(name: str, entry: dict) -> PresetTraining:
    recipe = _read(f"recipes/{entry['recipe']}.yaml") if "recipe" in entry else {}
    return PresetTraining(name=name, **{key: recipe[key] for key in SCHEDULE if key in recipe} | entry)


def _read(file: str) -> dict:
    return yaml.safe_load((configuration() / file).read_text(encoding="utf-8"))
