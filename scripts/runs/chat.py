"""A conversation with a causal model in the terminal."""

import argparse
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel, set_seed

import modeling_tnn  # noqa: F401 - registers the model with the Auto classes
from modeling_tnn.cache_tnn import CACHE
from tnn_scripts.common.devices import check_device
from tnn_scripts.common.loading import PARTS, check_writing, load, naming
from tnn_scripts.common.pieces import PieceStreamer
from tnn_scripts.common.sampling import sampling
from tnn_scripts.common.terminal import read_lines
from tnn_scripts.data.vocabulary import check_vocabulary


class Conversation:
    """The tokens of a conversation, and the cache of the model that has read them."""

    def __init__(self, model: PreTrainedModel, tokenizer, system: str | None, options: dict):
        self.model, self.tokenizer, self.options = model, tokenizer, options
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self.ids = torch.empty(1, 0, dtype=torch.long)
        self.cache = DynamicCache(config=model.config)

    def answer(self, line: str) -> str:
        """The answer of the model to `line`. It also streams to stdout."""
        self.ids = self._prompt(line)  # (1, L)
        streamer = PieceStreamer(self.tokenizer, skip_prompt=True)
        ids = self.ids.to(self.model.device)
        mask = torch.ones_like(ids)
        self.ids = self.model.generate(
            ids, attention_mask=mask, streamer=streamer, **self.options, **{CACHE: self.cache}
        ).cpu()
        self.messages.append({"role": "assistant", "content": streamer.text})
        return streamer.text

    def _prompt(self, line: str) -> torch.Tensor:
        """The tokens of the conversation and of the new `line`, `(1, L)`."""
        self.messages.append({"role": "user", "content": line})
        if self.tokenizer.chat_template is None:
            new = self.tokenizer(line, return_tensors="pt", add_special_tokens=not self.ids.shape[1])["input_ids"]
            return torch.cat([self.ids, new], dim=1)
        with naming(self.tokenizer.name_or_path, *PARTS[AutoTokenizer]):  # a template is code of the folder
            ids = self.tokenizer.apply_chat_template(
                self.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"]
        if not torch.equal(ids[:, : self.ids.shape[1]], self.ids):
            self.cache = DynamicCache(config=self.model.config)  # the template has changed the earlier text
        return ids


def show_help(tokenizer):
    """Say on stderr how to chat, and whether the model gets the lines as messages."""
    turns = "messages (chat template)" if tokenizer.chat_template else "plain text, which it continues"
    sys.stderr.write(
        f"The model reads your lines as {turns}. /new starts anew, /help shows this, an empty line or Ctrl-D ends.\n"
    )


def run(args: argparse.Namespace):
    """Answer each line that is read, until an empty one.

    Raises:
        ValueError: the model or the device is wrong, or its tokenizer has no template for `--system`.
    """
    device = check_device(args.device)
    code = {"trust_remote_code": args.trust_remote_code}
    tokenizer = load(AutoTokenizer, args.model_name_or_path, **code)
    model = load(AutoModelForCausalLM, args.model_name_or_path, dtype=args.dtype, **code).to(device)
    check_writing(model, args.model_name_or_path)
    check_vocabulary(tokenizer, model.config.vocab_size)
    if args.system is not None and tokenizer.chat_template is None:
        raise ValueError(f"--system must be given with a tokenizer that has a chat template, got {args.system!r}")
    set_seed(args.seed)
    options = {"max_new_tokens": args.max_new_tokens} | sampling(args.temperature, args.top_p)
    conversation = Conversation(model, tokenizer, args.system, options)
    show_help(tokenizer)
    for line in read_lines():
        if line.strip() == "/new":
            conversation = Conversation(model, tokenizer, args.system, options)
        elif line.strip() == "/help":
            show_help(tokenizer)
        else:
            conversation.answer(line)
