"""Parity with the released implementations: norms, position encoder, RPE and FD operators, GTU, GLU and blocks."""

from types import SimpleNamespace

import torch
from torch.nn import functional

from helpers.parity import Case, block_config, merge_heads, named_cases, operator_config, over
from modeling_tnn.mixers import TnnGatedToeplitzUnit
from modeling_tnn.modeling_tnn import TnnBlock, TnnGatedLinearUnit
from modeling_tnn.norms import NORM_TYPES
from modeling_tnn.position_encoder import RelativePositionEncoder
from modeling_tnn.tno_fd import FdOperator
from modeling_tnn.tno_rpe import RpeOperator
from modeling_tnn.toeplitz import causal_toeplitz_matmul, toeplitz_matmul
from tnn_programs.original.names import heads_together

KERNEL_ACTIVATIONS = {
    "none": lambda t: t,
    "relu": functional.relu,
    "silu": functional.silu,
    "1+elu": lambda t: 1 + functional.elu(t),
}


@over(named_cases("norm"))
def test_norm(case: Case):
    norm = case.load(NORM_TYPES[case.hparams["norm_type"]](case.hparams["dim"]))
    case.compare(norm, case.input("x"))


def values(encoder: RelativePositionEncoder, positions: torch.Tensor) -> torch.Tensor:
    """The values `(D, M)` at the `positions` `(M,)`."""
    return encoder.emit(encoder.features(positions), torch.ones_like(positions))


@over(named_cases("rpe"))
def test_relative_position_encoder(case: Case):
    hparams = case.hparams
    config = SimpleNamespace(
        rpe_dim=hparams["dim"],
        rpe_layers=hparams["layers"],
        encoder_norm_type=hparams["norm_type"],
        rpe_residual=hparams.get("residual", False),
        rpe_hidden_norm=True,
    )
    encoder = case.load(RelativePositionEncoder(config, hparams["outdim"], hparams["act"]))
    assert case.get("in/w") is not None
    case.compare(encoder, case.input("pos"), lambda positions: values(encoder, positions[:, 0]).t())


def rpe_operator(case: Case) -> RpeOperator:
    learned = case.hparams.get("use_multi_decay", False)
    decay = case.hparams["gamma"] if learned else case.fixed_decay()
    config = operator_config(
        case, "rpe", rpe_act=case.hparams.get("act", "relu"), decay=decay, learnable_decay=learned
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
def test_rpe_operator(case: Case):
    operator = rpe_operator(case)
    as_released = {"act_type", "par_type"} & set(case.hparams) or case.hparams["normalize"]
    forward = (lambda v: released_product(operator, case, v)) if as_released else operator
    case.compare(operator, case.input("x"), forward)


@over(named_cases("derived_tno_length1"))
def test_length_one(case: Case):
    case.parameters_from(case.run["params_from"])
    case.hparams = {"normalize": False} | case.hparams
    operator = rpe_operator(case)
    case.check(released_product(operator, case, case.input("x")), case.output())
    if "act_type" not in case.hparams:
        case.check(operator(case.input("x")), case.output())
        case.check(operator.coefficients(1).t()[None], merge_heads(case.get("out64/t0")[None]))


@over(named_cases("tno_fd"))
def test_fd_operator(case: Case):
    config = operator_config(case, "fd", fd_resolution=case.run["fft_size"] // 2, fd_act=case.hparams["act"])
    if not case.hparams["causal"]:
        for key in [key for key in case.tensors if "rpe.out.2" in key]:
            case.tensors[key] = heads_together(case.tensors[key], case.hparams["h"])
    operator = case.load(FdOperator(config))
    case.compare(operator, case.input("x"))
    check_fd_kernel(case, operator)


def check_fd_kernel(case: Case, operator: FdOperator):
    """Taps and response, apart from the lag F/2, which the released causal window doubles and ours drops."""
    if case.get("out64/kernel_circular") is None:
        return
    resolution = operator.resolution
    circular = case.get("out64/kernel_circular").transpose(1, 2).flatten(0, 1)  # (D, F)
    if operator.causal:
        case.check(operator.coefficients(resolution), circular[:, :resolution])
        assert operator.coefficients(resolution + 1)[:, -1].abs().max() == 0
        assert circular[:, resolution].abs().max() > 0
        return
    both = torch.cat([circular[:, resolution + 1 :], circular[:, :resolution]], dim=1)
    case.check(operator.coefficients(resolution), both)
    real = case.get("out64/freq_real").transpose(1, 2).flatten(0, 1)
    case.check(torch.complex(*operator.response_parts()).real, real)


@over([c for c in named_cases("block") if "/gtu" in c[0] and "skitno" not in c[0]])
def test_gated_toeplitz_unit(case: Case):
    config = block_config(case, case.hparams["embed_dim"], causal=case.hparams["causal"])
    gtu = case.load(TnnGatedToeplitzUnit(config, 0))
    # The older block of the released code has its own norm and shortcut.
    norm = NORM_TYPES[case.hparams["norm_type"]](case.hparams["embed_dim"])
    older = "v1_prenorm_shortcut" in case.name
    case.compare(gtu, case.input("x"), (lambda x: x + gtu(norm(x))) if older else gtu)


@over([c for c in named_cases("block") if "/glu" in c[0]])
def test_gated_linear_unit(case: Case):
    hparams = case.hparams
    config = block_config(case, hparams["d1"], hidden_act=hparams["act_fun"])
    config.intermediate_size = hparams["d2"]
    glu = case.load(TnnGatedLinearUnit(config))
    final = KERNEL_ACTIVATIONS[hparams["fina_act"].lower()]
    case.compare(glu, case.input("x"), lambda x: final(glu(x)))


@over([c for c in named_cases("block") if "layer_" in c[0]])
def test_block(case: Case):
    hparams = case.hparams
    if "tnnpytorch" in case.name:
        width, position = hparams["dim"], "pre" if hparams["prenorm"] else "res_post"
    else:
        side = "decoder" if "decoder" in case.name else "encoder"
        width = hparams[f"{side}_embed_dim"]
        position = "pre" if hparams[f"{side}_normalize_before"] else "post"
    config = block_config(case, width, causal=hparams["causal"], norm_position=position)
    block = case.load(TnnBlock(config, 0))
    case.compare(block, case.input("x"))
