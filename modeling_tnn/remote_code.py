"""What a saved folder carries of this package, so that it loads where the package is not installed.

    the code   the file of the models and every file that it imports, flat, beside `config.json`
    the map    `auto_map` in `config.json`: which class is meant by which Auto class

transformers adds the class that is saved to the map; all of them are here, since a checkpoint of one head is also
loaded with another one or without any. Where the package is installed, its registered classes go before the copies.
"""

import os

from transformers.dynamic_module_utils import custom_object_save

AUTO_MAP = {
    "AutoConfig": "configuration_tnn.TnnConfig",
    "AutoModel": "modeling_tnn.TnnModel",
    "AutoModelForCausalLM": "modeling_tnn.TnnForCausalLM",
    "AutoModelForImageClassification": "modeling_image.TnnForImageClassification",
    "AutoModelForMaskedLM": "modeling_tnn.TnnForMaskedLM",
    "AutoModelForSequenceClassification": "modeling_tnn.TnnForSequenceClassification",
}


def save_code(folder: str | os.PathLike):
    """Copy the code of the models to `folder`."""
    # In here, since the models import the configuration, which imports this file.
    from .modeling_image import TnnForImageClassification
    from .modeling_pairs import TnnForSequencePairClassification

    for head in (TnnForImageClassification, TnnForSequencePairClassification):  # with what they import: all files
        custom_object_save(head, folder)
