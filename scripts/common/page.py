"""A page for a causal TNN, by Gradio: a text goes in, its continuation streams out, and the kernels stand beside it.

Nothing is asked of another machine: fonts are those of the system, and Gradio sends no statistics.
"""

import logging
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from transformers import PreTrainedModel

from tnn_scripts.common.served import check_address, load_causal
from tnn_scripts.common.sessions import Sessions
from tnn_scripts.common.writing import Settings, Writer
from tnn_scripts.options.page import PageArguments
from tnn_scripts.plotting import figures
from tnn_scripts.plotting.reading import read_model

logger = logging.getLogger("page")
# Rows and columns of the matrices that are drawn, and the resolution of the pictures.
MATRIX_SIZE, DPI = 64, 100
# Texts that wait for their turn; who comes after these is told to come back.
QUEUE = 32
FONTS = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}


def import_gradio() -> ModuleType:
    """Gradio, which the package does without.

    Raises:
        ImportError: it is not installed.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    try:
        import gradio
    except ImportError as error:
        raise ImportError(f'a page needs gradio ({error}): pip install "modeling-tnn[space]"') from error
    return gradio


def load_writer(args: PageArguments) -> Writer:
    """The model and its tokenizer.

    Raises:
        ValueError: it is no causal TNN, or its tokenizer is that of another model.
    """
    model, tokenizer = load_causal(args.model_name_or_path, args.dtype, args.device)
    return Writer(model, tokenizer, args.max_input_tokens, args.max_new_tokens)


def draw_kernels(model: PreTrainedModel, folder: Path) -> list[tuple[str, str]]:
    """Pictures of the kernels in `folder` with what they show: all layers, then each."""
    length = model.config.axis_length
    kernels, _ = read_model(model.base_model, length)
    drawn = {"all layers": figures.overview(kernels, "What each layer attends to")}
    drawn |= {kernel.label: figures.layer(kernel, min(MATRIX_SIZE, length), tall=True) for kernel in kernels}
    pictures = []
    for label, figure in drawn.items():
        path = folder / f"{label.replace(' ', '-')}.png"
        figure.savefig(path, dpi=DPI)
        pictures.append((str(path), label))
    return pictures


def describe(model: PreTrainedModel) -> str:
    config = model.config
    size = f"{config.num_hidden_layers} layers, {model.num_parameters():,} parameters, tno_type={config.tno_type}"
    return f"A Toeplitz neural network ({size}) continues your text. It runs on {model.device.type}."


def build_settings(gr: ModuleType, most: int) -> list:
    """Where a user chooses the fields of `Settings`, in their order."""
    default = Settings()
    with gr.Row():
        tokens = gr.Slider(1, most, min(default.max_new_tokens, most), step=1, label="max_new_tokens", min_width=150)
        seed = gr.Number(default.seed, precision=0, label="seed", min_width=150)
    with gr.Row():
        temperature = gr.Slider(0, 2, default.temperature, step=0.05, label="temperature", min_width=150)
        top_p = gr.Slider(0.05, 1, default.top_p, step=0.05, label="top_p", min_width=150)
    return [tokens, temperature, top_p, seed]


def build_page(name: str, sessions: Sessions, pictures: list[tuple[str, str]], concurrency_limit: int):
    """The Gradio page of a model, with pictures of its kernels."""
    gr = import_gradio()
    with gr.Blocks(title=name, analytics_enabled=False, fill_width=True) as page:
        gr.Markdown(f"# {name}\n{describe(sessions.writer.model)}")
        with gr.Row():
            with gr.Column(scale=2, min_width=340):
                prompt = gr.Textbox(label="Text", lines=4, max_lines=12, autofocus=True)
                with gr.Row():
                    start = gr.Button("Write", variant="primary", min_width=120)
                    end = gr.Button("Stop", min_width=120)
                output = gr.Textbox(label="What follows", lines=8, max_lines=16, buttons=["copy"], elem_id="text")
                status = gr.Markdown(elem_id="status")
                settings = build_settings(gr, sessions.writer.max_new_tokens)
            with gr.Column(scale=3, min_width=340), gr.Tabs():
                for file, label in pictures:
                    with gr.Tab(label):
                        gr.Image(file, show_label=False, interactive=False, buttons=["fullscreen"])
        begin, write, stop, leave = handlers(gr, sessions)
        shown = {"outputs": [output, status], "show_progress": "hidden"}
        begun = gr.on([start.click, prompt.submit], begin, queue=False, api_visibility="private", **shown)
        # A second text of a page is not ignored: it ends the first.
        begun.then(write, [prompt, *settings], concurrency_limit=concurrency_limit, trigger_mode="multiple", **shown)
        end.click(stop, queue=False, api_visibility="private")
        page.unload(leave)
    return page.queue(max_size=QUEUE)


def handlers(gr: ModuleType, sessions: Sessions) -> list[Callable]:
    """The methods of `sessions` for Gradio, which says by the annotation of a request whose it is."""

    def begin(request: gr.Request):
        return sessions.begin(request.session_hash)

    def write(prompt, max_new_tokens, temperature, top_p, seed, request: gr.Request):
        yield from sessions.write(request.session_hash, prompt, max_new_tokens, temperature, top_p, seed)

    def stop(request: gr.Request):
        sessions.stop(request.session_hash)

    def leave(request: gr.Request):
        sessions.leave(request.session_hash)

    return [begin, write, stop, leave]


def serve(args: PageArguments):
    """Load the model, draw its kernels, and serve the page until the process is ended.

    Raises:
        ImportError: Gradio is not installed.
        ValueError: the model cannot be served.
        UserError: the address cannot.
    """
    gr = import_gradio()
    check_address(args.host, args.port)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # Gradio asks itself whether it is there
    writer = load_writer(args)
    sessions = Sessions(writer)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder
        logger.info("drawing the kernels of %d layers", writer.model.config.num_hidden_layers)
        pictures = draw_kernels(writer.model, Path(folder))
        page = build_page(Path(args.model_name_or_path).resolve().name, sessions, pictures, args.concurrency_limit)
        _, url, _ = page.launch(
            server_name=args.host, server_port=args.port, theme=gr.themes.Default(**FONTS), footer_links=[],
            prevent_thread_lock=True, quiet=True, ssr_mode=False, max_file_size=0, enable_monitoring=False,
            run_history=False,
        )  # fmt: skip
        logger.info("serving %s at %s; Ctrl-C ends it", args.model_name_or_path, url)
        try:
            threading.Event().wait()
        finally:
            sessions.leave_all()
            page.close(verbose=False)
