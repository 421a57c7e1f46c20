"""Build, train, save and report a pretraining run, on one device or many."""

import contextlib
import dataclasses
import gc
import logging
import os
import sys
from datetime import timedelta
from pathlib import Path

from tnn_programs.cli.errors import MemoryExceededError

import datasets
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, InitProcessGroupKwargs
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase, set_seed

from modeling_tnn.data.blocks import BlockStream
from modeling_tnn.data.dna import dna_tokenizer
from modeling_tnn.data.text import pack, train_tokenizer
from modeling_tnn.tools.poles import find_unstable
from tnn_programs.cli.atomic import SavingError, claim, new_files, new_folder, write_json
from tnn_programs.cli.commands import next_steps
from tnn_programs.cli.model_path import check_vocabulary, load
from tnn_programs.cli.runs import STATE, check_run, checkpoints, continues, find_checkpoint, read_object, remove_others
from tnn_programs.cli.text_files import check_file, is_fasta
from tnn_programs.cli.training_arguments import PretrainArguments, choose_schedule
from tnn_programs.data.corpus import load_corpus, workers_for
from tnn_programs.data.genome import build_genome_streams
from tnn_programs.data.mixture import open_corpus
from tnn_programs.data.streaming import TextStream, build_text_streams
from tnn_programs.training import costs, processes
from tnn_programs.training.accelerate_loop import Pretraining, perplexity
from tnn_programs.training.models import build_config, build_model
from tnn_programs.training.optimizers import try_schedule
from tnn_programs.training.passes import compile_blocks, warn_of_bfloat16

logger = logging.getLogger("pretrain")
RESUME = " Continue with --resume_from_checkpoint latest."
# What a model of DNA is asked to continue: lacZ of E. coli.
START_OF_GENE = "ATGACCATGATTACG"
REPORT = (
    "validation perplexity: {perplexity_before:.2f} before, {perplexity:.2f} after {steps} steps, best "
    "{best_perplexity:.2f} at step {best_step}; {tokens_per_second:.0f} tokens/s; saved in {folder}\n"
    "the best model is in {folder}/best"
)


def build_accelerator(args: PretrainArguments) -> Accelerator:
    """The Accelerator, as `accelerate launch` or its configuration file sets it up; ValueError if it cannot."""
    timeout = timedelta(seconds=args.ddp_timeout)
    on_cpu = args.use_cpu or not torch.accelerator.is_available()
    processes.prepare_engine(on_cpu, timeout)
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision=args.mixed_precision,
        # All forward passes of a step are fetched at once, so the end of the data does not mark the last one.
        gradient_accumulation_plugin=GradientAccumulationPlugin(sync_with_dataloader=False),
        dataloader_config=DataLoaderConfiguration(non_blocking=True),
        log_with=None if args.report_to == "none" else args.report_to,
        project_dir=args.output_dir,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)],
    )
    started, seen = int(os.environ.get("WORLD_SIZE", 1)), accelerator.num_processes
    if started != seen:
        raise ValueError(f"{started} processes were started, accelerate sees {seen}. Use `accelerate launch`.")
    processes.check_engine(accelerator)
    # Accelerate would train in float32.
    if accelerator.device.type == "cpu" and accelerator.mixed_precision == "fp16":
        raise ValueError("--mixed_precision must be no or bf16 on a CPU, got fp16")
    if accelerator.mixed_precision == "bf16":
        warn_of_bfloat16(accelerator.device, "--mixed_precision no")
    return accelerator


def check_before_start(args: PretrainArguments):
    """Check files, checkpoint and output folder, and set `resume_from_checkpoint` to a folder."""
    for file in filter(None, (args.train_file, args.validation_file)):
        check_file(file, whole=False)
    output_dir = Path(args.output_dir)
    resumed = find_checkpoint(output_dir, args.resume_from_checkpoint)
    args.resume_from_checkpoint = None if resumed is None else str(resumed)
    for folder in (output_dir, output_dir / "best"):
        check_run(folder, args.overwrite_output_dir or continues(output_dir, resumed))


def build_tokenizer(args: PretrainArguments, accelerator: Accelerator, config, texts) -> PreTrainedTokenizerBase:
    """The tokenizer of the checkpoint, the one named, or one trained on `texts`, or without texts that of DNA.

    `config` gets its special tokens. A ValueError if it has more tokens than the model, or no mask token if needed.
    """
    masked = args.objective == "mlm"
    source = args.resume_from_checkpoint or args.tokenizer_name
    if source is None:
        source = Path(args.output_dir) / "tokenizer"
        if accelerator.is_main_process:
            if texts is None:
                trained = dna_tokenizer(args.block_size)
            else:
                trained = train_tokenizer(texts, config.vocab_size, masked, args.do_lower_case)
            with new_folder(source) as folder:
                trained.save_pretrained(folder)
        accelerator.wait_for_everyone()
    tokenizer = load(AutoTokenizer, source)
    if not masked:
        tokenizer.padding_side = "left"  # as generation needs it
    if args.tokenizer_name is None and args.vocab_size is None:
        config.vocab_size = len(tokenizer)
    try:
        check_vocabulary(tokenizer, config.vocab_size)
    except ValueError as error:
        raise ValueError(f"{error} Give --vocab_size {len(tokenizer)} or another tokenizer.") from error
    if masked and tokenizer.mask_token_id is None:
        raise ValueError(f"The tokenizer must have a mask token with --objective mlm, got {source} without one")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, getattr(tokenizer, name))
    return tokenizer


def build_stream(
    args: PretrainArguments, accelerator: Accelerator, texts: datasets.Dataset, tokenizer: PreTrainedTokenizerBase,
    split: str,
) -> BlockStream:  # fmt: skip
    """The stream of the examples of a split; refuses one that is shorter than a block."""
    masked, workers = args.objective == "mlm", args.preprocessing_num_workers
    with accelerator.main_process_first():
        workers = workers_for(texts) if workers is None else workers
        blocks = pack(texts, tokenizer, args.block_size, masked, split, workers)
    if len(blocks) == 0:
        short = f"The {split} text is shorter than one block of {args.block_size} tokens"
        raise ValueError(f"{short}. Give a longer text or a smaller --block_size.")
    if split == "validation" and args.max_eval_blocks is not None:
        blocks = blocks.select(range(min(args.max_eval_blocks, len(blocks))))
    return BlockStream(blocks, tokenizer, masked, args.mlm_probability, args.seed, shuffle=split == "train")


def build_data(
    args: PretrainArguments, accelerator: Accelerator, config: PreTrainedConfig
) -> tuple[PreTrainedTokenizerBase, BlockStream | TextStream, BlockStream]:
    """The tokenizer, and the streams of training and validation examples. `config` gets the special tokens."""
    if args.streaming:
        texts, validation = open_corpus(args)
        tokenizer = build_tokenizer(args, accelerator, config, texts.first_texts())
        return tokenizer, *build_text_streams(args, accelerator, texts, validation, tokenizer)
    source, config_name = args.train_file or next(iter(args.dataset_name), None), args.dataset_config_name
    if source is not None and is_fasta(source):
        tokenizer = build_tokenizer(args, accelerator, config, None)
        return tokenizer, *build_genome_streams(args, tokenizer)
    corpus = load_corpus(source, next(iter(config_name), None), args.validation_file, args.text_column, args.documents)
    tokenizer = build_tokenizer(args, accelerator, config, corpus["train"])
    splits = ("train", "validation")
    return tokenizer, *(build_stream(args, accelerator, corpus[split], tokenizer, split) for split in splits)


def build(args: PretrainArguments, accelerator: Accelerator) -> Pretraining:
    """The run with all its parts, in the state of the checkpoint if there is one."""
    check_before_start(args)
    config = build_config(args)
    count, resumed = accelerator.num_processes, args.resume_from_checkpoint
    if args.global_batch_tokens is not None:
        costs.blocks_of_process(args, count)  # before the text is read
    saved = None if resumed is None else read_object(Path(resumed) / STATE).get("fingerprint")
    if (line := choose_schedule(args, config, saved)) is not None:
        logger.info("%s", line)
    try_schedule(args)  # before the text is read
    tokenizer, train, validation = build_data(args, accelerator, config)
    set_seed(args.seed)
    model = build_model(args, config)
    logger.info(
        f"{model.num_parameters():,} parameters; {'streamed' if args.streaming else len(train)} training and "
        f"{len(validation)} validation blocks of {args.block_size} tokens; {count} "
        f"process{'' if count == 1 else 'es'}, {accelerator.device.type}"
    )
    if args.global_batch_tokens is not None:
        logger.info("%s", costs.choose_micro_batch(args, accelerator, model))
    compile_blocks(args, accelerator, model)
    pretraining = Pretraining(args, accelerator, model, tokenizer, train, validation)
    if resumed is not None:
        pretraining.resume(Path(resumed))
        logger.info("resumed at step %d", pretraining.state.step)
        if not holds_best(Path(args.output_dir), resumed, pretraining.state.best_step):
            pretraining.state.best_loss = None
    if accelerator.is_main_process:
        remove_others(Path(args.output_dir), None if resumed is None else Path(resumed))
    return pretraining


def holds_best(output_dir: Path, resumed: str, step: int) -> bool:
    """Whether `best/` has the best model of a run that is resumed, which is that of `step`.

    It may be in another folder, and the model of a later step, which is gone, may have taken its place.
    """
    file = output_dir / "best" / "metrics.json"  # an older version wrote none
    known = read_object(file).get("steps", step) if file.is_file() else step
    return continues(output_dir, resumed) and file.parent.is_dir() and known == step


def finish(args: PretrainArguments, pretraining: Pretraining) -> dict:
    """Evaluate and save the last model; the figures of the run."""
    accelerator, state = pretraining.accelerator, pretraining.state
    device = accelerator.device
    evaluated = pretraining.is_evaluated and state.best_loss is not None  # and not in the folder of another run
    last = state.history[-1]["loss"] if evaluated else pretraining.record_evaluation()
    model = accelerator.unwrap_model(pretraining.model)
    metrics = {
        "perplexity_before": perplexity(state.loss_before),
        "perplexity": perplexity(last),
        "loss": last,
        "best_perplexity": perplexity(state.best_loss),
        "best_step": state.best_step,
        "steps": state.step,
        "tokens": state.step * pretraining.blocks_per_step * args.block_size,
        **pretraining.speed(),
        "train_seconds": state.train_seconds,
        "train_cpu_seconds": state.train_cpu_seconds,
        "parameters": model.num_parameters(),
        "processes": accelerator.num_processes,
        "distributed_type": accelerator.distributed_type.value,
        "parameters_per_process": processes.held_parameters(pretraining.model),
        "device": device.type,
        "peak_memory_gib": torch.cuda.max_memory_reserved(device) / 2**30 if device.type == "cuda" else None,
        "torch_threads": torch.get_num_threads(),
        "evaluations": state.history,
        "unstable_layers": [str(layer) for layer in find_unstable(model)],
    }
    with new_files(Path(args.output_dir), accelerator) as folder:
        pretraining.save_model(folder)
        if accelerator.is_main_process:
            write_json(folder / "metrics.json", metrics)
    return metrics


def configure_logging(accelerator: Accelerator):
    """Log important messages from one process. Without this, accelerate would log each file that it writes."""
    logging.basicConfig(format="%(message)s")
    for name in ("pretrain", "demo", "data", "runs"):
        logging.getLogger(name).setLevel(logging.INFO if accelerator.is_main_process else logging.ERROR)
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    if not accelerator.is_main_process:
        datasets.disable_progress_bars()


def train(args: PretrainArguments, accelerator: Accelerator) -> tuple[Pretraining, dict]:
    """Train to the end, or to the step of a signal; the run, and its figures."""
    pretraining = build(args, accelerator)
    if args.report_to != "none":
        options = {name: value for name, value in dataclasses.asdict(args).items() if value is not None}
        # TensorBoard takes no lists.
        settings = {name: " ".join(value) if isinstance(value, list) else value for name, value in options.items()}
        accelerator.init_trackers("modeling-tnn", config=settings)
    with pretraining.stop, processes.watching_processes():
        try:
            pretraining.run()
            return pretraining, finish(args, pretraining)
        except processes.StopRequested:
            saved = pretraining.save_progress()
            accelerator.end_training()
            logger.info("stopped by a signal at step %d.%s", pretraining.state.step, RESUME if saved else "")
            sys.exit(pretraining.stop.status)


def start(args: PretrainArguments):
    """Train and save as the options say, and log what is next."""
    metrics, source = run(args), args.train_file or next(iter(args.dataset_name), None)
    is_genome = source is not None and is_fasta(source)
    kind = "causal" if args.objective == "clm" else "dna" if is_genome else "masked"
    options = {"prompt": START_OF_GENE} if is_genome else {}
    logger.info("%s", next_steps(args.output_dir, kind, metrics["unstable_layers"], **options))


def run(args: PretrainArguments) -> dict:
    """Do the work of `start`; the figures of the run."""
    with contextlib.ExitStack() as held:
        try:
            accelerator = build_accelerator(args)
            configure_logging(accelerator)
            held.enter_context(claim(Path(args.output_dir), main=accelerator.is_main_process))
            accelerator.wait_for_everyone()
            pretraining, metrics = train(args, accelerator)
            accelerator.end_training()
            logger.info(REPORT.format(**metrics, folder=args.output_dir))
        except (OSError, MemoryExceededError, SavingError, processes.LostProcessError) as error:
            if not checkpoints(Path(args.output_dir)):
                raise
            sys.exit(f"error: {error}{RESUME}")
    # A process group that lives longer than the model sometimes aborts at exit.
    del pretraining
    gc.collect()
    return metrics
