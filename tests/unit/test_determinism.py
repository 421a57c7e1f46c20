"""The same seed gives the same numbers, bit for bit, on the same machine; no result depends on unwritten memory."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

from helpers.models import CAUSAL, RandomTexts, seeded, tiny_config
from modeling_tnn import TnnForCausalLM, TnnForMaskedLM, TnnModel


@pytest.fixture
def deterministic():
    """PyTorch's own check: operations without a deterministic form raise, and fresh memory is full of NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def test_forward_and_backward(variant, deterministic):
    for product, length in (("fused", 600), ("eager", 17)):
        ids, results = torch.randint(99, (2, length), generator=torch.Generator().manual_seed(0)), []
        mask = torch.ones_like(ids)
        mask[0, : length // 3] = 0
        for _ in range(2):
            model = seeded(TnnModel, tiny_config(*variant, tno_implementation=product)).train()
            hidden = model(ids, attention_mask=mask, use_cache=False).last_hidden_state
            hidden.square().mean().backward()
            results.append([hidden, *(p.grad for p in model.parameters() if p.grad is not None)])
        for first, second in zip(*results, strict=True):
            assert first.isfinite().all() and torch.equal(first, second)


def test_generation(deterministic):
    for tno_type in CAUSAL:
        texts = []
        for _ in range(2):
            model = seeded(TnnForCausalLM, tiny_config(tno_type, eos_token_id=None))
            texts.append(model.generate(torch.arange(2, 9)[None], max_new_tokens=20, do_sample=True, num_beams=2))
        assert torch.equal(*texts), tno_type


def test_training(tmp_path):
    """Trainer with `full_determinism`, dropout included."""
    runs = []
    for run in range(2):
        args = TrainingArguments(
            str(tmp_path / str(run)), max_steps=3, use_cpu=True, report_to="none", seed=5, full_determinism=True,
            disable_tqdm=True, save_strategy="no",
        )  # fmt: skip
        torch.manual_seed(0)
        model = TnnForMaskedLM(tiny_config("ski", False))
        Trainer(model=model, args=args, train_dataset=RandomTexts()).train()
        runs.append(model.state_dict())
    torch.use_deterministic_algorithms(False)
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
