"""Chat with a causal model in the terminal: it reads a line and continues the conversation.

The conversation stays in the cache, so that each turn reads only its own tokens. A tokenizer with a chat template
marks the turns by it. Without a template, the model continues the plain text. An empty line, Ctrl-D or Ctrl-C ends the
chat; /new starts a new conversation.

Example:
    python scripts/chat.py --model_name_or_path outputs/demo
    python scripts/chat.py --model_name_or_path outputs/demo --max_new_tokens 40 --temperature 0.7
"""

import argparse

from tnn_scripts.common.errors import report_errors

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel, set_seed

import modeling_tnn  # noqa: F401 - registers the model with the Auto classes
from modeling_tnn.cache_name import CACHE
from tnn_scripts.common.devices import check_device
from tnn_scripts.common.model_path import check_model_path
from tnn_scripts.common.parser import ProgramParser
from tnn_scripts.common.pieces import PieceStreamer
from tnn_scripts.common.terminal import read_lines
from tnn_scripts.data.text import check_vocabulary


def parse_arguments() -> argparse.Namespace:
    parser = ProgramParser(description=__doc__)
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--max_new_tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=1.0, help="Sampling temperature; 0 is greedy.")
    parser.add_argument("--top_p", type=float, default=0.95, help="Sample from the likeliest tokens of this mass.")
    parser.add_argument("--system", help="System message, for a tokenizer with a chat template.")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trust_remote_code", action="store_true")
    args = parser.parse_args()
    check_model_path(args.model_name_or_path, tokenizer=True)
    if args.max_new_tokens < 1 or args.temperature < 0 or not 0 < args.top_p <= 1:
        parser.error(
            "--max_new_tokens must be at least 1, --temperature at least 0, and --top_p in (0, 1], got "
            f"{args.max_new_tokens}, {args.temperature:g} and {args.top_p:g}"
        )
    return args


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
        ids = self.tokenizer.apply_chat_template(
            self.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        if not torch.equal(ids[:, : self.ids.shape[1]], self.ids):
            self.cache = DynamicCache(config=self.model.config)  # the template has changed the earlier text
        return ids


@report_errors
def main():
    args = parse_arguments()
    check_device(args.device)
    code = {"trust_remote_code": args.trust_remote_code}
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path, **code)
    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=args.dtype, **code).to(args.device)
    check_vocabulary(tokenizer, model.config.vocab_size)
    if args.system is not None and tokenizer.chat_template is None:
        raise ValueError(f"--system must be given with a tokenizer that has a chat template, got {args.system!r}")
    set_seed(args.seed)
    drawn = {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p}
    options = {"max_new_tokens": args.max_new_tokens} | (drawn if args.temperature else {"do_sample": False})
    conversation = Conversation(model, tokenizer, args.system, options)
    for line in read_lines():
        if line.strip() == "/new":
            conversation = Conversation(model, tokenizer, args.system, options)
            continue
        conversation.answer(line)


if __name__ == "__main__":
    main()
