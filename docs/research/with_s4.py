"""Run a command of `tnn` with S4 as one more operator, `tno_type=s4`: the peer of RTF in its paper's tables 2 and 12.

Example:
    python docs/research/with_s4.py synthetic --recipe synthetic/delay --optim adamw_torch \\
        --config_overrides tno_type=s4 --output_dir outputs/delay-s4
"""

import sys
from pathlib import Path

import torch
from torch import nn

from modeling_tnn import ToeplitzOperator, register_operator

sys.path.append(str(Path(__file__).resolve().parent))
from suites.s4_layer import S4Layer


class S4Operator(ToeplitzOperator):
    """S4 with the start of HiPPO-LegS; it has the states of `s4d_state_size`, in each channel."""

    supports_bidirectional = False

    def __init__(self, config, layer_idx: int = 0):
        super().__init__(config, layer_idx)
        self.layer = S4Layer(self.channels, config.s4d_state_size)

    def coefficients(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        """The taps `(D, L)`, with the direct term at lag 0."""
        taps = self.layer.coefficients(length)
        return taps + nn.functional.pad(self.layer.direct[:, None], (0, length - 1))


register_operator("s4", S4Operator)

if __name__ == "__main__":
    from tnn_programs.tnn import main

    main()
