"""Load a model that writes; let it continue prompts in batches, or a conversation whose turns share a cache."""

import copy
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.generation import GenerationMode

from modeling_tnn.cache_tnn import CACHE
from modeling_tnn.tools.layout import to_column_major
from tnn_programs.cli import model_path
from tnn_programs.cli.generation_fields import is_of_kind, wanted
from tnn_programs.cli.sampling import OF_SAMPLING, given_sampling, sampling, with_sampling
from tnn_programs.serving.pieces import PieceStreamer

# A text has at most this many characters for each token that may be read, before the tokenizer sees it.
CHARACTERS_PER_TOKEN = 32
# Options of `generate` that need the tokenizer.
READ_TEXT = {"stop_strings", "token_healing"}
# Besides the fields of sampling all that counts of a `generation_config.json`.
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def load_writer(
    name: str, dtype: str, device: str | None, trust_remote_code: bool = False, **tokenizing
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in evaluation mode, and its tokenizer with the options `tokenizing`; ValueError if they do not fit."""
    device, code = model_path.check_device(device), {"trust_remote_code": trust_remote_code}
    tokenizer = model_path.load(AutoTokenizer, name, **code, **tokenizing)
    model = model_path.load(AutoModelForCausalLM, name, dtype=dtype, **code).to(device)
    keep_settings(model, name)
    model_path.check_writing(model, name, sampling_of(model))
    model_path.check_vocabulary(tokenizer, model.config.vocab_size)
    return to_column_major(model.eval()), tokenizer


def keep_settings(model: PreTrainedModel, source: str):
    """Leave the ids of special tokens and the fields of sampling alone of a `generation_config.json`; check them."""
    fields, vocabulary = vars(model.generation_config), model.config.get_text_config().vocab_size
    with model_path.naming(source, "generation settings", ("generation_config.json",)):
        for name, value in fields.items():
            if isinstance(value, bool | int | float | str | list) and not is_of_kind(name, value):
                raise ValueError(f"`{name}` must be {wanted(name)}, or null, got {value!r}")
        if (fields.get("pad_token_id") or 0) >= vocabulary:
            raise ValueError(f"`pad_token_id` must be below {vocabulary}, got {fields['pad_token_id']}")
    kept = {name: fields.get(name) for name in (*IDS, *OF_SAMPLING)}
    model.generation_config = GenerationConfig(**kept, do_sample=True if given_sampling(kept) else None)


def sampling_of(model: PreTrainedModel) -> dict:
    """The options of `generate` by which a model is sampled unless its user says otherwise."""
    return sampling(of_model=given_sampling(vars(model.generation_config)))


def load_served(name: str, dtype: str, device: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal TNN and its tokenizer; ValueError for other models."""
    config = model_path.load(AutoConfig, name)
    if config.model_type != "tnn":
        raise ValueError(f"model={name} is a {config.model_type}: only a causal TNN can be served.")
    model_path.check_causal(name, config.to_dict())
    return load_writer(name, dtype, device)


def name_of(model: str) -> str:
    """The name of a served model: that of its folder, or its id on the Hub."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def with_defaults(model: PreTrainedModel, options: dict) -> tuple[dict, dict]:
    """The options of `generate` with a number of new tokens, and the same with sampling unless they search."""
    options = options if "max_length" in options else {"max_new_tokens": 100} | options
    asked = copy.deepcopy(model.generation_config)
    searching = {name: value for name, value in options.items() if name not in OF_SAMPLING}
    asked.update(**(sampling(temperature=0) | searching | {"do_sample": None}))
    is_plain = asked.get_generation_mode() == GenerationMode.GREEDY_SEARCH
    return options, with_sampling(options, is_plain, given_sampling(vars(model.generation_config)))


def continue_batch(model, tokenizer, prompts: list[str], options: dict, stream: bool) -> tuple[list[str], int]:
    """The texts of all sequences of the prompts, and the number of new tokens."""
    inputs = tokenizer(
        prompts, return_tensors="pt", padding=len(prompts) > 1, return_token_type_ids=False, verbose=False
    )
    streamer = PieceStreamer(tokenizer) if stream else None
    options = options | ({"tokenizer": tokenizer} if options.keys() & READ_TEXT else {})
    output = model.generate(**inputs.to(model.device), streamer=streamer, **options)
    new = output[:, inputs["input_ids"].shape[1] :]
    count = new.numel() if tokenizer.pad_token_id is None else int((new != tokenizer.pad_token_id).sum())
    return tokenizer.batch_decode(output, skip_special_tokens=True), count


class Conversation:
    """The tokens of a conversation, and the cache of the model that has read them."""

    def __init__(self, model: PreTrainedModel, tokenizer, system: str | None, options: dict):
        self.model, self.tokenizer, self.options = model, tokenizer, options
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self.ids = torch.empty(1, 0, dtype=torch.long)
        self.cache = DynamicCache(config=model.config)

    def answer(self, line: str) -> str:
        """The answer of the model to `line`. It also streams to stdout."""
        ids = self._prompt(line).to(self.model.device)  # (1, L)
        streamer = PieceStreamer(self.tokenizer, skip_prompt=True)
        cached = {"attention_mask": torch.ones_like(ids), CACHE: self.cache}
        self.ids = self.model.generate(ids, streamer=streamer, **self.options, **cached).cpu()
        self.messages.append({"role": "assistant", "content": streamer.text})
        return streamer.text

    def _prompt(self, line: str) -> torch.Tensor:
        """The tokens of the conversation and of the new `line`, `(1, L)`."""
        self.messages.append({"role": "user", "content": line})
        if self.tokenizer.chat_template is None:
            given = {"return_tensors": "pt", "add_special_tokens": not self.ids.shape[1], "verbose": False}
            return torch.cat([self.ids, self.tokenizer(line, **given)["input_ids"]], dim=1)
        with model_path.naming(self.tokenizer.name_or_path, *model_path.PARTS["AutoTokenizer"]):  # a template is code
            ids = self.tokenizer.apply_chat_template(
                self.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"]
        if not torch.equal(ids[:, : self.ids.shape[1]], self.ids):
            self.cache = DynamicCache(config=self.model.config)  # the template has changed the earlier text
        return ids
