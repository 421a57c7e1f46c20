"""Training with mixed pictures, whose targets are probabilities, and with each picture several times in a row."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, Sampler

from tnn_scripts.common.grouping_trainer import GroupingTrainer

# Mixup or CutMix of each batch, one as often as the other (DeiT, Touvron et al., 2021, table 9).
MIXUP, CUTMIX = 0.8, 1.0
# A picture comes three times, each time changed otherwise (repeated augmentation, Hoffer et al., 2020).
REPEATS = 3


class RepeatingSampler(Sampler[int]):
    """As many rows as there are, in a random order, each `REPEATS` times: an epoch has a third of them."""

    def __init__(self, rows: int, seed: int):
        self.rows, self.seed, self.epoch = rows, seed, 0

    def __len__(self) -> int:
        return self.rows

    def set_epoch(self, epoch: int):
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.rows, generator=generator)
        yield from order.repeat_interleave(REPEATS)[: self.rows].tolist()


class MixingTrainer(GroupingTrainer):
    """Trainer that mixes the pictures of each training batch by timm's `Mixup`. Evaluation sees them as they are.

    The loss is the cross entropy of the mixed targets, with `label_smoothing_factor` in training alone. transformers'
    models would take targets of this shape for several labels at once. timm mixes pairs, so the last batch of an
    epoch, which may have an odd number of pictures, is left out.

    Raises:
        ValueError: the batches have an odd number of pictures.
    """

    def __init__(self, *arguments, **options):
        from timm.data import Mixup  # optional, and takes a second to import

        super().__init__(*arguments, **options)
        size = self.args.per_device_train_batch_size
        if size % 2:
            raise ValueError(f"--per_device_train_batch_size must be even with mixed pictures, got {size}")
        self.args.dataloader_drop_last = True
        # The loss is a mean over pictures: Trainer must divide it by the accumulation steps itself.
        self.model_accepts_loss_kwargs = False
        smoothing, classes = self.args.label_smoothing_factor, self.model.config.num_labels
        self.mixup = Mixup(mixup_alpha=MIXUP, cutmix_alpha=CUTMIX, label_smoothing=smoothing, num_classes=classes)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler[int]:
        return RepeatingSampler(len(self.train_dataset), self.args.seed)

    def compute_loss(
        self, model: torch.nn.Module, inputs: dict, return_outputs: bool = False, num_items_in_batch=None
    ) -> torch.Tensor | tuple:
        pixels, targets = inputs["pixel_values"], inputs["labels"]
        if model.training:
            pixels, targets = self.mixup(pixels, targets)
        outputs = model(pixel_values=pixels)
        loss = F.cross_entropy(outputs.logits, targets)
        return (loss, outputs) if return_outputs else loss
