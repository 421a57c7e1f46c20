"""Parity with the released implementations: norms, position encoder, RPE and FD operators, GTU, GLU and blocks."""

from types import SimpleNamespace

import torch
from torch.nn import functional

from helpers.parity import Case, block_config, merge_heads, named_cases, operator_config, over
from modeling_tnn.mixers import TnnGatedToeplitzUnit
from modeling_tnn.modeling_tnn import TnnBlock, TnnGatedLinearUnit
from modeling_tnn.norms import NORM_TYPES
from modeling_tnn.tno_fd import FdOperator
from modeling_tnn.tno_rpe import RelativePositionEncoder, RpeOperator
from modeling_tnn.toeplitz import causal_toeplitz_matmul, toeplitz_matmul
from tnn_scripts.original.names import heads_together

KERNEL_ACTIVATIONS = {
    "none": lambda t: t,
    "relu": functional.relu,
    "silu": functional.silu,
    "1+elu": lambda t: 1 + functional.elu(t),
}


def compare(case: Case, module: torch.nn.Module, forward, x: torch.Tensor, record):
    """Values, and gradients where the case has them."""
    x = x.clone().requires_grad_()
    y = forward(x)
    case.check(y, case.output(), record)
    if case.get("in/w") is not None:
        (y * case.input("w")).sum().backward()
        case.check_gradients(module, x, record)


@over(named_cases("norm"))
def test_norm(name, tag, dtype, record_property):
    case = Case(name, tag, dtype)
    norm = case.load(NORM_TYPES[case.hparams["norm_type"]](case.hparams["dim"]))
    compare(case, norm, norm, case.input("x"), record_property)


def values(encoder: RelativePositionEncoder, positions: torch.Tensor) -> torch.Tensor:
    """The values `(D, M)` at the `positions` `(M,)`."""
    return encoder.emit(encoder.features(positions), torch.ones_like(positions))


@over(named_cases("rpe"))
def test_relative_position_encoder(name, tag, dtype, record_property):
    case = Case(name, tag, dtype)
    hparams = case.hparams
    encoder = case.load(
        RelativePositionEncoder(
            SimpleNamespace(
                rpe_dim=hparams["dim"],
                rpe_layers=hparams["layers"],
                encoder_norm_type=hparams["norm_type"],
                rpe_residual=hparams.get("residual", False),
                rpe_hidden_norm=True,
            ),
            hparams["outdim"],
            hparams["act"],
        )
    )
    positions = case.input("pos").clone().requires_grad_()
    y = values(encoder, positions[:, 0]).t()
    case.check(y, case.output(), record_property)
    (y * case.input("w")).sum().backward()
    case.check_gradients(encoder, positions, record_property)


def rpe_operator(case: Case) -> RpeOperator:
    learned = case.hparams.get("use_multi_decay", False)
    config = operator_config(
        case,
        "rpe",
        rpe_act=case.hparams.get("act", "relu"),
        decay=case.hparams["gamma"] if learned else case.fixed_decay(),
        learnable_decay=learned,
    )
    return case.load(RpeOperator(config))


def released_product(operator: RpeOperator, case: Case, v: torch.Tensor) -> torch.Tensor:
    """The options of the released operator that are no flags here, built from the public parts.

    `par_type` 2 and 3 (lags over n - 1, exponential of that), `act_type` (an activation of the coefficients after
    the decay), `normalize` (division by the row sums).
    """
    length = v.shape[1]
    coefficients = operator.coefficients(length)
    if (par_type := case.hparams.get("par_type", 1)) != 1:
        lags = torch.arange(0 if operator.causal else 1 - length, length, dtype=v.dtype)
        positions = lags / (length - 1)
        decay = operator.decay if operator.decay is not None else 1.0
        coefficients = values(operator.rpe, positions.exp() if par_type == 3 else positions) * decay ** lags.abs()
    coefficients = KERNEL_ACTIVATIONS[case.hparams.get("act_type", "none")](coefficients)
    product = causal_toeplitz_matmul if operator.causal else toeplitz_matmul
    y = product(v, coefficients)
    return y / product(torch.ones_like(v), coefficients) if case.hparams["normalize"] else y


@over(named_cases("tno"))
def test_rpe_operator(name, tag, dtype, record_property):
    case = Case(name, tag, dtype)
    operator = rpe_operator(case)
    as_released = {"act_type", "par_type"} & set(case.hparams) or case.hparams["normalize"]
    forward = (lambda v: released_product(operator, case, v)) if as_released else operator
    compare(case, operator, forward, case.input("x"), record_property)


@over(named_cases("derived_tno_length1"))
def test_length_one(name, tag, dtype, record_property):
    case = Case(name, tag, dtype)
    case.parameters_from(case.run["params_from"])
    case.hparams = {"normalize": False} | case.hparams
    operator = rpe_operator(case)
    case.check(released_product(operator, case, case.input("x")), case.output(), record_property)
    if "act_type" not in case.hparams:
        case.check(operator(case.input("x")), case.output(), record_property)
        case.check(operator.coefficients(1).t()[None], merge_heads(case.get("out64/t0")[None]), record_property)


@over(named_cases("tno_fd"))
def test_fd_operator(name, tag, dtype, record_property):
    case = Case(name, tag, dtype)
    config = operator_config(case, "fd", fd_resolution=case.run["fft_size"] // 2, fd_act=case.hparams["act"])
    if not case.hparams["causal"]:
        for key in [key for key in case.tensors if "rpe.out.2" in key]:
            case.tensors[key] = heads_together(case.tensors[key], case.hparams["h"])
    operator = case.load(FdOperator(config))
    compare(case, operator, operator, case.input("x"), record_property)
    check_fd_kernel(case, operator, record_property)


def check_fd_kernel(case: Case, operator: FdOperator, record):
    """Taps and response, apart from the lag F/2, which the released causal window doubles and ours drops."""
    if case.get("out64/kernel_circular") is None:
        return
    resolution = operator.resolution
    circular = case.get("out64/kernel_circular").transpose(1, 2).flatten(0, 1)  # (D, F)
    if operator.causal:
        case.check(operator.coefficients(resolution), circular[:, :resolution], record)
        assert operator.coefficients(resolution + 1)[:, -1].abs().max() == 0
        assert circular[:, resolution].abs().max() > 0
        return
    both = torch.cat([circular[:, resolution + 1 :], circular[:, :resolution]], dim=1)
    case.check(operator.coefficients(resolution), both, record)
    real = case.get("out64/freq_real").transpose(1, 2).flatten(0, 1)
    case.check(torch.complex(*operator.response_parts()).real, real, record)


def gtu_forward(case: Case, gtu: TnnGatedToeplitzUnit):
    """The older block of the released code has its own norm and shortcut."""
    if "v1_prenorm_shortcut" not in case.name:
        return gtu
    norm = NORM_TYPES[case.hparams["norm_type"]](case.hparams["embed_dim"])
    return lambda x: x + gtu(norm(x))


@over([c for c in named_cases("block") if "/gtu" in c[0] and "skitno" not in c[0]])
def test_gated_toeplitz_unit(name, tag, dtype, record_property):
    case = Case(name, tag, dtype)
    config = block_config(case, case.hparams["embed_dim"], causal=case.hparams["causal"])
    gtu = case.load(TnnGatedToeplitzUnit(config, 0))
    compare(case, gtu, gtu_forward(case, gtu), case.input("x"), record_property)


@over([c for c in named_cases("block") if "/glu" in c[0]])
def test_gated_linear_unit(name, tag, dtype, record_property):
    case = Case(name, tag, dtype)
    hparams = case.hparams
    config = block_config(case, hparams["d1"], hidden_act=hparams["act_fun"])
    config.intermediate_size = hparams["d2"]
    glu = case.load(TnnGatedLinearUnit(config))
    final = KERNEL_ACTIVATIONS[hparams["fina_act"].lower()]
    compare(case, glu, lambda x: final(glu(x)), case.input("x"), record_property)


@over([c for c in named_cases("block") if "layer_" in c[0]])
def test_block(name, tag, dtype, record_property):
    case = Case(name, tag, dtype)
    hparams = case.hparams
    if "tnnpytorch" in name:
        width, position = hparams["dim"], "pre" if hparams["prenorm"] else "res_post"
    else:
        side = "decoder" if "decoder" in name else "encoder"
        width = hparams[f"{side}_embed_dim"]
        position = "pre" if hparams[f"{side}_normalize_before"] else "post"
    config = block_config(case, width, causal=hparams["causal"], norm_position=position)
    block = case.load(TnnBlock(config, 0))
    compare(case, block, block, case.input("x"), record_property)
