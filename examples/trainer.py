"""transformers: the arguments of a Trainer, predicted for a card and put on a model. Runs on a CPU in a few seconds.

    python examples/trainer.py           (needs the extra `transformers`, and accelerate)
"""

from __future__ import annotations

import tempfile

import torch
import transformers

import sweep
from sweep.workload.hf import causal_lm

VALUES = {"model_type": "llama", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256,
          "num_hidden_layers": 4, "num_attention_heads": 4}  # fmt: skip
arguments = transformers.TrainingArguments(
    output_dir=tempfile.mkdtemp(), per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=1e-3,
    max_steps=3, logging_steps=1, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
)  # fmt: skip
torch.manual_seed(0)
tokens = torch.randint(512, (24, 64))
model = causal_lm(VALUES)

batch = {"input_ids": tokens[:8], "labels": tokens[:8]}
loss = lambda model, part: model(input_ids=part["input_ids"], labels=part["labels"]).loss
said = sweep.from_training_arguments(arguments)
for name, checkpoint in (("as it is", {}), ("recomputing", {"checkpoint": {"granularity": "blocks"}})):
    found = sweep.predict(model, loss, batch, device="rtx_4090", **said, **checkpoint)
    print(f"{name}: {found.allocated_mib:.1f} MiB on an RTX 4090 [predicted]")

with sweep.apply(model, checkpoint={"granularity": "blocks"}) as strategy:
    data = [{"input_ids": row, "labels": row} for row in tokens]
    transformers.Trainer(model, arguments, train_dataset=data).train()
    strategy.check()
