"""HyenaDNA against the released implementation: hidden states, filters and gradients of the converted model."""

import torch

from helpers.parity import Case, named_cases, over
from tnn_scripts.original.conversion import convert
from tnn_scripts.original.hyenadna import layout


def released_state(case: Case) -> dict[str, torch.Tensor]:
    return {key.removeprefix("param/"): one for key, one in case.tensors.items() if key.startswith("param/")}


@over(named_cases("hyenadna"))
def test_model(case: Case):
    model, report = convert(released_state(case), case.hparams | case.hparams["layer"], "hyenadna")
    model = model.to(case.dtype)
    states = model.model(case.ids("ids")).last_hidden_state
    case.check(states, case.output())
    operator = model.model.layers[0].mixer.tno
    taps = operator.coefficients(states.shape[1]).t()  # (L, d)
    taps = torch.cat([taps[:1] - operator.direct, taps[1:]])
    case.check(taps, case.output("filter_of_layer_0"))
    if case.dtype == torch.float64:
        (states * case.get("in/w")).sum().backward()
        check_gradients(case, dict(model.named_parameters()), report["tensors"])


def check_gradients(case: Case, parameters: dict, names: dict[str, str]):
    """Of the filters, long and short. Those that are a millionth of the largest relative to that, see `Case`."""
    start = f"{case.tag}/grad64/param/"
    stored = {key.removeprefix(start): one for key, one in case.tensors.items() if key.startswith(start)}
    largest = max(one.abs().max().item() for one in stored.values())
    for official, expected in stored.items():
        scale = max(1e-6 * largest, expected.abs().max().item())
        case.check(parameters[names[official]].grad, layout(names[official], expected), scale=scale)
