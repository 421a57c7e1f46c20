"""The streams of `pretrain.py --streaming`: sources, what is held out of them, and the examples of both."""

import math

import numpy as np
from accelerate import Accelerator
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from tnn_scripts.common.training_arguments import PretrainArguments
from tnn_scripts.data.blocks import BlockStream
from tnn_scripts.data.sources import Mixture, open_source
from tnn_scripts.data.streaming import Packer, TextStream
from tnn_scripts.data.text import say_what_is_left_out

# Validation blocks, unless --max_eval_blocks or validation data are given.
HELD_OUT_BLOCKS = 100


def open_corpus(args: PretrainArguments) -> tuple[Mixture, Mixture | None]:
    """The training text, and the validation text if there is one.

    Raises:
        ValueError: a source is missing or empty, or has no such column.
    """
    names = [args.train_file] if args.train_file is not None else args.dataset_name
    configs = args.dataset_config_name or [None] * len(names)
    splits = [open_source(name, config) for name, config in zip(names, configs, strict=True)]
    settings = {"text_column": args.text_column, "seed": args.seed}
    train = Mixture(
        [":".join(filter(None, pair)) for pair in zip(names, configs, strict=True)],
        [split["train"] for split in splits],
        args.interleave_probabilities or None,
        documents=args.documents,
        parts=args.num_shards,
        **settings,
    )
    name, validation = args.validation_file, None
    if name is not None:
        validation = open_source(name)["train"]
    elif len(splits) == 1 and "validation" in splits[0]:
        name, validation = f"the validation split of {names[0]}", splits[0]["validation"]
    if validation is None:
        return train, None
    return train, Mixture([name], [validation], documents=args.documents, **settings)


def build_text_streams(
    args: PretrainArguments,
    accelerator: Accelerator,
    train: Mixture,
    validation: Mixture | None,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[TextStream, BlockStream]:
    """The streams of training and validation examples. The latter are kept in memory.

    Raises:
        ValueError: the text is too short.
    """
    masked = args.objective == "mlm"
    if validation is None:
        blocks = hold_out(train, args.max_eval_blocks or HELD_OUT_BLOCKS, tokenizer, args.block_size, masked)
    else:
        packer = Packer(validation, tokenizer, args.block_size, masked)
        rows = validation.texts_of(validation.rows_of(0, 0))
        blocks, _ = packer.first(rows, args.max_eval_blocks or math.inf)
        if args.max_eval_blocks is None:
            say_what_is_left_out(len(packer.rest), "validation", args.block_size)
    if len(blocks) == 0:
        raise ValueError(f"The validation text is shorter than one block of {args.block_size} tokens.")
    held = Dataset.from_dict({"input_ids": blocks.astype(np.int64)})
    stream = TextStream(
        train,
        tokenizer,
        args.block_size,
        masked,
        args.mlm_probability,
        args.shuffle_buffer_size,
        (accelerator.process_index, accelerator.num_processes),
        accelerator.device,
    )
    return stream, BlockStream(held, tokenizer, masked, args.mlm_probability, args.seed, shuffle=False)


def hold_out(
    mixture: Mixture, count: int, tokenizer: PreTrainedTokenizerBase, block_size: int, masked: bool
) -> np.ndarray:
    """The first blocks of the parts of each source, `count` in all. The mixture skips their rows from now on.

    The last of these rows may have more text than the blocks: the training begins with it.

    Raises:
        ValueError: a part has fewer.
    """
    held = [np.zeros((0, block_size), dtype=np.int32)]
    for number, part, wanted in _shares(mixture, count):
        rows = mixture.texts_of(mixture.rows_of(number, part))
        packer = Packer(mixture, tokenizer, block_size, masked)
        blocks, read = packer.first(rows, wanted)
        if len(blocks) < wanted:
            raise ValueError(
                f"Shard {part + 1} of {mixture.parts} of {mixture.names[number]} must have {wanted} blocks of "
                f"{block_size} tokens for validation, got {len(blocks)}. Give --validation_file, a longer text, or a "
                "smaller --max_eval_blocks, --num_shards or --block_size."
            )
        mixture.skipped[number, part], mixture.unused[number, part] = read, packer.rest
        held.append(blocks)
    return np.concatenate(held)


def _shares(mixture: Mixture, count: int) -> list[tuple[int, int, int]]:
    """Source, part, and the number of blocks that are held out of them: by the weights, and evenly from the parts."""
    edges = np.round(np.cumsum([0, *mixture.shares]) * count).astype(int)
    places = np.arange(count)
    found = [
        (number, part, int(np.sum(places[edges[number] : edges[number + 1]] % mixture.parts == part)))
        for number in range(len(mixture.shares))
        for part in range(mixture.parts)
    ]
    return [share for share in found if share[2]]
