"""A saved model proves itself when it is loaded: each block gives what it gave when the folder was written.

    s(X) = ( |X|, p_1 .. p_K ),    p_k = sum_ij a_k(i) X_ij b_k(j),    a_k(i) = 2^0.5 cos(k 2^0.5 i^2), b_k with 3^0.5

`save_pretrained` runs the weights that it has written in float64 on the CPU, one block at a time, and writes the
summary s of each hidden state to `self_check.json`. A relative error e of X changes each p by about e |X|.
"""

import copy
import json
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import cached_file, logging

from .numerics import must_be_eager

logger = logging.get_logger(__name__)

FILE, SWITCH = "self_check.json", "TNN_SELF_CHECK"
# Parameters of the largest model that is checked when it is loaded, in less than a second: 190 million take 0.7 (rpe)
# to 1.0 (rtf) seconds of one core. A larger one is checked at its first pass in evaluation.
AT_LOAD = 2**27
# Relative differences that are a warning, and an error. Where loading has rounded the weights they count in units of
# the dtype's precision, and `OF_HEAD` times more for the few numbers that a head gives (measured: up to 1.4, and 37).
EXACT, ROUNDED, OF_HEAD = (1e-9, 1e-7), (10, 60), 10
# Arguments of `from_pretrained`: where files are, and that say that the weights are not those of the folder.
LOCATION = ("cache_dir", "local_files_only", "token", "revision", "subfolder")
OTHER_WEIGHTS = ("state_dict", "gguf_file", "variant", "ignore_mismatched_sizes")
# Fields that do not change what a model gives when it is evaluated.
NEUTRAL = {"use_cache", "tno_implementation", "tno_class", "hidden_dropout_prob", "attention_dropout", "initializer"}
NEUTRAL |= {"classifier_dropout", "initializer_range", "bos_token_id", "pad_token_id", "eos_token_id", "auto_map"}


class SelfCheckError(ValueError):
    """The error for a loaded model that does not give what it gave when it was saved."""


def summarize(x: torch.Tensor) -> list[float]:
    """The norm of `x` `(..., N, d)` and its projections."""
    x = x.reshape(-1, x.shape[-1]).double()
    k = torch.arange(1.0, 5, dtype=x.dtype)[:, None]  # (K, 1)
    a, b = (
        2**0.5 * torch.cos(k * c**0.5 * torch.arange(n, dtype=x.dtype) ** 2)
        for c, n in zip((2, 3), x.shape, strict=True)
    )
    return [float(f"{value:.11g}") for value in (x.norm(), *((a @ x) * b).sum(1))]


def inputs_of(config, name: str, length: int) -> torch.Tensor:
    """Tokens `(1, L)` or values for the argument `name` of a model."""
    shapes = {"input_ids": (length,), "pixel_values": (config.num_channels, config.image_size, config.image_size)}
    shape = (1, *shapes.get(name, (length, config.input_channels or 1)))
    count = torch.arange(math.prod(shape)).view(shape) ** 2
    return count * 7919 % config.vocab_size if name == "input_ids" else torch.cos(count.double())


@torch.no_grad()
def summaries(model_class: type, config, find: Callable[[str], torch.Tensor], length: int, head: bool) -> dict:
    """The summaries by name, in the order of the model. `find` gives the tensor of a name."""
    config = copy.deepcopy(config)
    config.use_cache, config._attn_implementation = False, "sdpa"
    config.tno_implementation = config.tno_implementation.replace("triton", "auto")
    with torch.device("meta"):
        model = model_class(config).eval()
    body, found, wide = model.base_model, {}, {}
    prefix = "" if body is model else f"{model.base_model_prefix}."

    def widen(name, tensor):
        if not tensor.is_floating_point():
            return tensor
        # Layers share the tensors of these names and shapes: new memory takes ten times as long as the copy.
        return wide.setdefault((name, tensor.shape), torch.empty_like(tensor, dtype=torch.double)).copy_(tensor)

    def fill(module, prefix, left_out=()):
        names = [name for name in module.state_dict() if not name.startswith(left_out)]
        tensors = {name: widen(f"{module is body}{name}", find(prefix + name)) for name in names}
        module.load_state_dict(tensors, strict=False, assign=True)

    def enter(layer, inputs, name):
        found.setdefault("embeddings", summarize(inputs[0]))
        fill(layer, f"{prefix}{name}.")

    def leave(layer, inputs, output, name):
        found[name] = summarize(output)

    for index, layer in enumerate(body.layers):
        layer.register_forward_pre_hook(partial(enter, name=f"layers.{index}"))
        layer.register_forward_hook(partial(leave, name=f"layers.{index}"))
    fill(body, prefix, ("layers.",))
    if getattr(body, "rotary", None) is not None:  # its frequencies are in no file
        body.rotary = type(body.rotary)(config)
    if getattr(body, "embed_tokens", None) is not None:  # all rows, of which the tokens are few
        found["embed_tokens"] = summarize(body.embed_tokens.weight)
    name, padded = body.main_input_name, torch.arange(length)[None] >= length // 8
    mask = {} if name == "pixel_values" else {"attention_mask": padded}
    states = body(**{name: inputs_of(config, name, length)}, **mask).last_hidden_state  # (1, L, d)
    found["norm"] = summarize(states)
    if head and model is not body:
        fill(model, "", (prefix, *model.all_tied_weights_keys))
        model.tie_weights()
        found |= summaries_of_head(model, states, length)
    return found


def summaries_of_head(model, states: torch.Tensor, length: int) -> dict:
    """Those of what a head gives for the body's `states` `(1, L, d)`, given twice to a head that compares texts."""
    inputs = inputs_of(model.config, model.main_input_name, length)
    if any(word in type(model).__name__ for word in ("MultipleChoice", "Pair")):
        inputs, states = torch.stack([inputs, inputs], dim=1), states.expand(2, -1, -1)
    model.base_model.forward = lambda *_, **__: BaseModelOutput(last_hidden_state=states)
    outputs = model(**{model.main_input_name: inputs})
    return {name: summarize(one) for name, one in outputs.items() if isinstance(one, torch.Tensor)}


def check_loaded(model, source, options: dict):
    """Check a model that `from_pretrained(source, **options)` has loaded, unless its folder has no summaries."""
    where = {name: options[name] for name in LOCATION if options.get(name)}
    kept = dict.fromkeys(("_raise_exceptions_for_missing_entries", "_raise_exceptions_for_connection_errors"), False)
    if source is None or os.environ.get(SWITCH) == "0" or (path := cached_file(source, FILE, **kept, **where)) is None:
        return

    def read():
        fields = type(model.config).from_pretrained(source, **where).to_dict()
        fields |= dict.fromkeys((name for name in OTHER_WEIGHTS if options.get(name) not in (None, False)), ...)
        return json.loads(Path(path).read_bytes()), fields, None

    check(model, source, read)


def check(model, source, read: Callable[[], tuple]):
    """Compare a model with the summaries in its folder, at its first pass if it is large, unless it is another now.

    `read` gives the summaries, the fields of the folder's configuration, and at the first pass the `fingerprints` at
    loading. What keeps a model from being checked is a warning.
    """
    try:
        saved, fields, loaded = read()
        mine, names = model.config.to_dict(), fields.keys() - PreTrainedConfig().to_dict().keys() - NEUTRAL
        chosen = sorted(name for name in names if mine.get(name) != fields[name])
        plain = all(type(one) is torch.nn.Parameter and not one.is_meta for one in model.parameters())
        if chosen:
            reason = f"the caller has chosen {', '.join(chosen)}"
        elif not plain or getattr(model, "hf_quantizer", None) is not None:
            reason = "weights are quantized or elsewhere"
        elif loaded is not None and loaded != fingerprints(model):
            reason = "its weights have changed since it was loaded"
        elif loaded is None and model.num_parameters() > AT_LOAD:
            read = partial(tuple, (saved, fields, fingerprints(model)))  # unlike a closure it can be pickled
            return model.register_forward_pre_hook(partial(check_first_pass, source=source, read=read))
        else:
            return compare(model, source, saved)
        logger.warning("%s was not checked: %s", source, reason)
    except SelfCheckError:
        raise
    except Exception as error:  # a file of another form, or a user's class
        logger.warning("%s was not checked: %r", source, error)


def fingerprints(model) -> dict[str, tuple[int, int]]:
    """How often each tensor was changed in place, and the sum of its bits: both are the same on another device."""
    whole, found = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}, {}
    for name, one in model.state_dict().items():
        dtype, changes = whole[one.element_size()], 0 if one.is_inference() else one._version
        found[name] = changes, one.view(dtype).sum(dtype=dtype).item()
    return found


def check_first_pass(model, _, source, read):
    """Check a model before its first pass in evaluation: a forward pre-hook that removes itself unless it raises.

    It waits while a graph is recorded or captured. The files are checked, not weights that training, casts, adapters,
    quantizers or others have changed since, in place or not. A model that was moved or deep-copied is checked.
    """
    captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if model.training or must_be_eager() or captured:
        return
    if os.environ.get(SWITCH) != "0":
        check(model, source, read)
    hooks = model._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if getattr(hook, "func", None) is check_first_pass]:
        del hooks[key]


def compare(model, source, saved: dict):
    """Raise a SelfCheckError, or warn, that names the first part of a model that differs from its folder."""
    state, head = model.state_dict(), saved["class"] == type(model).__name__
    length = min(saved["length"], 256)
    with torch.device("cpu"):
        found = summaries(type(model), model.config, lambda name: state[name].cpu(), length, head)
    errors = {name: relative_error(one, saved["blocks"][name]) for name, one in found.items()}
    doubtful, wrong = EXACT
    if torch.promote_types(model.dtype, getattr(torch, saved["dtype"])) != model.dtype:
        doubtful, wrong = (factor * torch.finfo(model.dtype).eps for factor in ROUNDED)
        hidden = ("embed", "layers", "norm")
        errors = {name: one if name.startswith(hidden) else one / OF_HEAD for name, one in errors.items()}
    name = next((one for limit in (wrong, doubtful) for one in errors if not errors[one] <= limit), None)
    if name is None:
        return
    message = (
        f"{source} does not give what it gave when it was saved: `{name}` differs first, by {errors[name]:.1g} of its "
        f"size, where rounding explains {doubtful:.0e}. Its weights, configuration or code have changed, or were not "
        f"loaded. Use it nevertheless with self_check=False or {SWITCH}=0. If you changed it, remove {FILE}."
    )
    if not errors[name] <= wrong:
        raise SelfCheckError(message)
    logger.warning(message)


def relative_error(found: list[float], saved: list[float]) -> float:
    """The largest difference of two summaries over the norm of the saved one; infinite unless that is a number."""
    worst = max(abs(one - other) for one, other in zip(found, saved, strict=True))
    return 0.0 if found == saved else worst / abs(saved[0]) if saved[0] and math.isfinite(worst) else math.inf
