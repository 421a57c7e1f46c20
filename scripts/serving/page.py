"""A page for a causal TNN, by Gradio: a text goes in, its continuation streams out, and the kernels stand beside it.

Nothing is asked of another machine: fonts are those of the system, and Gradio sends no statistics.
"""

import asyncio
import logging
import os
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType

from tnn_programs.cli.errors import importing

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from modeling_tnn.serving.scheduler import QueueFullError
from tnn_programs.cli.sampling import given_sampling, sampling
from tnn_programs.cli.serving_arguments import PageArguments
from tnn_programs.cli.text_files import check_text
from tnn_programs.plotting import figures
from tnn_programs.plotting.reading import read_model
from tnn_programs.serving.engine import Engine, Text
from tnn_programs.serving.writing import CHARACTERS_PER_TOKEN, load_served, name_of, sampling_of

logger = logging.getLogger("page")
# Texts that wait for their turn; who comes after these is told to come back.
QUEUE = 32
# The largest seed that a browser does not round.
MAX_SEED = 2**53 - 1
FONTS = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
# Seconds between two states of a text that are sent to a browser.
INTERVAL = 0.05
WAITING = "Waiting for the model \N{HORIZONTAL ELLIPSIS}"
# The reason of a `Request` -> the sentence for the user.
ENDS = {"stop": " The model ended the text.", "length": " Reached max_new_tokens."}
CUT, STOPPED = " The text is longer than this page reads: its beginning was left out.", " Stopped."


class Writer:
    """Texts of an engine for the page; a prompt of more than `max_input_tokens` is read from its end."""

    def __init__(self, engine: Engine, tokenizer: PreTrainedTokenizerBase, max_input_tokens: int = 8192):
        self.engine, self.tokenizer, self.max_input_tokens = engine, tokenizer, max_input_tokens

    async def write(
        self, prompt: str, max_new_tokens: int, temperature: float, top_p: float, seed: int | None
    ) -> AsyncIterator[tuple[str, str]]:
        """Yield the text so far and a line about it, at most every `INTERVAL` seconds and at the end.

        A reader who leaves ends the text. Raises the error that ended the text.
        """
        yield "", WAITING
        of_model = given_sampling(vars(self.engine.scheduler.model.generation_config))
        news, options = asyncio.Queue(), {"max_new_tokens": max_new_tokens} | sampling(temperature, top_p, of_model)
        try:
            ids, is_cut = await asyncio.to_thread(self.read, prompt)
            text = Text(self.tokenizer, 0, ids, (), news)
            text.request = self.engine.submit(ids, seed, streamer=text, stopping_criteria=[text], **options)
        except (ValueError, QueueFullError) as error:
            yield "", str(error)
            return
        written, shown, is_done = "", 0.0, False
        try:
            while not is_done:
                await news.get()
                is_done = text.is_done
                if is_done or time.monotonic() - shown > INTERVAL:
                    written, shown = written + text.take().text, time.monotonic()
                    yield written, progress(text, is_cut)
        finally:
            self.engine.cancel(text.request)
        if text.request.error is not None:
            raise text.request.error

    def read(self, prompt: str) -> tuple[list[int], bool]:
        """The tokens of a prompt, and whether it has more before them; ValueError if it has none or is not UTF-8."""
        check_text("The text", prompt)
        kept = prompt[-CHARACTERS_PER_TOKEN * self.max_input_tokens :]
        ids = self.tokenizer(kept, verbose=False)["input_ids"]
        if not ids:
            raise ValueError("The text is empty: write something for the model to continue.")
        return ids[-self.max_input_tokens :], len(kept) < len(prompt) or len(ids) > self.max_input_tokens


def progress(text: Text, is_cut: bool) -> str:
    """The line about a text: tokens, times, and why it has ended."""
    start, *times = text.times
    line = f"Read {'the last ' if is_cut else ''}{count(text.request.prompt_length)}"
    if times:
        line += f" in {times[0] - start:.2f} s"
    line += f", wrote {count(len(times))}"
    if len(times) > 1:
        line += f" at {(len(times) - 1) / max(times[-1] - times[0], 1e-9):,.0f} tokens per second"
    return f"{line}.{ENDS.get(text.request.reason, '')}{CUT if is_cut else ''}"


def stopped(line: str) -> str:
    """The line about a text that a user has ended, unless it had ended."""
    return line if line.endswith((*ENDS.values(), CUT, STOPPED)) else line.removesuffix(WAITING) + STOPPED


def count(tokens: int) -> str:
    return f"{tokens:,} token{'' if tokens == 1 else 's'}"


def import_gradio() -> ModuleType:
    """Gradio, which the package does without; ImportError if it is not installed."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    with importing("space"):
        import gradio
    return gradio


def describe(model: PreTrainedModel) -> str:
    config = model.config
    operators = ", ".join(config.tno_types)
    size = f"{config.num_hidden_layers} layers, {model.num_parameters():,} parameters, tno_type={operators}"
    return f"A Toeplitz neural network ({size}) continues your text. It runs on {model.device.type}."


def build_settings(gr: ModuleType, most: int, usual: dict) -> list:
    """Build the controls of the settings, in the order of `Writer.write`. Gradio refuses other values."""
    with gr.Row():
        tokens = gr.Slider(1, most, min(100, most), step=1, precision=0, label="max_new_tokens", min_width=150)
        seed = gr.Number(0, precision=0, minimum=0, maximum=MAX_SEED, label="seed", min_width=150)
    with gr.Row():
        temperature = gr.Slider(0, 2, usual["temperature"] or 0, step=0.05, label="temperature", min_width=150)
        top_p = gr.Slider(0.05, 1, usual["top_p"] or 1, step=0.05, label="top_p", min_width=150)
    return [tokens, temperature, top_p, seed]


def build_page(name: str, writer: Writer, pictures: dict[str, Path], max_new_tokens: int):
    """The Gradio page of a model, with pictures of its kernels."""
    gr = import_gradio()

    with gr.Blocks(title=name, analytics_enabled=False, fill_width=True) as page:
        gr.Markdown(f"# {name}\n{describe(writer.engine.scheduler.model)}")
        with gr.Row():
            with gr.Column(scale=2, min_width=340):
                prompt = gr.Textbox(label="Text", lines=4, max_lines=12, autofocus=True)
                with gr.Row():
                    start = gr.Button("Write", variant="primary", min_width=120)
                    end = gr.Button("Stop", min_width=120)
                output = gr.Textbox(label="What follows", lines=8, max_lines=16, buttons=["copy"], elem_id="text")
                status = gr.Markdown(elem_id="status")
                settings = build_settings(gr, max_new_tokens, sampling_of(writer.engine.scheduler.model))
            with gr.Column(scale=3, min_width=340), gr.Tabs():
                for label, file in pictures.items():
                    with gr.Tab(label):
                        gr.Image(str(file), show_label=False, interactive=False, buttons=["fullscreen"])
        # Texts wait in the engine.
        writing = gr.on(
            [start.click, prompt.submit], writer.write, [prompt, *settings], [output, status], show_progress="hidden",
            concurrency_limit=None, api_visibility="private",
        )  # fmt: skip
        end.click(stopped, status, status, cancels=[writing], queue=False, api_visibility="private")
    return page.queue()


def serve(args: PageArguments):
    """Load the model, draw its kernels, and serve the page until the process is ended."""
    gr = import_gradio()
    logging.getLogger("httpx").setLevel(logging.WARNING)  # Gradio asks itself whether it is there
    model, tokenizer = load_served(args.model_name_or_path, args.dtype, args.device)
    engine = Engine(model, max_batch_size=args.max_batch_size, max_waiting=QUEUE)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder
        logger.info("drawing the kernels of %d layers", model.config.num_hidden_layers)
        kernels, _ = read_model(model.base_model, model.config.axis_length)
        pictures = figures.save_all(kernels, "What each layer attends to", Path(folder))
        name = name_of(args.model_name_or_path).rpartition("/")[-1]
        page = build_page(name, Writer(engine, tokenizer, args.max_input_tokens), pictures, args.max_new_tokens)
        _, url, _ = page.launch(
            server_name=args.host, server_port=args.port, theme=gr.themes.Default(**FONTS), footer_links=[],
            prevent_thread_lock=True, quiet=True, ssr_mode=False, max_file_size=0, enable_monitoring=False,
            run_history=False, max_threads=args.max_batch_size + QUEUE,
        )  # fmt: skip
        logger.info("serving %s at %s; Ctrl-C ends it", args.model_name_or_path, url)
        try:
            threading.Event().wait()
        finally:
            engine.close()
            page.close(verbose=False)
