"""The processes of `tests/unit/test_tensor_parallel.py`: a model divided over them beside the same model in each."""

import json
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from helpers import ranks
from helpers.hybrids import HYBRIDS
from helpers.mixers import MIXED
from helpers.models import CAUSAL, VARIANTS, checkpoint_activations, image_config, relative_error, seeded, tiny_config
from modeling_tnn import (
    TnnForAudioClassification,
    TnnForCausalLM,
    TnnForImageClassification,
    TnnForMaskedLM,
    TnnForSequenceClassification,
    TnnForTimeSeriesPrediction,
)

NORMS = ("simplermsnorm", "rmsnorm", "gatedrmsnorm", "scalenorm", "layernorm")
# Operator, direction and fields.
ALL = {f"{name}-{'causal' if causal else 'bidirectional'}": (name, causal, {}) for name, causal in VARIANTS}
CASES = {name: ALL[name] for name in ("rpe-causal", "rtf-bidirectional")}
CASES |= {"one denominator": ("rtf", True, {"rtf_num_denominators": 1}), "s4": ("rtf", True, MIXED["s4"])}
SLOW = {name: case for name, case in ALL.items() if name not in CASES}
SLOW |= {"hyena": ("rtf", True, MIXED["hyena"]), "multihyena": ("rtf", True, MIXED["multihyena"])}
SLOW |= {
    "groups": ("fd", True, {"num_filter_groups": 16}),
    "groups s4": ("rtf", False, MIXED["s4"] | {"num_filter_groups": 8}),
}
SLOW |= {"hyena norm": ("hyena", False, {"toeplitz_mixer": "hyena", "hyena_norm": True})}
# The heads are divided too.
SLOW |= {"hybrid": ("rpe", True, HYBRIDS["full"] | {"num_key_value_heads": 4})}
LAYERS = HYBRIDS["layers"] | {"num_key_value_heads": 4}
SLOW |= {"layers": ("rpe", True, LAYERS)}
SLOW |= {f"gtu_norm {norm}": ("rpe", True, {"gtu_norm": True, "norm_type": norm}) for norm in NORMS}
# Widths that two and four processes do not divide: transformers 5.17 refuses them.
UNEVEN = {"gtu_expansion": 1.72, "intermediate_size": 39, "vocab_size": 99}
SLOW |= {"uneven": ("rpe", True, UNEVEN | {"learnable_decay": True}), "uneven fd": ("fd", False, UNEVEN)}
SLOW |= {"uneven rtf": ("rtf", False, UNEVEN | {"rtf_num_denominators": None})}
SLOW |= {"uneven hyena": ("hyena", True, UNEVEN | MIXED["hyena"])}
SLOW |= {"two denominators": ("rtf", False, {"rtf_num_denominators": 2})}
SLOW |= {"no glu": ("rpe", True, {"use_glu": False}), "untied": ("rpe", True, {"tie_word_embeddings": False})}
SLOW |= {"two axes": ("rpe", False, {"spatial_dims": 2, "max_position_embeddings": 16})}


def inputs(two_axes: bool) -> dict[str, torch.Tensor]:
    """A text with padding on the left, and one with padding on the right; images have none."""
    ids = torch.randint(3, 99, (2, 16), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :3], mask[1, -2:] = two_axes, two_axes
    return {"input_ids": ids, "attention_mask": mask}


def save(tno_type: str, causal: bool, fields: dict, dtype: torch.dtype = torch.float64):
    """A language model in this process, and the folder that rank 0 has saved it to."""
    head = TnnForCausalLM if causal else TnnForMaskedLM
    options = {"vocab_size": 100, "hidden_dropout_prob": 0.0, "eos_token_id": None} | fields
    model = seeded(head, tiny_config(tno_type, causal, **options)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model, saved(model)


def saved(model) -> Path:
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names, 0)
    if dist.get_rank() == 0:
        model.save_pretrained(names[0])
    dist.barrier()
    return Path(names[0])


def build(tno_type: str, causal: bool, fields: dict, dtype: torch.dtype = torch.float64):
    """A model in this process, the folder that rank 0 has saved it to, and the model divided over all processes."""
    model, folder = save(tno_type, causal, fields, dtype)
    config = DistributedConfig(tp_plan="auto")
    return model, folder, type(model).from_pretrained(folder, distributed_config=config, dtype=dtype)


def gradient_error(divided, model) -> float:
    own = dict(divided.named_parameters())
    errors = []
    for name, parameter in model.named_parameters():
        found = ranks.whole(own[name].grad)
        errors.append(relative_error(found, parameter.grad, scale=parameter.grad.abs().max().item() + 1e-6))
    return max(errors)


def check(tno_type: str, causal: bool, fields: dict) -> dict:
    """The errors of a forward and a backward pass, of generated tokens, and of the folder that is saved."""
    model, folder, divided = build(tno_type, causal, fields)
    given = inputs("spatial_dims" in fields)
    real = given["attention_mask"].bool()
    logits = [one(**given).logits[real] for one in (divided, model)]
    found = {"logits": ranks.worst([relative_error(*logits)])}
    weights = torch.randn(logits[0].shape, generator=torch.Generator().manual_seed(1))
    for one in logits:
        (one * weights).sum().backward()
    found["gradients"] = ranks.worst([gradient_error(divided, model)])
    operator = divided.model.layers[0].mixer.tno
    local = operator.local_operator() if operator.local_operator else operator
    found["channels"] = sum(gathered(local.channels))
    found["replicated"] = replicated(operator)
    found["replicated of the mixer"] = [one for one in replicated(divided.model.layers[0].mixer) if "tno." not in one]
    if causal:
        found["generated"] = generates_the_same(divided, model, every_cache=tno_type == "rpe" and not fields)
    found["saved"] = saves_the_same(divided, model, folder)
    return found


def replicated(module) -> list[str]:
    """The names of the parameters that every process has as a whole."""
    return sorted(name for name, parameter in module.named_parameters() if not isinstance(parameter, DTensor))


def gathered(value) -> list:
    """The values of all processes."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def generates_the_same(divided, model, every_cache: bool) -> list[bool]:
    """For two prompts with padding on the left, with the usual cache or with each."""
    given = inputs(False) | {"max_new_tokens": 7, "do_sample": False}
    given["attention_mask"][1] = 1
    expected = model.generate(**given)
    caches = ({}, {"cache_implementation": "static"}, {"use_cache": False})[: None if every_cache else 1]
    return [torch.equal(divided.generate(**given, **cache), expected) for cache in caches]


def saves_the_same(divided, model, folder: Path) -> bool:
    """Whether the folder that all processes save is the one that a single process has saved."""
    again = folder / "again"
    divided.save_pretrained(again)
    dist.barrier()
    files = {file.name for file in folder.iterdir() if file.is_file()}
    same = {file.name for file in again.iterdir()} == files
    same &= json.loads((again / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
    loaded = type(model).from_pretrained(again).state_dict()
    return same and all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())


def train(mixed: bool = False, steps: int = 3) -> dict:
    """Steps with accumulation and with activations that are computed again, in float32 or mixed precision."""
    model, _, divided = build("rtf", True, {"rtf_num_denominators": 1}, torch.float32)
    ids = inputs(False)["input_ids"]
    checkpoint_activations(divided)
    losses = []
    for one in (divided, model):
        one.train()
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1, foreach=False)
        for _ in range(steps):
            for batch in (ids, ids.flip(1)):
                with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                    loss = one(batch, labels=batch).loss
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    own = dict(divided.named_parameters())
    return {
        "loss": abs(losses[0] - losses[1]),
        "weights": ranks.worst([relative_error(ranks.whole(own[n]), p) for n, p in model.named_parameters()]),
    }


def pipeline(names: list[str]) -> dict:
    """The layers divided over the processes: logits, and generated tokens after padding, of these operators."""
    found = {}
    fields = {"num_hidden_layers": 5, "position_embedding": "sinusoidal", "embedding_norm": True}
    config = DistributedConfig(pp_size=dist.get_world_size())
    for name in names:
        model, folder = save(name, True, fields)
        divided = TnnForCausalLM.from_pretrained(folder, distributed_config=config, dtype=torch.float64)
        given = inputs(False)
        given["attention_mask"][1] = 1
        real = given["attention_mask"].bool()
        with torch.no_grad():
            error = relative_error(divided(**given).logits[real], model(**given).logits[real])
        tokens = [one.generate(**given, max_new_tokens=6, do_sample=False) for one in (divided, model)]
        found[name] = {"logits": ranks.worst([error]), "same": all(gathered(torch.equal(*tokens)))}
    _, folder = save("rpe", True, {"num_hidden_layers": 1})
    refused = ""
    try:
        TnnForCausalLM.from_pretrained(folder, distributed_config=config)
    except ValueError as error:
        refused = str(error)
    return {"stages": found, "refused": gathered(refused), "values": gathered(values_in_a_pipeline(config))}


def values_in_a_pipeline(config: DistributedConfig) -> str:
    """The error of a model of real values."""
    model = seeded(TnnForAudioClassification, tiny_config(input_channels=1))
    try:
        TnnForAudioClassification.from_pretrained(saved(model), distributed_config=config)
    except ValueError as error:
        return str(error)


def heads() -> dict:
    """The logits and the gradients of heads that are not divided themselves."""
    found, labels = {}, {"labels": torch.tensor([0, 1])}
    pixels = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values, series = pixels.flatten(2).mT, {"input_channels": 3, "prediction_length": 5}
    for head, config, given in (
        (TnnForSequenceClassification, tiny_config(vocab_size=100, hidden_dropout_prob=0.0), inputs(False) | labels),
        (TnnForSequenceClassification, tiny_config("ski", False, vocab_size=100), inputs(False) | labels),
        (TnnForImageClassification, image_config(), {"pixel_values": pixels} | labels),
        (
            TnnForAudioClassification,
            tiny_config("s4d", False, input_channels=1),
            {"input_values": values[..., 0]} | labels,
        ),
        (TnnForTimeSeriesPrediction, tiny_config(**series), {"past_values": values, "future_values": values[:, :5]}),
    ):
        model = seeded(head, config).double()
        distributed = DistributedConfig(tp_plan="auto")
        divided = head.from_pretrained(saved(model), distributed_config=distributed, dtype=torch.float64)
        outputs = [one(**given)[:2] for one in (divided, model)]
        for loss, _ in outputs:
            loss.backward()
        error = ranks.worst([relative_error(outputs[0][1], outputs[1][1])])
        found[f"{head.__name__} {config.tno_type}"] = {"logits": error, "gradients": gradient_error(divided, model)}
    return found


def refuse() -> dict:
    """The messages for too few channels, and for an operator that does not say which parameters belong to them."""
    errors, operator = {}, TnnForCausalLM(tiny_config()).model.layers[0].mixer.tno.__class__
    known = operator.channel_parameters
    for name, fields, parameters in (("channels", {"gtu_expansion": 1 / 32}, known), ("unknown", {}, None)):
        try:
            operator.channel_parameters = parameters
            build("rpe", True, fields)
        except ValueError as error:
            errors[name] = str(error)
        finally:
            operator.channel_parameters = known
    return errors


def cases(slow: bool) -> dict:
    """The cases of `make test`, or all."""
    chosen = CASES | (SLOW if slow else {})
    others = {"train": partial(train, steps=3 if slow else 1)}
    others |= {"pipeline": partial(pipeline, CAUSAL if slow else ["rpe"]), "refuse": refuse}
    others |= {"heads": heads, "train mixed": partial(train, mixed=True)} if slow else {}
    return {name: partial(check, *case) for name, case in chosen.items()} | others
