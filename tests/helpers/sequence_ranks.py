"""The processes of `tests/unit/test_sequence_parallel.py`: a text divided over them beside the same text in each."""

import copy
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import DynamicCache

from helpers import ranks
from helpers.models import CAUSAL, VARIANTS, checkpoint_activations, relative_error, seeded, tiny_config
from modeling_tnn import SequenceParallel, TnnForCausalLM, TnnForMaskedLM, TnnForSequenceClassification

LENGTH = 23


def ids(rows: int = 2, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, 99, (rows, length), generator=torch.Generator().manual_seed(length))


def padding() -> dict[str, torch.Tensor]:
    """On the left, over the whole share of a process, and on the right; one row has a hole."""
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :13], mask[1, -3:], mask[1, 4] = 0, 0, 0
    return {"attention_mask": mask}


def packed() -> dict[str, torch.Tensor]:
    """Documents that begin and end within the share of a process, and one that goes over several."""
    lengths = [[3, 15, 5], [8, 1, 14]]
    return {"position_ids": torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])}


TEXTS = {"plain": dict, "padded": padding, "packed": packed, "packed and padded": lambda: padding() | packed()}
# Operator, direction, fields of the configuration, and the text.
CASES = {
    f"{name}-{'causal' if causal else 'bidirectional'} {text}": (name, causal, {}, TEXTS[text])
    for name, causal in VARIANTS
    for text in ("padded", "packed and padded")
}
SINUSOIDAL = {"position_embedding": "sinusoidal", "gtu_norm": True, "norm_type": "layernorm"}
CASES |= {f"sinusoidal {text}": ("rpe", True, SINUSOIDAL, given) for text, given in TEXTS.items()}
CASES |= {"rpe-causal plain": ("rpe", True, {}, dict)}
CASES |= {"uneven channels": ("rtf", False, {"gtu_expansion": 1.72, "rtf_num_denominators": 1}, padding)}
CASES |= {"decays": ("rpe", True, {"learnable_decay": True, "norm_position": "post", "use_glu": False}, dict)}
CASES |= {"eager": ("fd", False, {"tno_implementation": "eager"}, padding)}
CASES |= {"groups": ("s4d", True, {"num_filter_groups": 8}, TEXTS["packed and padded"])}
CASES |= {"two axes": ("rpe", False, {"spatial_dims": 2, "max_position_embeddings": 16}, dict)}

USUAL = [
    "rpe-causal packed and padded",
    "s4d-causal packed and padded",
    "ski-bidirectional padded",
    "sinusoidal packed",
]
USUAL += ["uneven channels", "groups", "two axes"]


def build(tno_type: str, causal: bool, fields: dict):
    head = TnnForCausalLM if causal else TnnForMaskedLM
    model = seeded(head, tiny_config(tno_type, causal, hidden_dropout_prob=0.0, eos_token_id=None, **fields)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def divided(model) -> SequenceParallel:
    return SequenceParallel(model, init_device_mesh("cpu", (dist.get_world_size(),)))


def gradients(model) -> dict[str, torch.Tensor]:
    found = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    model.zero_grad()
    return found


def compare(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    pairs = ((found[name], expected[name]) for name in expected)
    return ranks.worst([relative_error(one, two, scale=two.abs().max().item() + 1e-9) for one, two in pairs])


def labels_of(text: torch.Tensor) -> torch.Tensor:
    """Few in the first share; the last token of the share of one of two processes has that of the other's first."""
    labels = text.clone()
    labels[:, 2:12] = -100
    return labels


def check(tno_type: str, causal: bool, fields: dict, given) -> dict:
    """The errors of the loss, of the logits of all tokens, and of all gradients."""
    model, text = build(tno_type, causal, fields), ids(length=16 if "spatial_dims" in fields else LENGTH)
    given = given() | {"input_ids": text, "labels": labels_of(text), "use_cache": False}
    real = given.get("attention_mask", torch.ones_like(text)).bool()
    expected = model(**given).logits
    model.train()
    model.config.skip_logits = True  # the loss of the logits is in float32
    wanted_loss = model(**given).loss
    wanted_loss.backward()
    wanted = gradients(model)
    with divided(model) as parallel:
        loss = model(**given).loss
        loss.backward()
        parallel.add_gradients()
        model.eval()
        logits = parallel.gather(model(**given).logits, text.shape[1])
    assert not any({"local_operator", "sequence_parallel"} & vars(module).keys() for module in model.modules())
    assert not model._forward_hooks and not model._forward_pre_hooks
    return {
        "loss": ranks.worst([abs(loss.item() - wanted_loss.item())]),
        "logits": relative_error(logits[real], expected[real]),
        "gradients": compare(gradients(model), wanted),
    }


def train(mixed: bool = False) -> dict:
    """Accumulation, activations that are computed again, and two forward passes before their backward passes.

    In float32 or mixed precision.
    """
    model = build("rpe", True, {}).float().train()
    twin = copy.deepcopy(model)
    losses = []
    for one in (model, twin):
        checkpoint_activations(one)
        with divided(one) if one is model else torch.enable_grad() as parallel:
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                    first = one(input_ids=ids(), labels=ids(), **padding()).loss
                    second = one(input_ids=ids().flip(1), labels=ids().flip(1), **packed()).loss
                (first + second).backward()
            if one is model:
                parallel.add_gradients()
            losses.append((first + second).item())
    return {"loss": abs(losses[0] - losses[1]), "gradients": compare(gradients(model), gradients(twin))}


def engines() -> dict:
    """DDP and FSDP2 over the same processes, which average gradients, twice."""
    found = {}
    for name, wrap in {"DDP": DistributedDataParallel, "FSDP2": sharded}.items():
        model = build("rtf", True, {}).train()
        given = {"input_ids": ids(), "labels": ids()} | padding()
        model(**given).loss.backward()
        wanted = gradients(model)
        wrapped = wrap(model)
        with divided(model):
            for _ in range(2):
                model.zero_grad()
                (wrapped(**given).loss * dist.get_world_size()).backward()
        found[name] = compare({key: ranks.whole(one) for key, one in gradients(model).items()}, wanted)
    return found


def sharded(model):
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def generate(names: list[str]) -> dict:
    """A prompt that is divided, and tokens after it, with these operators; a text in pieces; short texts.

    Three tokens of two documents are fewer than four processes.
    """
    found = {}
    prompt, mask = ids(), torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :7] = 0
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    for name in names:
        model = build(name, True, {})
        expected = [
            model.generate(prompt, **options),
            model.generate(prompt[:, :1], max_new_tokens=6, do_sample=False),
        ]
        pieces = model(prompt, attention_mask=mask).logits
        short = {"input_ids": prompt[:, :3], "position_ids": torch.tensor([[0, 0, 1]] * 2)}
        documents = model(**short).logits
        with divided(model) as parallel, torch.no_grad():
            static = model.generate(prompt, cache_implementation="static", **options)
            same = [torch.equal(model.generate(prompt, **options), expected[0]), torch.equal(static, expected[0])]
            same.append(torch.equal(model.generate(prompt[:, :1], max_new_tokens=6, do_sample=False), expected[1]))
            cache = DynamicCache(config=model.config)
            parts = [
                parallel.gather(model(prompt[:, :12], attention_mask=mask[:, :12], past_key_values=cache).logits, 12)
            ]
            parts += [model(prompt[:, 12:], attention_mask=mask, past_key_values=cache).logits]
            last = model(prompt, attention_mask=mask, logits_to_keep=9).logits
            packed_logits = model(**short).logits
            if packed_logits.shape[1] < 3:
                packed_logits = parallel.gather(packed_logits, 3)
            channels = cache.layers[0].states["tno"].history.buffer.shape[1]
        found[name] = {
            "same": same,
            "pieces": relative_error(torch.cat(parts, dim=1)[mask.bool()], pieces[mask.bool()]),
            "last": relative_error(last, pieces[:, -9:]),
            "documents": relative_error(packed_logits, documents),
            "channels": channels,
        }
    return found


def count() -> dict:
    """The numbers that a process sends in the forward and the backward pass of a model of two layers."""
    model, text, calls = build("rpe", True, {}).train(), ids(length=32), []
    original = dist.all_to_all_single

    def counted(received, sent, wanted, sizes, group):
        calls.append((sent.numel(), sent.numel() - sizes[dist.get_rank()]))
        return original(received, sent, wanted, sizes, group=group)

    with divided(model), patch.object(dist, "all_to_all_single", counted):
        loss = model(input_ids=text, labels=text).loss
        forward = len(calls)
        loss.backward()
    sent, others = map(sum, zip(*calls, strict=True))
    return {"exchanges": [forward, len(calls) - forward], "sent": sent, "to others": others}


def refuse() -> dict:
    """What cannot be divided, by every process alike."""

    def message(action) -> str:
        try:
            action()
        except (TypeError, ValueError) as error:
            return str(error)
        return ""

    model, batch = build("rpe", True, {}), build("rpe", True, {"norm_type": "batchnorm"})
    found = {
        "class": message(lambda: divided(TnnForSequenceClassification(tiny_config()))),
        "channels": message(lambda: divided(build("rpe", True, {"gtu_expansion": 1 / 32}))),
    }
    with divided(batch), torch.no_grad():
        found["batch norm, evaluated"] = message(lambda: batch(ids()))
        found["batch norm"] = message(lambda: batch.train()(ids()))
    with divided(model):
        return found | {
            "twice": message(lambda: divided(model)),
            "short": message(lambda: model(ids()[:, :1])),
            "misspelt": message(lambda: model(ids(), atention_mask=ids())),
            "labels": message(lambda: model(ids(), labels=ids()[:, 1:])),
            "last": message(lambda: model(ids(), logits_to_keep=1)),
            "cache": message(lambda: model(ids(), use_cache=True, **packed())),
            "tuple": str(type(model(ids(), return_dict=False)).__name__),
        }


def cases(slow: bool) -> dict:
    """The cases of `make test`, or all."""
    names = CASES.keys() if slow else USUAL
    others = {"generate": partial(generate, CAUSAL if slow else ["rtf"]), "count": count}
    others |= {"train": train, "refuse": refuse}
    others |= {"train mixed": partial(train, mixed=True), "engines": engines} if slow else {}
    return {name: partial(check, *CASES[name]) for name in names} | others
