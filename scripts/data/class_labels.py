"""The classes of data and the outputs of a classifier, matched by name, as run_glue.py of transformers does."""

import logging

from transformers import PreTrainedConfig

logger = logging.getLogger("finetune_glue")


def outputs_of_classes(config: PreTrainedConfig, names: list[str], source: str, some: bool) -> list[int] | None:
    """The output of a trained classifier for each class of the data, `(C,)`.

    Names match without regard to case if they do not match with it. Whole numbers are outputs, unless those have
    numbers as names. A classifier with transformers' names, LABEL_0 and so on, has the classes in their order.

    Args:
        names: those of the classes of the data.
        source: the model, for messages.
        some: whether the model may have further classes.

    Returns:
        None where the classes have to get outputs anew: the model is no classifier, or its outputs have no names.

    Raises:
        ValueError: it is a classifier of other classes.
    """
    own = names_of_outputs(config, source)
    fits = len(names) == len(own) or (some and len(names) < len(own))
    for key in (str, str.casefold):
        outputs = {key(name): output for output, name in enumerate(own)}
        keys = list(map(key, names))
        if fits and len(outputs) == len(own) and len(set(keys)) == len(keys) and outputs.keys() >= set(keys):
            return [outputs[name] for name in keys]
    if not is_classifier(config):
        return None
    numbers = [int(name) for name in names if name.isdecimal()]
    if len(numbers) == len(names) and max(numbers) < len(own) and not any(name.isdecimal() for name in own):
        shown = ", ".join(f"{number} is {own[number]}" for number in numbers)
        logger.info("the labels are numbers of the model's classes: %s", shown)
        return numbers
    if own == default_names(len(own)):
        return None  # transformers refuses weights of another number of outputs, which not every config.json says
    raise ValueError(
        f"The labels must be classes of {source}, {', '.join(own)}, got {', '.join(names)}. Rename the labels, give "
        "another model, or draw a new head with --ignore_mismatched_sizes."
    )


def is_classifier(config: PreTrainedConfig) -> bool:
    """Whether a model was saved with a head that classifies sequences; one of unknown architecture may have it."""
    return config.architectures is None or any("SequenceClassification" in name for name in config.architectures)


def names_of_outputs(config: PreTrainedConfig, source: str) -> list[str]:
    """The names of a classifier's outputs, from `id2label` or, where that has none, from `label2id`.

    Raises:
        ValueError: they contradict each other.
    """
    names = [str(config.id2label[output]) for output in sorted(config.id2label)]
    found = {int(output): str(name) for name, output in (config.label2id or {}).items()}
    others = [found.get(output) for output in range(len(names))]
    unnamed = default_names(len(names))
    if None in others or others in (names, unnamed):
        return names
    if names != unnamed:
        raise ValueError(f"id2label and label2id of {source} must agree, got {names} and {others}")
    return others


def default_names(count: int) -> list[str]:
    """What transformers calls outputs without names."""
    return [f"LABEL_{output}" for output in range(count)]
