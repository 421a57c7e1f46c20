"""The windows of a genome that the options of `tnn pretrain` name."""

from transformers import PreTrainedTokenizerBase

from modeling_tnn.data.genome import GenomeStream, read_fasta, read_regions, split_windows, whole, windows_of
from modeling_tnn.data.text import enclosing_tokens


def build_genome_streams(args, tokenizer: PreTrainedTokenizerBase) -> tuple[GenomeStream, GenomeStream]:
    """Return the streams of training and validation windows, by the options of `tnn pretrain`.

    Validation draws no letters: those in lower case count if they have the weight 1, else they do not.
    """
    masked, file = args.objective == "mlm", args.train_file or args.dataset_name[0]
    given = {"tokenizer": tokenizer, "block_size": args.block_size, "masked": masked, "seed": args.seed}
    given["mlm_probability"] = args.mlm_probability
    size = args.block_size - (sum(map(len, enclosing_tokens(tokenizer))) if masked else 0)
    genome = read_fasta(file)
    held = genome if args.validation_file is None else read_fasta(args.validation_file)
    regions = whole(genome) if args.regions is None else read_regions(args.regions, genome)
    windows = windows_of(genome, regions, size)
    if args.validation_file is None:
        windows, validation = split_windows(windows, args.validation_contigs)
    else:
        windows = [window for window in windows if window[2] in (None, "train")]
        validation = windows_of(held, whole(held), size)
    weight, strands = args.soft_masked_weight, args.reverse_complement
    train = GenomeStream(genome, windows, **given, reverse_complement=strands, soft_masked_weight=weight)
    evaluated = GenomeStream(held, validation, **given, shuffle=False, soft_masked_weight=float(weight == 1))
    evaluated.blocks = evaluated.blocks[: args.max_eval_blocks]
    for split, stream in (("train", train), ("validation", evaluated)):
        if not len(stream):
            raise ValueError(f"The {split} data must have {size} letters for a window: give a smaller --block_size")
    return train, evaluated
