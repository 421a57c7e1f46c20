"""Training with mixed pictures, whose targets are probabilities, and with each picture several times in a batch."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, Sampler

from tnn_scripts.common.optimizers import GroupingTrainer
from tnn_scripts.data.mixing import mix

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
    """Trainer that mixes the pictures of each training batch. Evaluation sees them as they are.

    The loss is the cross entropy of the mixed targets, with `label_smoothing_factor` in training alone. transformers'
    models would take targets of this shape for several labels at once.
    """

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        # The loss is a mean over pictures: Trainer must divide it by the accumulation steps itself.
        self.model_accepts_loss_kwargs = False

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler[int]:
        return RepeatingSampler(len(self.train_dataset), self.args.seed)

    def compute_loss(
        self, model: torch.nn.Module, inputs: dict, return_outputs: bool = False, num_items_in_batch=None
    ) -> torch.Tensor | tuple:
        pixels, targets, smoothing = inputs["pixel_values"], inputs["labels"], 0.0
        if model.training:
            pixels, targets = mix(pixels, targets, self.model.config.num_labels)
            smoothing = self.args.label_smoothing_factor
        outputs = model(pixel_values=pixels)
        loss = F.cross_entropy(outputs.logits, targets, label_smoothing=smoothing)
        return (loss, outputs) if return_outputs else loss
