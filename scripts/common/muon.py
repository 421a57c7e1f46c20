"""Muon for matrices and AdamW for all other parameters, as one optimizer.

Muon (Jordan et al. 2024) makes the step of a matrix close to orthogonal. PyTorch's "match_rms_adamw" scales it to the
size of a step of AdamW (Liu et al. 2025, arXiv:2502.16982), so that one learning rate and weight decay serve both.
"""

import torch


class MuonWithAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` for groups of matrices, fused `torch.optim.AdamW` for others.

    As PyTorch's fused optimizers do, it skips a step on the device if `found_inf`, a tensor there, is 1.
    """

    def __init__(self, matrices: list[dict], others: list[dict], lr: float, betas: tuple[float, float], eps: float):
        matrices = [{**group, "muon": True} for group in matrices]
        others = [{**group, "muon": False} for group in others]
        self.muon = torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw")
        self.adamw = torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps, fused=True)
        # The groups and the state belong to this optimizer. A step lends them to the two.
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], {})
        self._step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure=None):
        if getattr(self, "grad_scale", None) is not None:
            raise ValueError(f"`grad_scale` must be None (unscale the gradients first), got {self.grad_scale}")
        loss = None if closure is None else torch.enable_grad()(closure)()
        skipped = getattr(self, "found_inf", None)
        self.muon.state = self.adamw.state = self.state
        self.adamw.param_groups = [group for group in self.param_groups if not group["muon"]]
        self.adamw.found_inf = skipped
        self.adamw.step()
        for group in self.param_groups:
            for matrix in group["params"] if group["muon"] else []:
                if matrix.grad is not None:
                    self._step_matrix(group, matrix, skipped)
        return loss

    def _step_matrix(self, group: dict, matrix: torch.Tensor, skipped: torch.Tensor | None):
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        changed = (matrix, state["momentum_buffer"])
        before = [tensor.clone() for tensor in changed] if skipped is not None else []
        self.muon.param_groups = [{**group, "params": [matrix]}]
        self.muon.step()
        for tensor, kept in zip(changed, before, strict=False):
            tensor.copy_(torch.where(skipped == 1, kept, tensor))
