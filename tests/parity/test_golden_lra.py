"""Parity with the Long Range Arena form of the released code: its position encoder, its window, its 2-D mixer."""

from helpers.parity import Case, named_cases, over
from modeling_tnn import TnnConfig
from modeling_tnn.mixers import TnnGatedToeplitzUnit


def lra_config(case: Case) -> TnnConfig:
    hparams, two_dimensional = case.hparams, "2d" in case.name
    return TnnConfig(
        hidden_size=hparams["d_model"],
        causal=hparams["causal"],
        gtu_expansion=hparams["tno_expand_ratio"],
        decay=case.fixed_decay(),
        norm_type="batchnorm",
        rpe_dim=hparams["dpb_embedding"],
        rpe_layers=2,
        rpe_hidden_norm=False,
        rpe_window=None if two_dimensional else hparams["tno_max_l"],
        spatial_dims=2 if two_dimensional else 1,
        max_position_embeddings=64,
    )


@over(named_cases("lra"))
def test_gated_toeplitz_unit(case: Case):
    """The values; the data have no gradients."""
    gtu = case.load(TnnGatedToeplitzUnit(lra_config(case), 0))
    case.check(gtu(case.input("x")), case.output())
