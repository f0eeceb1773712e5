"""What would fit on cards that are not here? Predicted on a CPU in a few seconds; the model never takes its memory.

    python examples/predict_a_card.py
"""

from __future__ import annotations

import torch

import sweep
from sweep.workload.loss import CrossEntropy
from sweep.workload.models import Transformer


def gpt2() -> Transformer:
    return Transformer(vocab_size=50257, max_seq_len=1024, layers=12, d_model=768, heads=12, d_ff=3072)


tokens = {"inputs": torch.zeros(16, 1024, dtype=torch.long), "targets": torch.zeros(16, 1024, dtype=torch.long)}
for card in ("t4", "rtx_4090", "a100_80gb"):
    for strategy in ("baseline", "checkpoint", {"micro_batch_size": 2}):
        dtype = "amp_fp16" if card == "t4" else "amp_bf16"
        p = sweep.predict(gpt2, CrossEntropy(), tokens, device=card, strategy=strategy, workload={"dtype": dtype})
        print(f"{card:10} {strategy!s:25} {p.allocated_mib:8.0f} MiB  {'fits' if p.fits else 'does not fit'}")
