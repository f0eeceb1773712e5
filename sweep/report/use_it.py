"""The way home: the lines that put a trial's strategy into one's own training, for the frameworks that people use.

Only text is made here, from a trial's stored config; tests run each piece against its library.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from sweep.config.schema import Granularity, Placement, StrategyConf, plain
from sweep.config.strategy_names import accumulation_steps, batch_of, describe, micro_batch_size, strategy_of
from sweep.results import TrialResult

#: What is left at its default is not typed.
_DEFAULTS = plain(StrategyConf(name=""))


@dataclass(frozen=True)
class Use:
    """How to use a strategy somewhere: `code`, and what is to be known of it. code: "" where it has no equivalent."""

    where: str
    code: str
    note: str = ""
    language: str = "python"


@dataclass(frozen=True)
class _Lines:
    """What the pieces are made of."""

    strategy: StrategyConf
    keywords: str  # of sweep.apply
    batch: int  # samples per optimizer step
    micro: int
    patterns: list[str]  # of the blocks
    workload: dict[str, Any]

    @property
    def steps(self) -> int:
        return accumulation_steps(self.strategy, self.batch)

    @property
    def recomputes(self) -> bool:
        return self.strategy.checkpoint.granularity is not Granularity.none

    @property
    def moves(self) -> bool:
        return self.strategy.offload.placement is not Placement.none

    @property
    def every_block(self) -> bool:
        """Plain checkpointing of every block, which all frameworks know."""
        c = self.strategy.checkpoint
        return c.granularity is Granularity.blocks and c.every_k == 1

    @property
    def dtype(self) -> str:
        return str(self.workload.get("dtype") or "fp32")

    @property
    def clip(self) -> float | None:
        return self.workload.get("grad_clip_norm")


def uses(result: TrialResult) -> list[Use]:
    """For each framework the lines for a trial's strategy; [] for the baseline, which needs none."""
    lines = _lines(result)
    if describe(lines.strategy, lines.batch) == "baseline":
        return []
    return [make(lines) for make in (_torch, _alone, _transformers, _lightning, _accelerate, _torchtitan, _torchtune)]


def applied(result: TrialResult) -> str:
    """`sweep.apply(model, ...)` for a trial, in one line."""
    return f"sweep.apply(model{_lines(result).keywords})"


def _lines(result: TrialResult) -> _Lines:
    strategy, batch = strategy_of(result), batch_of(result)
    micro, said = micro_batch_size(strategy, batch), []
    if micro < batch:
        said.append(f"micro_batch_size={micro}")
    for key, on in (
        ("checkpoint", strategy.checkpoint.granularity is not Granularity.none),
        ("offload", strategy.offload.placement is not Placement.none),
    ):
        own = {k: v for k, v in plain(getattr(strategy, key)).items() if v != _DEFAULTS[key][k]}
        said += [f"{key}={json.dumps(own).replace('true', 'True').replace('false', 'False')}"] if on else []
    patterns = list(result.block_patterns)
    if len(said) > (micro < batch) and patterns:
        said.append(f"blocks={json.dumps(patterns if len(patterns) > 1 else patterns[0])}")
    keywords = "".join(f", {word}" for word in said)
    return _Lines(strategy, keywords, batch, micro, patterns, result.config.get("workload") or {})


def _loop(lines: _Lines, around: list[str], part: str, weight: str) -> list[str]:
    """The forward, loss and backward of one micro-batch, in the contexts of `around`."""
    cast = {"amp_bf16": "bfloat16", "amp_fp16": "float16"}.get(lines.dtype)
    contexts = [*around, *([f"torch.autocast(device, dtype=torch.{cast})"] if cast else [])]
    loss = f'loss = loss_function(model({part}["inputs"]), {part}["targets"])'
    own = [f"with {', '.join(contexts)}:", f"    {loss}"] if contexts else [loss]
    scaled = f"(loss{weight})" if weight else "loss"
    return [*own, f"scaler.scale({scaled}).backward()" if lines.dtype == "amp_fp16" else f"{scaled}.backward()"]


def _update(lines: _Lines) -> list[str]:
    scaler = lines.dtype == "amp_fp16"
    clip = [f"torch.nn.utils.clip_grad_norm_(model.parameters(), {lines.clip})"] if lines.clip is not None else []
    if not scaler:
        return [*clip, "optimizer.step()"]
    return [*(["scaler.unscale_(optimizer)", *clip] if clip else []), "scaler.step(optimizer)", "scaler.update()"]


def _indented(lines: list[str], by: int) -> list[str]:
    return [" " * by + line for line in lines]


def _torch(lines: _Lines) -> Use:
    around = ["strategy.forward()"] if lines.moves else []
    if lines.steps > 1:
        inner = _loop(lines, around, "part", " * weight")
        step = [f"for part, weight in sweep.micro_batches(batch, {lines.micro}):", *_indented(inner, 4)]
    else:
        step = _loop(lines, around, "batch", "")
    code = [
        "import sweep",
        "import torch",
        "",
        f"with sweep.apply(model{lines.keywords}){' as strategy' if lines.moves else ''}:",
        f"    for batch in batches:  # {lines.batch} samples each",
        "        optimizer.zero_grad(set_to_none=True)",
        *_indented([*step, *_update(lines)], 8),
    ]
    note = "the loss is a mean over the targets of a part" if lines.steps > 1 else ""
    return Use("plain torch", "\n".join(code), note)


def _alone(lines: _Lines) -> Use:
    """Without this package."""
    c, o = lines.strategy.checkpoint, lines.strategy.offload
    where, note, before = "plain torch, without this package", [], []
    if c.granularity in (Granularity.segments, Granularity.parts):
        return Use(where, "", f"checkpoint.granularity={c.granularity.name} takes more than a few lines")
    if o.placement in (Placement.inputs, Placement.blocks):
        return Use(where, "", "torch's save_on_cpu moves all that is saved, not the inputs of blocks or chosen blocks")
    code = ["import torch"]
    if lines.recomputes:
        selective = c.granularity is Granularity.selective
        names = "checkpoint, create_selective_checkpoint_contexts" if selective else "checkpoint"
        code += ["from fnmatch import fnmatchcase", "from functools import partial", ""]
        code += [f"from torch.utils.checkpoint import {names}", ""]
        found = " or ".join(f'fnmatchcase(n, "{p}") and n.count(".") == {p.count(".")}' for p in lines.patterns)
        before = [f"blocks = [m for n, m in model.named_modules() if {found}]"]
        contexts = ""
        if selective:
            kept = c.keep_ops or []
            ops = ", ".join(f"torch.ops.{op}" for op in kept) if kept else _matmul_and_attention()
            before.append(f"kept = [{ops}]")
            contexts = ", context_fn=partial(create_selective_checkpoint_contexts, kept)"
        every = f"[::{c.every_k}]" if c.every_k > 1 else ""
        before.append(f"for block in blocks{every}:")
        before.append(f"    block.forward = partial(checkpoint, block.forward, use_reentrant=False{contexts})")
    around = []
    if lines.moves:
        around = [f"torch.autograd.graph.save_on_cpu(pin_memory={o.pin_memory and 'torch.cuda.is_available()'})"]
        note.append("save_on_cpu also moves weights that are saved, small tensors and the last block's: more transfer")
    if lines.steps > 1:
        cut = f'(batch[name].split({lines.micro}) for name in ("inputs", "targets"))'
        inner = _loop(lines, around, "part", ' * len(part["targets"]) / len(batch["targets"])')
        step = [
            f"for inputs, targets in zip(*{cut}):",
            '    part = {"inputs": inputs, "targets": targets}',
            *_indented(inner, 4),
        ]
        note.append("the weights are those of a mean over samples: with ignored targets count these instead")
    else:
        step = _loop(lines, around, "batch", "")
    code += [
        *([""] if code[-1] else []),
        *before,
        "for batch in batches:",
        *_indented(["optimizer.zero_grad(set_to_none=True)", *step, *_update(lines)], 4),
    ]
    return Use(where, "\n".join(code), "; ".join(note))


def _matmul_and_attention() -> str:
    from sweep.config.schema import MATMUL_AND_ATTENTION

    return ", ".join(f"torch.ops.{op}" for op in MATMUL_AND_ATTENTION)


def _transformers(lines: _Lines) -> Use:
    w, o = lines.workload, lines.workload.get("optimizer") or {}
    kwargs, scheduler = o.get("kwargs") or {}, w.get("scheduler") or {}
    fused = "_fused" if o.get("implementation") == "fused" else ""
    optimizers = {"adamw": f"adamw_torch{fused}", "sgd": "sgd"}
    keys: dict[str, Any] = {
        "output_dir": "out",
        "per_device_train_batch_size": lines.micro,
        "gradient_accumulation_steps": lines.steps,
    }
    note, before = [], []
    if lines.recomputes and lines.every_block and not lines.moves:
        keys |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    elif lines.recomputes or lines.moves:
        note.append("TrainingArguments has no equivalent for this placement, so it is put on the model before")
        words = lines.keywords.replace(f", micro_batch_size={lines.micro}", "")
        before = ["import sweep", "", f"sweep.apply(model, {words.removeprefix(', ')})", ""]
    if (name := o.get("name")) in optimizers and not o.get("target"):
        keys["optim"] = optimizers[name]
    else:
        note.append("give the optimizer to the Trainer: optimizers=(optimizer, None)")
    keys |= {"learning_rate": o.get("lr"), "weight_decay": o.get("weight_decay")}
    if o.get("weight_decay"):
        note.append("the Trainer leaves biases and norms out of the weight decay")
    if betas := kwargs.get("betas"):
        keys |= {"adam_beta1": betas[0], "adam_beta2": betas[1]}
    kinds = {"constant": "constant_with_warmup" if scheduler.get("warmup_steps") else "constant"}
    keys["lr_scheduler_type"] = kinds.get(scheduler.get("name") or "constant", scheduler.get("name"))
    if scheduler.get("warmup_steps"):
        keys["warmup_steps"] = scheduler["warmup_steps"]
    keys["max_grad_norm"] = lines.clip if lines.clip is not None else 0.0
    if lines.dtype in ("amp_bf16", "amp_fp16"):
        keys["bf16" if lines.dtype == "amp_bf16" else "fp16"] = True
    if lines.dtype == "bf16":
        note.append("load the model in bfloat16")
    if lines.batch % lines.micro:
        note.append(f"{lines.micro} does not divide {lines.batch}, so that a step there has other samples")
    typed = [f"    {k}={v!r}," for k, v in keys.items() if v is not None]
    code = ["from transformers import TrainingArguments", "", *before, "arguments = TrainingArguments(", *typed, ")"]
    if before:
        code = [before[0], code[0], "", *before[2:], *code[-len(typed) - 2 :]]
    return Use("transformers", "\n".join(code), "; ".join(note))


def _on_model(lines: _Lines, model: str) -> str:
    """Checkpointing and offload on a module; accumulation is the framework's."""
    words = lines.keywords.replace(f", micro_batch_size={lines.micro}", "")
    return f"sweep.apply({model}{words})"


def _uneven(lines: _Lines) -> str:
    if lines.batch % lines.micro:
        return f"{lines.micro} does not divide {lines.batch}: all parts weigh the same there, although one is smaller"
    return ""


def _lightning(lines: _Lines) -> Use:
    keys = [f"accumulate_grad_batches={lines.steps}"] if lines.steps > 1 else []
    precision = {"amp_bf16": "bf16-mixed", "amp_fp16": "16-mixed", "bf16": "bf16-true"}.get(lines.dtype)
    keys += [f'precision="{precision}"'] if precision else []
    keys += [f"gradient_clip_val={lines.clip}"] if lines.clip is not None else []
    code = ["import lightning"]
    if lines.recomputes or lines.moves:
        code = [
            *code,
            "import sweep",
            "",
            "",
            "class Strategy(lightning.Callback):",
            "    def on_fit_start(self, trainer, module):",
            f"        self.strategy = {_on_model(lines, 'module.model')}  # the module that was measured",
            "",
            "    def on_fit_end(self, trainer, module):",
            "        self.strategy.remove()",
            "",
        ]
        keys.append("callbacks=[Strategy()]")
    code += ["", f"trainer = lightning.Trainer({', '.join(keys)})  # batches of {lines.micro} samples"]
    return Use("Lightning", "\n".join(code), _uneven(lines))


def _accelerate(lines: _Lines) -> Use:
    precision = {"amp_bf16": 'mixed_precision="bf16"', "amp_fp16": 'mixed_precision="fp16"'}.get(lines.dtype)
    keys = [*([f"gradient_accumulation_steps={lines.steps}"] if lines.steps > 1 else []), *filter(None, [precision])]
    step = ['loss = loss_function(model(batch["inputs"]), batch["targets"])']
    if lines.moves:
        step = ["with strategy.forward():", f"    {step[0]}"]
    clip = [
        "if accelerator.sync_gradients:",
        f"    accelerator.clip_grad_norm_(model.parameters(), {lines.clip})",
    ]
    step += ["accelerator.backward(loss)", *(clip if lines.clip is not None else [])]
    step += ["optimizer.step()", "optimizer.zero_grad()"]
    on = lines.recomputes or lines.moves
    code = [
        *(["import sweep"] if on else []),
        "from accelerate import Accelerator",
        "",
        f"accelerator = Accelerator({', '.join(keys)})",
        f"model, optimizer, batches = accelerator.prepare(model, optimizer, batches)  # {lines.micro} samples each",
        *([f"strategy = {_on_model(lines, 'accelerator.unwrap_model(model)')}"] if on else []),
        "for batch in batches:",
        "    with accelerator.accumulate(model):",
        *_indented(step, 8),
    ]
    return Use("Accelerate", "\n".join(code), _uneven(lines))


def _torchtitan(lines: _Lines) -> Use:
    c = lines.strategy.checkpoint
    if lines.moves:
        return Use("torchtitan", "", "it has no key for moving activations to the host")
    mode = []
    if lines.every_block:
        mode = ["", "[activation_checkpoint]", 'mode = "full"']
    elif c.granularity is Granularity.blocks:
        mode = ["", "[activation_checkpoint]", 'mode = "selective"', f'selective_ac_option = "{c.every_k}"']
    elif lines.recomputes:
        return Use("torchtitan", "", f"its keys have no checkpointing like granularity={c.granularity.name}")
    code = ["[training]", f"local_batch_size = {lines.micro}", f"global_batch_size = {lines.batch}", *mode]
    return Use("torchtitan (one device)", "\n".join(code), _uneven(lines), "toml")


def _torchtune(lines: _Lines) -> Use:
    if lines.recomputes and not lines.every_block:
        return Use("torchtune", "", "it recomputes every block or none")
    o = lines.strategy.offload
    if lines.moves and not (lines.recomputes and o.placement in (Placement.all, Placement.inputs)):
        return Use("torchtune", "", "it moves activations only together with checkpointing")
    code = [f"batch_size: {lines.micro}", f"gradient_accumulation_steps: {lines.steps}"]
    code += ["enable_activation_checkpointing: True"] if lines.recomputes else []
    code += ["enable_activation_offloading: True"] if lines.moves else []
    return Use("torchtune", "\n".join(code), _uneven(lines), "yaml")
