"""DNA: a tokenizer of one token for each nucleotide, and the other strand of sequences.

The vocabulary is that of HyenaDNA (Nguyen et al., "HyenaDNA", 2023). B sequences, L length, V vocabulary.
"""

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import ModelOutput

SPECIAL = {"cls_token": "[CLS]", "sep_token": "[SEP]", "bos_token": "[BOS]", "mask_token": "[MASK]",
           "pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[SEP]"}  # fmt: skip
VOCABULARY = ("[CLS]", "[SEP]", "[BOS]", "[MASK]", "[PAD]", "[RESERVED]", "[UNK]", "A", "C", "G", "T", "N")
# In an order in which each one's complement stands at the same place from the other end.
NUCLEOTIDES = ("A", "C", "G", "T")


def dna_tokenizer(length: int | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token per nucleotide, with the ids of HyenaDNA. It pads on the left.

    Lower case is upper case, U is T, and the letters of IUPAC for several nucleotides are N. Other characters are
    [UNK]. A sequence is `[CLS] sequence [SEP]`. `length` is `model_max_length`, in tokens, without a limit by default.
    """
    numbers = {word: index for index, word in enumerate(VOCABULARY)}
    words = Tokenizer(models.WordLevel(numbers, unk_token=SPECIAL["unk_token"]))
    lower = [normalizers.Replace(letter.lower(), letter) for letter in "ACGTN"]
    others = [normalizers.Replace(Regex("[Uu]"), "T"), normalizers.Replace(Regex("[RYSWKMBDHVryswkmbdhv]"), "N")]
    words.normalizer = normalizers.Sequence([*lower, *others])
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    words.decoder = decoders.Fuse()
    ends = [(word, numbers[word]) for word in ("[CLS]", "[SEP]")]
    words.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", ends)
    options = {"padding_side": "left", "clean_up_tokenization_spaces": False, "model_max_length": length} | SPECIAL
    return PreTrainedTokenizerFast(tokenizer_object=words, extra_special_tokens=["[RESERVED]"], **options)


def nucleotide_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of A, C, G and T; ValueError if the tokenizer does not have one token for each nucleotide."""
    pieces = tokenizer("".join(NUCLEOTIDES), add_special_tokens=False)["input_ids"]
    unknown = {tokenizer.unk_token_id, None}
    if len(set(pieces) - unknown) != len(NUCLEOTIDES) or len(pieces) != len(NUCLEOTIDES):
        raise ValueError(f"The tokenizer must have one token for each of A, C, G and T, got {pieces} for ACGT")
    return pieces


def reverse_complement(ids: torch.Tensor, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """Return the ids `(B, L)` of the other strand, with the tokens around a sequence where they are.

    Masked and unknown nucleotides move with the sequence. A row holds one sequence. Lower case stays so. A
    ValueError as of `nucleotide_ids`.
    """
    letters, places = nucleotide_ids(tokenizer), torch.arange(ids.shape[-1], device=ids.device)  # (L,)
    lower = tokenizer("acgt", add_special_tokens=False)["input_ids"]
    complement = torch.arange(len(tokenizer), device=ids.device)  # (V,)
    for known in (letters, lower) if len(set(lower)) == len(letters) else (letters,):
        complement[known] = torch.tensor(known[::-1], device=ids.device)
    names = ("cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id", "pad_token_id")
    around = [getattr(tokenizer, name) for name in names if getattr(tokenizer, name) is not None]
    inside = ~torch.isin(ids, ids.new_tensor(around))  # (B, L)
    first = inside.int().argmax(-1, keepdim=True)  # (B, 1)
    last = len(places) - 1 - inside.flip(-1).int().argmax(-1, keepdim=True)
    return complement[ids.gather(-1, torch.where(inside, first + last - places, places))]


def average_strands(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> RemovableHandle:
    """Let a classifier return the mean of its logits, and of its losses, for a sequence and its reverse complement.

    It holds until the handle is removed, or for a `with` block, and is meant for evaluation:

        with average_strands(model, tokenizer):
            trainer.evaluate()

    The `model` must be called with `input_ids` by name, as `Trainer` and pipelines do. Calls of one that is no
    classifier of sequences raise a ValueError: the places of its outputs are not the same on both strands.
    """

    def average(module: PreTrainedModel, args: tuple, kwargs: dict, output: ModelOutput) -> ModelOutput:
        if kwargs.get("input_ids") is None:
            raise ValueError("`input_ids` must be given by name for the mean of both strands, got none")
        if output.get("logits") is None or output["logits"].dim() > 2:
            name = type(module).__name__
            raise ValueError(f"`model` must be a classifier of sequences for the mean of both strands, got {name}")
        other = module.forward(**kwargs | {"input_ids": reverse_complement(kwargs["input_ids"], tokenizer)})
        for name in ("logits", "loss"):
            if output.get(name) is not None:
                output[name] = (output[name] + other[name]) / 2
        return output

    return model.register_forward_hook(average, with_kwargs=True)
