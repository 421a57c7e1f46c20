"""The options of `run_image_classification.py`."""

from dataclasses import dataclass, field

from tnn_scripts.common.declared import declared_keys
from tnn_scripts.common.names import find_config
from tnn_scripts.common.parser import check_counts
from tnn_scripts.common.training_arguments import GroupArguments

AUGMENTATIONS = declared_keys("tnn_scripts.data.augmentation", "AUGMENTATIONS")


@dataclass(kw_only=True)
class ImageArguments(GroupArguments):
    """The options for the model and the pictures."""

    config_name: str
    config_overrides: str | None = None
    dataset_name: str = "uoft-cs/cifar10"
    dataset_config_name: str | None = None
    label_column_name: str | None = field(default=None, metadata={"help": "Column of the classes, if not the first."})
    max_train_samples: int | None = None
    max_eval_samples: int | None = None
    augmentation: str = field(
        default="flip",
        metadata={
            "choices": tuple(AUGMENTATIONS),
            "help": "Changes of training pictures: flip mirrors half of them; deit is DeiT's recipe (random parts, "
            "RandAugment, random erasing, mixup, CutMix, repeated pictures), which evaluates the middle of a picture.",
        },
    )
    transformer: bool = False
    overwrite_output_dir: bool = False
    dry_run: bool = False

    def __post_init__(self):
        super().__post_init__()
        find_config(self.config_name)
        check_counts(self, "max_train_samples", "max_eval_samples")
