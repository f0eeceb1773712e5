"""Does a strategy compute what the baseline computes? Checked before anything is measured.

Two questions, each with runs of its own from the same seed on the same batches:

- Checkpointing and offload run the same kernels on the same shapes as plain training with the same micro-batches, so
  everything must be equal to the last bit, in the workload's own number format and with all its randomness. Where it is
  not, it may be by other kernels (offload that gives back other strides): then the same in float64 decides.
- Micro-batches add up in another order, and draw other random numbers. So they are compared with the undivided batch in
  float64 (float32 where model or card cannot), every draw fixed (FixedDraws), on up to 8 samples of each batch.

Compared are losses, gradients, outputs and the gradients at the block inputs of every step, and after the last one
parameters, buffers, what modules keep as plain attributes, the optimizer's state and settings, the random state and the
numbers of updates. Two steps are the least: the first one sees no state that was changed before. Where fewer than
nearly all parameters had a finite gradient that is not zero, stepping goes on a little; zero against zero is no
evidence, and too little evidence is `not_verified`, never equal.

The relative error of a tensor is ||a - b|| / max(||b||, FLOOR * ||all tensors of its kind||): tensors whose true value
is zero (the gradient of an attention's key bias, say) hold rounding noise only and must not decide.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import hashlib
import json
import logging
import math
import os
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError

from sweep.config.schema import Config, Dtype, Granularity, Placement, StrategyConf, WorkloadConf, plain
from sweep.errors import NotEquivalent, NotFinite, is_out_of_memory, one_line
from sweep.results import Verification
from sweep.strategy import micro_batch_size, training
from sweep.workload import Batch, DataSource, Workload, build_loss, build_workload, map_batch, to_device
from sweep.workload.build import MeanOverSamples
from sweep.workload.data import leaves_of, python_states, random_states, restore, seed_everything
from sweep.workload.step import Phases, split

GOLDEN = 0.618034


class FixedDraws(TorchDispatchMode):
    """Gives every random draw a fixed outcome. `unknown`: operators that drew and could not be given one."""

    def __init__(self) -> None:
        super().__init__()
        self.unknown: set[str] = set()
        self._drawn = 0

    def begin_forward(self) -> None:
        """The next draw is the first of a micro-batch."""
        self._drawn = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        given = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
        given |= {a.name: v for a, v in zip(func._schema.arguments, args)} | kwargs
        name = func._schema.name.removeprefix("aten::").rstrip("_").removesuffix("_functional").removesuffix("_like")
        if name == "native_dropout":
            keep = 1.0 - given["p"]
            x, kept = given["input"], torch.ones_like(given["input"], dtype=torch.bool)
            return (x.clone(), kept) if given["train"] is False or not keep else (x / keep, kept)
        for rate in ("dropout_p", "dropout"):
            if rate in given:  # fused kernels of attention and of recurrent layers
                return func(**{**given, rate: 0.0}) if given[rate] else func(*args, **kwargs)
        if name.startswith("rrelu_with_noise"):
            middle = (given["lower"] + given["upper"]) / 2
            return func(**{**given, "lower": middle, "upper": middle})
        out = func(*args, **kwargs)
        self._drawn += 1
        value = _outcome(name, given, out, self._drawn * GOLDEN % 1.0)
        if value is None:
            if not name.startswith(("_scaled_dot_product", "_efficient_attention", "_flash_attention", "_fused_sdp")):
                self.unknown.add(name)
            return out
        return out.copy_(value) if isinstance(value, Tensor) else out.fill_(value)


def _outcome(name: str, given: dict[str, Any], out: Any, turn: float) -> Tensor | float | None:
    """What the draw gives, to be written over `out`; another by `turn`, which is in [0, 1). None: not known."""
    uniform, normal = 0.5 + turn / 4, 0.5 + turn / 2
    low, high = given.get("from", given.get("low")), given.get("to", given.get("high"))
    if name in ("rand", "uniform"):
        return (low or 0.0) + (1.0 if high is None else high - (low or 0.0)) * uniform
    if name in ("randn", "normal"):
        mean, std = given.get("mean", 0.0), given.get("std", 1.0)
        return mean + normal * std if isinstance(mean + normal * std, Tensor) else float(mean + normal * std)
    if name == "bernoulli":
        return 1.0 - turn / 8 if out.is_floating_point() else 1.0
    if name in ("randint", "random"):
        return (low or 0) + ((2 if high is None else high) - (low or 0)) // 2
    if name == "randperm":
        return torch.arange(len(out), device=out.device).roll(1)
    if name == "multinomial":
        return given["self"].argsort(dim=-1, descending=True, stable=True)[..., : out.shape[-1]]
    if name == "exponential":
        return normal / given["lambd"]
    if name == "geometric":
        return 1.0
    if name == "cauchy":
        return given["median"] + normal * given["sigma"]
    if name == "log_normal":
        return math.exp(given["mean"] + normal * given["std"])
    if name in ("poisson", "_standard_gamma"):
        return given["self"].round() if name == "poisson" else given["self"]
    if name == "binomial":
        return (given["count"] * given["prob"]).round()
    if name == "_sample_dirichlet":
        return given["self"] / given["self"].sum(-1, keepdim=True)
    return None


#: Larger tensors are kept at so many evenly spaced elements, and as the checksum and the norm of all.
ELEMENTS_KEPT = 2**15
#: Tensors that are smaller than this all over (zero-initialised gates, heads and biases, LayerScale) hide whether what
#: lies behind them is right: both runs begin with noise of this deviation in them.
SMALL, NOISE = 1e-3, 0.02
#: A share of the parameters that is evidence enough to stop stepping.
NEARLY_ALL = 0.99


class Overflow(Exception):
    """The gradient scaler's scale is too large for the first step."""


@dataclass(frozen=True)
class How:
    """What both runs of a comparison have in common."""

    steps: int  # at least
    most_steps: int  # where the gradients of the first ones are no evidence yet
    fixed_draws: bool = False  # micro-batches draw other numbers than the whole batch
    double: bool = False  # in float64 throughout, instead of the workload's dtype
    samples: int | None = None  # of each batch, the first ones; None: all
    blocks_kept: int | None = None  # of each list; the others hand on what they are given; None: all
    scale: float = 2.0**12  # the gradient scaler's, so low that no step is skipped


@dataclass
class Kept:
    """A tensor on the host: whole, or a sample of it and a checksum of its bits."""

    values: Tensor
    checksum: int | None = None  # None: `values` are all
    norm: float = 0.0  # of all elements

    @classmethod
    def of(cls, tensor: Tensor) -> Kept:
        tensor = tensor.detach()
        if tensor.layout is not torch.strided:
            tensor = tensor.to_dense()
        if tensor.is_quantized or tensor.numel() <= ELEMENTS_KEPT:
            return cls(tensor.to("cpu", copy=True))
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        whole = real.contiguous().flatten()
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[whole.element_size()]
        checksum = int(whole.view(bits).sum(dtype=torch.int64))
        wide = torch.float64 if whole.dtype is torch.float64 else torch.float32
        norm = float(whole.norm(dtype=wide)) if whole.is_floating_point() else 0.0
        every = -(-tensor.numel() // ELEMENTS_KEPT)
        return cls(tensor.flatten()[::every].to("cpu", copy=True), checksum, norm)

    def same(self, other: Any) -> bool:
        """To the last bit; NaNs are equal."""
        if not isinstance(other, Kept) or self.checksum != other.checksum:
            return False
        a, b = self.values, other.values
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return torch.equal(a, b) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


#: What a name stands for: a tensor, or a plain value (a number, a string).
State = dict[str, Any]


@dataclass
class Record:
    """What one run of a few steps computed, on the host."""

    loss: list[float] = field(default_factory=list)
    grads: dict[str, Kept] = field(default_factory=dict)  # of every step
    outputs: dict[str, Kept] = field(default_factory=dict)  # by call of the model
    block_inputs: dict[str, Kept] = field(default_factory=dict)  # gradients there, by call of the block
    before: dict[str, Kept] = field(default_factory=dict)  # parameters at the start ...
    parameters: dict[str, Kept] = field(default_factory=dict)  # ... and at the end
    optimizer: dict[str, dict[str, Kept]] = field(default_factory=dict)  # by kind of state, such as exp_avg
    settings: list[dict[str, Any]] = field(default_factory=list)  # numbers of the optimizer's groups: lr, betas, ...
    buffers: State = field(default_factory=dict)
    attributes: State = field(default_factory=dict)  # plain attributes of modules that the run has changed
    moving: frozenset[str] | None = None  # buffers and attributes that the same forward changes again; reference only
    rng: dict[str, bytes] = field(default_factory=dict)
    updates: int = 0
    scheduler_steps: int = 0
    steps: int = 0
    taking_part: dict[str, int] = field(default_factory=dict)  # elements of each parameter that had a gradient
    evidence: set[str] = field(default_factory=set)  # those whose gradient was finite and not zero in some step
    unfixed: set[str] = field(default_factory=set)  # draws that could not be given a fixed outcome

    @property
    def share(self) -> float:
        """Of the parameters that take part, by elements: those whose gradients are evidence."""
        total = sum(self.taking_part.values())
        return sum(self.taking_part[n] for n in self.evidence) / total if total else 0.0


def run_and_record(
    conf: WorkloadConf, strategy: StrategyConf, watched: StrategyConf, device: torch.device, data: DataSource,
    how: How, reference: Record | None,
) -> Record:  # fmt: skip
    """Run optimizer steps of `conf` under `strategy` from the seed and keep what they computed.

    watched: the strategy under verification, whose layout decides which block inputs exist in both runs.
    reference: what is compared with, which says how many steps; None: this is one.

    Raises:
        NotFinite: a reference's loss is no number. Overflow: its gradients are not, under a gradient scaler.
    """
    record, phases = Record(), Phases()
    workload = _built(conf, device, data, how)
    samples = how.samples or conf.global_batch_size
    with ExitStack() as stack:
        stack.enter_context(_default_dtype(torch.float64 if how.double else torch.get_default_dtype()))
        loop = stack.enter_context(training(workload, strategy, phases, samples))
        force = loop.strategy
        draws = FixedDraws() if how.fixed_draws else None
        around: Callable[[], AbstractContextManager[object]] = force.around_forward
        if draws is not None:
            around = partial(_same_draws, draws, conf.seed, force.around_forward, record)
        stack.callback(workload.optimizer.register_step_post_hook(partial(_count, record)).remove)
        record.before = {n: Kept.of(p) for n, p in workload.named_parameters()}
        begun = _attributes(workload)
        seed_everything(conf.seed + 1)  # dropout
        while True:
            step, batch = record.steps, _batch(workload, record.steps, how)
            with _watching(workload, watched, step, record):
                result = loop.step_on(batch, around_forward=around)
            record.steps += 1
            record.loss.append(result.loss.item())
            _keep_gradients(record, workload, step)
            if reference is None:
                _check_reference(record, workload)
            if record.steps >= (how.most_steps if reference is None else reference.steps):
                break
            if reference is None and record.steps >= how.steps and record.share >= NEARLY_ALL:
                break
        record.rng = random_states(device)
        _keep_state(record, workload, begun)
        if reference is None:
            record.moving = _moving(workload, batch, phases, around, conf.seed)
        if draws is not None:
            record.unfixed |= draws.unknown
    return record


def _built(conf: WorkloadConf, device: torch.device, data: DataSource, how: How) -> Workload:
    if how.double:
        conf = dataclasses.replace(conf, dtype=Dtype.fp32)
    workload = build_workload(conf, device, data)
    if how.blocks_kept is not None:
        _keep_blocks(workload, how.blocks_kept)
    generator = torch.Generator().manual_seed(conf.seed % 2**63)
    with torch.no_grad():
        for _, p in workload.named_parameters():
            if p.requires_grad and p.is_floating_point() and p.square().mean().sqrt() < SMALL:
                p.add_(torch.randn(p.shape, generator=generator, dtype=torch.float32).to(p) * NOISE)
    if how.double:
        for _, module in workload.modules_with_state():
            module.double()
    if workload.scaler is not None:
        workload.scaler = torch.amp.GradScaler(device.type, init_scale=how.scale)
    return workload


def _batch(workload: Workload, step: int, how: How) -> Batch:
    batch = next(split(workload.train_batch(step), how.samples))
    if how.double:
        return map_batch(lambda t: t.double() if t.is_floating_point() else t, batch)
    return batch


def _count(record: Record, *_: Any) -> None:
    record.updates += 1


def _check_reference(record: Record, workload: Workload) -> None:
    if not math.isfinite(record.loss[-1]):
        raise NotFinite(f"the baseline's loss is {record.loss[-1]} in step {record.steps} of the verification")
    if workload.scaler is not None and record.updates < record.steps:
        raise Overflow


def _keep_gradients(record: Record, workload: Workload, step: int) -> None:
    for name, parameter in workload.named_parameters():
        if not parameter.requires_grad or (gradient := parameter.grad) is None:
            continue
        record.grads[_at(name, step)] = Kept.of(gradient)
        record.taking_part[name] = parameter.numel()
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        if bool(values.isfinite().all()) and bool(values.any()):
            record.evidence.add(name)


def _at(name: str, step: int) -> str:
    return name if step == 0 else f"{name} in step {step + 1}"


# -- blocks that are left out ----------------------------------------------------------------------------------------


def _keep_blocks(workload: Workload, count: int) -> None:
    """The first `count` blocks of each list; the others hand on their first argument: the list keeps its length."""
    seen: Counter[str] = Counter()
    kept = []
    for block in workload.blocks:
        group = block.name.rpartition(".")[0]
        seen[group] += 1
        if seen[group] <= count:
            kept.append(block)
        else:
            block.module.forward = _hand_on  # type: ignore[method-assign]
    workload.blocks = kept


def _hand_on(*args: Any, **kwargs: Any) -> Any:
    return args[0] if args else next(iter(kwargs.values()))


# -- what the model's modules are given and give ---------------------------------------------------------------------


@contextmanager
def _watching(workload: Workload, strategy: StrategyConf, step: int, record: Record) -> Iterator[None]:
    """Keep the model's outputs and the gradients at the block inputs, call by call."""
    calls: Counter[str] = Counter()

    def saw_output(_: nn.Module, __: Any, output: Any) -> None:
        number = calls["output"]
        calls["output"] += 1
        for name, tensor in _tensors(output, "output"):
            record.outputs[_call(_at(name, step), number)] = Kept.of(tensor)

    def watch_input(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            number = calls[name]
            calls[name] += 1
            for tensor in [*args, *kwargs.values()]:
                if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.dim():
                    key = _call(_at(name, step), number)
                    tensor.register_hook(partial(_keep, record.block_inputs, key))
                    return

        return hook

    # Blocks inside a segment are computed by its first one, so only that one's input exists in both runs.
    c = strategy.checkpoint
    stride = c.segment_size if c.granularity is Granularity.segments else 1
    handles = [workload.model.register_forward_hook(saw_output)]
    for block in workload.blocks[::stride]:
        handles.append(block.module.register_forward_pre_hook(watch_input(block.name), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _keep(kept: dict[str, Kept], name: str, gradient: Tensor) -> None:
    kept[name] = Kept.of(gradient)


def _call(name: str, number: int) -> str:
    return name if number == 0 else f"{name} at call {number + 1}"


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    return ((path, leaf) for path, leaf in leaves_of(value, name) if isinstance(leaf, Tensor))


# -- state -----------------------------------------------------------------------------------------------------------


def _keep_state(record: Record, workload: Workload, begun: State) -> None:
    names: dict[Tensor, str] = {parameter: name for name, parameter in workload.named_parameters()}
    record.parameters = {name: Kept.of(parameter) for parameter, name in names.items()}
    record.buffers = _buffers(workload)
    kinds: dict[str, dict[str, Kept]] = defaultdict(dict)
    for parameter, state in workload.optimizer.state.items():
        for kind, value in state.items():
            if isinstance(value, (Tensor, int, float)):
                kinds[kind][names.get(parameter, "")] = Kept.of(torch.as_tensor(value))
    record.optimizer = dict(kinds)
    record.settings = [
        {k: v for k, v in group.items() if isinstance(v, (int, float, bool, str, tuple))}
        for group in workload.optimizer.param_groups
    ]
    if workload.scheduler is not None:
        record.scheduler_steps = workload.scheduler.last_epoch
    ended = _attributes(workload)
    record.attributes = {n: v for n, v in ended.items() if n not in begun or not same(begun[n], v)}


def same(a: Any, b: Any) -> bool:
    """Whether two values of a State are equal to the last bit."""
    if isinstance(a, Kept):
        return a.same(b)
    return type(a) is type(b) and (a == b or (a != a and b != b))


def _buffers(workload: Workload) -> State:
    return {n: Kept.of(b) for n, b in workload.named_buffers()}


#: What every module has among its attributes.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
#: Attributes that are looked at, in one model and within one attribute's value.
_MOST_ATTRIBUTES, _DEPTH = 20_000, 6


def _attributes(workload: Workload) -> State:
    """Tensors, numbers, strings and containers of these that modules keep as plain attributes, by dotted name."""
    found: State = {}
    seen: set[int] = set()
    for prefix, top in workload.modules_with_state():
        for name, module in top.named_modules():
            path = f"{prefix}{name}." if name else prefix
            for key, value in vars(module).items():
                if key not in _OF_EVERY_MODULE:
                    _note(f"{path}{key}", value, found, seen, _DEPTH)
    return found


def _note(name: str, value: Any, found: State, seen: set[int], depth: int) -> None:
    if isinstance(value, nn.Parameter) or len(found) >= _MOST_ATTRIBUTES:
        return
    if isinstance(value, Tensor):
        if value.device.type != "meta":
            found[name] = Kept.of(value)
        return
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        found[name] = value
        return
    if depth == 0 or id(value) in seen or isinstance(value, (nn.Module, type)) or callable(value):
        return
    seen.add(id(value))
    if hasattr(value, "__array__") and hasattr(value, "dtype"):
        found[name] = bytes(value.tobytes()) if hasattr(value, "tobytes") else None
        return
    if isinstance(value, Mapping):
        items: Any = value.items()
    elif isinstance(value, (list, tuple, deque)):
        items = enumerate(value)
    elif isinstance(value, (set, frozenset)):
        found[name] = repr(sorted(map(repr, value)))
        return
    else:
        items = vars(value).items() if hasattr(value, "__dict__") else ()
    found[f"{name}.length"] = len(items) if hasattr(items, "__len__") else 0
    for key, item in items:
        _note(f"{name}.{key}", item, found, seen, depth - 1)


def _moving(
    workload: Workload,
    batch: Batch,
    phases: Phases,
    around: Callable[[], AbstractContextManager[object]],
    seed: int,
) -> frozenset[str]:
    """Buffers, attributes and untrained parameters that the same forward on the same batch changes once more.

    So a counter, a moving average or a growing cache is told from what a forward leaves behind of its batch alone.
    """
    states = []
    for _ in range(2):
        seed_everything(seed)
        inputs = to_device(batch, workload.device)
        with around(), workload.autocast():
            loss = workload.loss(workload.model, inputs)
        del loss, inputs
        frozen = {n: Kept.of(p) for n, p in workload.named_parameters() if not p.requires_grad}
        states.append(_buffers(workload) | _attributes(workload) | frozen)
    first, second = states
    return frozenset(n for n in first.keys() | second.keys() if not same(first.get(n), second.get(n)))


# -- surroundings ----------------------------------------------------------------------------------------------------


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _same_draws(
    draws: FixedDraws, seed: int, around: Callable[[], AbstractContextManager[object]], record: Record
) -> Iterator[None]:
    """Each micro-batch draws the same numbers, from Python and numpy too. Notes whether it draws from these."""
    draws.begin_forward()
    seed_everything(seed)
    before = python_states()
    with draws, around():  # not around the data, whose samples would all be the same
        yield
    after = python_states()
    if after[0] != before[0]:
        record.unfixed.add("random")
    if after[1][2] != before[1][2] or (after[1][1] != before[1][1]).any():
        record.unfixed.add("numpy.random")
    restore(before)


def _note_call(calls: dict[str, list[Any]], name: str, _: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
    calls[name].append(([t for _, t in _tensors((args, kwargs))], [t for _, t in _tensors(out)]))


def first_that_mixes(conf: WorkloadConf, device: torch.device, data: DataSource, how: How, part: int) -> str | None:
    """The first module whose result for the first `part` samples depends on the others. None: no one does.

    The whole batch and its first samples go through the same model, each from the same state; modules whose inputs
    differ already are not to blame.
    """
    calls: list[dict[str, list[tuple[list[Tensor], list[Tensor]]]]] = []
    with _default_dtype(torch.float64 if how.double else torch.get_default_dtype()), torch.no_grad():
        for size in (None, part):
            workload = _built(conf, device, data, how)  # anew: a forward may move its state
            batch = next(split(_batch(workload, 0, how), size))
            seen: dict[str, list[tuple[list[Tensor], list[Tensor]]]] = defaultdict(list)
            calls.append(seen)
            for name, module in workload.model.named_modules():
                if name:
                    module.register_forward_hook(partial(_note_call, seen, name), with_kwargs=True)
            seed_everything(conf.seed)
            with FixedDraws(), workload.autocast():
                workload.loss(workload.model, to_device(batch, device))
    samples = how.samples or conf.global_batch_size
    for name, of_whole in calls[0].items():
        for (given, got), (given_part, got_part) in zip(of_whole, calls[1].get(name, [])):
            near = 1e-9 if how.double else 1e-5
            if _agree(given, given_part, samples, part, near) and _agree(got, got_part, samples, part, near) is False:
                return name
    return None


def _agree(whole: list[Tensor], of_part: list[Tensor], samples: int, part: int, near: float) -> bool | None:
    """Whether tensors of the part are those of the whole's first samples, in whichever dimension these lie.

    None: shapes do not tell.
    """
    if len(whole) != len(of_part):
        return None
    for a, b in zip(whole, of_part):
        if a.shape == b.shape:
            cut = a
        else:
            differing = [d for d in range(min(a.dim(), b.dim())) if a.shape[d] != b.shape[d]]
            if a.dim() != b.dim() or len(differing) != 1:
                return None
            d = differing[0]
            if a.shape[d] * part != b.shape[d] * samples:
                return None
            cut = a.narrow(d, 0, b.shape[d])
        if cut.is_floating_point() and cut.numel() and float((cut - b).abs().max()) > near * float(cut.abs().max()):
            return False
    return True


@contextmanager
def plain_surroundings(device: torch.device) -> Iterator[None]:
    """TF32 and cuDNN's search for the fastest kernel are off, inside: both differ from run to run or from fp32."""
    if device.type != "cuda":
        yield
        return
    precision, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.benchmark
    torch.set_float32_matmul_precision("highest")
    cudnn.allow_tf32 = cudnn.benchmark = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        cudnn.allow_tf32, cudnn.benchmark = before


log = logging.getLogger(__name__)

#: Largest relative error of micro-batches, in float64 or float32. In float64 right ones are off by less than a
#: thousandth of it; kernels and models that compute in float32 inside come closer.
TOLERANCE = 1e-4
#: Of the same kernels on the same shapes in float64, where the workload's own format was not equal to the last bit.
SAME_KERNELS = 1e-6
#: What the workload's own format may differ by then: a few units of the last place (2**-8 for bf16, 2**-11 for fp16).
ROUNDING = {Dtype.fp32: 1e-4, Dtype.amp_bf16: 3e-2, Dtype.bf16: 3e-2, Dtype.amp_fp16: 1e-2}
#: Of how far each parameter has moved. In float32 an update by Adam turns noise into steps of full size.
MOVED, MOVED_FLOAT32 = 3e-3, 0.3
FLOOR = 1e-3
#: Gradients below this share of all are noise, whose updates say nothing.
NOISE_GRADIENT = 1e-5
#: Share of the parameters that has to be evidence.
ENOUGH = 0.9
#: Steps beyond `measure.verify_steps` that are gone for more evidence.
MORE_STEPS = 2
#: Samples of each batch on which micro-batches are compared.
SAMPLES = 8

#: Compute capabilities with float64 at half or a quarter of the float32 rate: P100, V100, A100, H100 and H200, B200.
DOUBLE_RATE = ((6, 0), (7, 0), (8, 0), (9, 0), (10, 0))
#: Scales of the gradient scaler that are tried until no step is skipped.
SCALES = (2.0**12, 2.0**6, 1.0)


@dataclass
class Differences:
    """What two records differ in."""

    errors: dict[str, tuple[float, str]]  # by kind: the largest relative error and where it is
    counts: list[str] = field(default_factory=list)  # numbers of updates, settings, random states: in words
    rng_equal: bool | None = None

    @property
    def none(self) -> bool:
        return not self.counts and not any(error for error, _ in self.errors.values())

    def within(self, tolerance: float, moved: float) -> bool:
        return not self.counts and not self.beyond(tolerance, moved)

    def beyond(self, tolerance: float, moved: float) -> dict[str, tuple[float, str]]:
        return {k: e for k, e in self.errors.items() if not e[0] <= (moved if k == "parameters" else tolerance)}

    def words(self, tolerance: float = 0.0, moved: float = 0.0) -> str:
        found = [
            f"{kind} differ by {error:.2g}" + (f", most at {where}" if where else "")
            for kind, (error, where) in self.beyond(tolerance, moved).items()
        ]
        return "; ".join(found + self.counts)


def verify(config: Config, device: torch.device, data: DataSource, shared: Path | str | None = None) -> Verification:
    """Compare `config.strategy` with the baseline on `device`; on a smaller batch or fewer blocks where it must be.

    shared: a folder in which trials of other processes leave and find what they have in common.

    Raises:
        NotFinite: the baseline's own loss is no number.
    """
    started = time.perf_counter()
    strategy, batch = config.strategy, config.workload.global_batch_size
    hooks = strategy.checkpoint.granularity is not Granularity.none or strategy.offload.placement is not Placement.none
    found = []
    with plain_surroundings(device):
        comparison = _Comparison(config, device, data, None if shared is None else Path(shared))
        if hooks:
            found.append(comparison.fitting(comparison.same_kernels))
        if micro_batch_size(strategy, batch) < batch and all(v.passed for v in found):
            found.append(comparison.fitting(comparison.micro_batches))
    result = _joined(found) if found else Verification(passed=True, tolerance=0.0, bit_equal=True, status="equal")
    if device.type == "cuda":
        result.notes.append("compared with TF32 off")
    result.mode = "quick" if config.measure.verify == "quick" else "full"
    result.seconds = time.perf_counter() - started - comparison.shared_s
    return result


def _joined(found: list[Verification]) -> Verification:
    """Both questions' answers as one: what went wrong, else the larger errors and the smaller share."""
    result = next((v for v in found if not v.passed), found[-1])
    for other in found:
        if other is result:
            continue
        result.notes += [n for n in other.notes if n not in result.notes]
        if result.passed:
            for name in (field.name for field in fields(Verification) if field.name.endswith("_rel_err")):
                known = [v for v in (getattr(result, name), getattr(other, name)) if v is not None]
                setattr(result, name, max(known, default=None))
            result.compared_share = min((v.compared_share for v in found if v.compared_share is not None), default=None)
            result.rng_equal = other.rng_equal if result.rng_equal is None else result.rng_equal
    return result


#: What was computed already, by everything that it depends on: shared by the strategies of a comparison.
_records: OrderedDict[str, Record | None] = OrderedDict()
KEPT_RECORDS = 8


class _Comparison:
    """The runs of one strategy's verification."""

    def __init__(self, config: Config, device: torch.device, data: DataSource, shared: Path | None) -> None:
        self.config, self.device, self.data, self.shared = config, device, data, shared
        quick = config.measure.verify == "quick"
        self.steps = 1 if quick else config.measure.verify_steps
        self.most_steps = self.steps if quick else self.steps + MORE_STEPS
        self.shared_s = 0.0  # seconds that went into what other strategies use, too

    def fitting(self, compare: Callable[[WorkloadConf, StrategyConf, How, str], Verification]) -> Verification:
        """`compare` on the whole batch; where that is too much memory on four samples, then on few blocks, too."""
        w, s = self.config.workload, self.config.strategy
        how = How(self.steps, self.most_steps)
        small, small_s = _fewer_samples(w, s)
        few, blocks = _fewer_blocks(small_s)
        samples = small.global_batch_size
        attempts = [
            (w, s, how, "full"),
            (small, small_s, how, f"reduced: {samples} samples"),
            (small, few, replace(how, blocks_kept=blocks), f"reduced: at most {blocks} blocks, {samples} samples"),
        ]
        reason = ""
        for number, (conf, strategy, h, scope) in enumerate(attempts):
            try:
                return compare(conf, strategy, h, scope)
            except NotFinite:
                raise
            except Exception as error:
                # A model that cannot be cut is not verified, which is no fault of the strategy's.
                if not is_out_of_memory(error) and number < 2:
                    raise
                reason = one_line(error)
            gc.collect()  # outside of the handler: the traceback held the failed attempt's tensors
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        return Verification(
            passed=False, tolerance=0.0, status="not_verified", scope=scope, cause="does_not_fit",
            reason=f"not even {scope.removeprefix('reduced: ')} could be compared: {reason}",
        )  # fmt: skip

    # -- the same kernels on the same shapes -------------------------------------------------------------------------

    def same_kernels(self, conf: WorkloadConf, strategy: StrategyConf, how: How, scope: str) -> Verification:
        plainly = StrategyConf(name="baseline", micro_batch_size=strategy.micro_batch_size)
        how, expected = self._settled(conf, plainly, strategy, how)
        try:
            actual = self._own(conf, strategy, how, expected)
        except CheckpointError as error:  # recomputation saw other tensors than forward: something has changed between
            return self._different(one_line(error), scope, "state", "", expected)
        except NotEquivalent as error:
            return self._different(str(error), scope, error.reason or "unknown", "", expected)
        found = differences(expected, actual)
        result = _verification(found, expected, scope, 0.0)
        if found.none:
            return _with_evidence(result, expected)
        repeated = self._shared(conf, plainly, strategy, how, "again")
        if differences(repeated, actual).none:  # the first run of all met something once: an import that draws numbers
            result = _verification(differences(repeated, actual), repeated, scope, 0.0)
            return _with_evidence(result, repeated)
        itself = differences(expected, repeated)
        rounding = ROUNDING[conf.dtype]
        if not itself.none:  # kernels that add in no fixed order, or a model that draws from elsewhere
            noise = max(error for error, _ in itself.errors.values())
            if found.counts == itself.counts and noise <= rounding and found.within(4 * noise, math.inf):
                result.notes.append(f"the baseline itself differs by {noise:.1g} from run to run")
                return _with_evidence(result, expected)
            if noise > rounding or itself.counts:
                return _not_comparable(result, itself.words(), "baseline_does_not_repeat")
        if found.within(rounding, math.inf) and self._equal_in_a_wider_format(conf, strategy, how):
            result.notes.append("not equal to the last bit, but in a wider format within rounding")
            return _with_evidence(result, expected)
        state = _moved_state(found, expected)
        cause = "state" if state else "random" if found.rng_equal is False else "unknown"
        return _refused(result, found.words(), cause, state)

    def _equal_in_a_wider_format(self, conf: WorkloadConf, strategy: StrategyConf, how: How) -> bool:
        """The same comparison in float64, where rounding is far below any mistake, or in float32 at least."""
        plainly = StrategyConf(name="baseline", micro_batch_size=strategy.micro_batch_size)
        for double in [True] * _double_is_cheap(self.device) + [False]:
            wider = conf if double else replace(conf, dtype=Dtype.fp32)
            tolerance = SAME_KERNELS if double else ROUNDING[Dtype.fp32]
            how = replace(how, double=double)
            try:
                expected = self._shared(wider, plainly, strategy, how)
                found = differences(expected, self._own(wider, strategy, how, expected))
                return found.within(tolerance, tolerance if double else math.inf)
            except Exception as error:
                if not double:
                    raise
                log.debug("not verified in float64: %s", one_line(error))
        return False

    # -- micro-batches against the whole batch -----------------------------------------------------------------------

    def micro_batches(self, conf: WorkloadConf, strategy: StrategyConf, how: How, scope: str) -> Verification:
        total = min(how.samples or conf.global_batch_size, SAMPLES)
        part = _part_of(strategy, conf.global_batch_size, total)
        whole, parts = StrategyConf(name="baseline"), StrategyConf(name="micro_batch", micro_batch_size=part)
        how = replace(how, samples=total, fixed_draws=True)
        for double in [True] * _double_is_cheap(self.device) + [False]:
            how, conf = replace(how, double=double), conf if double else replace(conf, dtype=Dtype.fp32)
            try:
                expected = self._shared(conf, whole, whole, how)
                actual = self._shared(conf, parts, whole, how, against=expected)
                break
            except NotFinite:
                raise
            except Exception:  # no room for twice the bytes, or a model with numbers of its own format in it
                if not double:
                    raise
        moved = MOVED if how.double else MOVED_FLOAT32
        found = differences(expected, actual, exact=False)
        result = _verification(found, expected, scope, TOLERANCE)
        result.dropout = "off"
        result.notes.append("compared with random draws fixed: micro-batches draw others than the whole batch")
        if found.within(TOLERANCE, moved):
            return _with_evidence(result, expected)
        words = found.words(TOLERANCE, moved)
        unfixed = expected.unfixed | actual.unfixed
        if unfixed:
            return _not_comparable(result, words, "random", ", ".join(sorted(unfixed)))
        itself = differences(expected, self._shared(conf, whole, whole, how, "again"), exact=False)
        if not itself.within(TOLERANCE, moved):
            return _not_comparable(result, itself.words(TOLERANCE, moved), "baseline_does_not_repeat")
        cause, where = self._cause_of_parts(conf, how, part, found, expected, actual)
        return _refused(result, words, cause, where)

    def _cause_of_parts(
        self, conf: WorkloadConf, how: How, part: int, found: Differences, expected: Record, actual: Record
    ) -> tuple[str, str]:
        state = _moved_state(found, expected)
        at_first, _ = _largest_error(_of_first_step(expected.grads), _of_first_step(actual.grads))
        if state and at_first <= TOLERANCE:
            return "state", state
        try:
            mixing = first_that_mixes(conf, self.device, self.data, how, part)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return ("state", state) if state else ("unknown", "")
        if mixing is not None or state:
            return ("state", state) if mixing is None else ("batch_statistics", mixing)
        if isinstance(build_loss(conf), MeanOverSamples) or found.errors["loss"][0] > TOLERANCE:
            return "loss_is_no_mean_over_samples", conf.loss.get("_target_", "")
        return "unknown", ""

    # -- runs --------------------------------------------------------------------------------------------------------

    def _settled(
        self, conf: WorkloadConf, strategy: StrategyConf, watched: StrategyConf, how: How
    ) -> tuple[How, Record]:
        """The reference under the first of SCALES that skips no step, and that scale."""
        for scale in SCALES:
            how = replace(how, scale=scale)
            try:
                return how, self._shared(conf, strategy, watched, how)
            except Overflow:
                continue
        raise NotFinite("the baseline's gradients are not finite, whatever the gradient scaler's scale")

    def _shared(
        self, conf: WorkloadConf, strategy: StrategyConf, watched: StrategyConf, how: How, again: str = "",
        against: Record | None = None,
    ) -> Record:  # fmt: skip
        """A run that other strategies are compared with as well; made once."""
        c = watched.checkpoint
        stride = c.segment_size if c.granularity is Granularity.segments else 1
        key = json.dumps(
            [plain(conf), micro_batch_size(strategy, conf.global_batch_size), str(self.device), self.data.version,
             asdict(how), stride, again, against is None],
            sort_keys=True,
        )  # fmt: skip
        if key in _records:
            _records.move_to_end(key)
            known = _records[key]
            if known is None:
                raise RuntimeError("this run is known to fail")
            return known
        started = time.perf_counter()
        file = None if self.shared is None else self.shared / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.pt"
        try:
            if file is not None and file.is_file():
                record: Record = torch.load(file, weights_only=False)
            else:
                record = run_and_record(conf, strategy, watched, self.device, self.data, how, against)
                _leave(record, file)
        except Overflow:
            raise
        except RuntimeError as error:
            if how.double and not is_out_of_memory(error):
                _records[key] = None  # a model that has no float64 is not asked again
            raise
        while len(_records) >= KEPT_RECORDS:
            _records.popitem(last=False)
        _records[key] = record
        if against is None:
            self.shared_s += time.perf_counter() - started
        return record

    def _own(self, conf: WorkloadConf, strategy: StrategyConf, how: How, expected: Record) -> Record:
        """The run of the strategy itself."""
        return run_and_record(conf, strategy, strategy, self.device, self.data, how, expected)

    def _different(self, reason: str, scope: str, cause: str, where: str, expected: Record) -> Verification:
        return Verification(
            passed=False, tolerance=0.0, status="not_equal", cause=cause, where=where, reason=reason, scope=scope,
            steps=expected.steps, compared_share=expected.share,
        )  # fmt: skip


def _leave(record: Record, file: Path | None) -> None:
    """For other processes, whole or not at all; one that finds no room computes it itself."""
    if file is None:
        return
    with contextlib.suppress(OSError, RuntimeError):
        file.parent.mkdir(exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        torch.save(record, partial)
        partial.replace(file)


# -- smaller ---------------------------------------------------------------------------------------------------------


def _double_is_cheap(device: torch.device) -> bool:
    """On a CPU, and on the cards made for computing: those of a graphics kind have a 64th of their float32 rate."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) in DOUBLE_RATE


def _fewer_samples(workload: WorkloadConf, strategy: StrategyConf) -> tuple[WorkloadConf, StrategyConf]:
    """Four samples, in as many micro-batches as the strategy would make, at most 4."""
    workload, strategy = copy.deepcopy(workload), copy.deepcopy(strategy)
    samples = min(4, workload.global_batch_size)
    if strategy.micro_batch_size is not None:
        strategy.micro_batch_size = max(1, strategy.micro_batch_size * samples // workload.global_batch_size)
    workload.global_batch_size = samples
    strategy.offload.min_tensor_kib = 0.0
    return workload, strategy


def _fewer_blocks(strategy: StrategyConf) -> tuple[StrategyConf, int]:
    """As few blocks as the strategy's layout needs."""
    strategy = copy.deepcopy(strategy)
    c, o = strategy.checkpoint, strategy.offload
    blocks = max(2, o.keep_last + 1, c.every_k + 1 if c.every_k > 1 else 1, c.segment_size)
    if c.granularity is Granularity.segments:
        blocks = max(blocks, c.segment_size + 1)
    if o.blocks and not o.blocks.startswith(("first:", "every:")):
        o.blocks = "first:1"
    elif o.blocks and o.blocks.startswith("first:"):
        o.blocks = f"first:{min(int(o.blocks[6:]), blocks - o.keep_last)}"
    return strategy, blocks


def _part_of(strategy: StrategyConf, batch: int, samples: int) -> int:
    """The micro-batch size among `samples` that splits them as the strategy splits the batch; uneven if it is."""
    size = micro_batch_size(strategy, batch)
    part = min(max(1, round(size * samples / batch)), samples - 1)
    if batch % size and samples % part == 0:
        part = next((p for p in range(part, samples) if samples % p), part)
    return part


# -- comparing -------------------------------------------------------------------------------------------------------


def differences(expected: Record, actual: Record, *, exact: bool = True) -> Differences:
    """What `actual` differs in. exact: the same kernels on the same shapes; else micro-batches, in float64."""
    pairs = zip(actual.loss, expected.loss, strict=True)
    losses = [abs(a - b) / max(abs(b), 1e-12) for a, b in pairs]
    errors = {
        "loss": (max((e if math.isfinite(e) else math.inf for e in losses), default=0.0), ""),
        "gradients": _largest_error(expected.grads, actual.grads),
    }
    if exact:
        errors["outputs"] = _largest_error(expected.outputs, actual.outputs)
        errors["gradients at the block inputs"] = _largest_error(expected.block_inputs, actual.block_inputs)
        errors["parameters"] = _largest_error(expected.parameters, actual.parameters)
    else:
        noise = _without_gradient(expected)
        errors["parameters"] = _largest_error(_movement(expected, noise), _movement(actual, noise))
    states = [_largest_error(v, actual.optimizer.get(k, {})) for k, v in expected.optimizer.items()]
    errors["optimizer's state"] = max(states, key=lambda e: e[0], default=(0.0, ""))
    errors["buffers"] = _state_error(expected, actual, exact, buffers=True)
    errors["attributes"] = _state_error(expected, actual, exact, buffers=False)
    counts = []
    if expected.optimizer.keys() != actual.optimizer.keys():
        counts.append("the optimizer keeps another kind of state")
    if actual.updates != expected.updates:
        counts.append(f"{actual.updates} optimizer steps instead of {expected.updates}")
    if actual.scheduler_steps != expected.scheduler_steps:
        counts.append(f"{actual.scheduler_steps} scheduler steps instead of {expected.scheduler_steps}")
    for a, b in zip(actual.settings, expected.settings):
        counts += [f"the optimizer's {k} is {a.get(k)} instead of {b[k]}" for k in b if not same(a.get(k), b[k])]
    rng_equal = None
    if exact:
        wrong = [name for name, state in expected.rng.items() if actual.rng.get(name) != state]
        rng_equal = not wrong
        if wrong:
            counts.append(f"the random state after the steps differs ({', '.join(wrong)})")
    return Differences(errors, counts, rng_equal)


def _of_first_step(kept: dict[str, Kept]) -> dict[str, Kept]:
    return {name: k for name, k in kept.items() if " in step " not in name}


def _without_gradient(record: Record) -> set[str]:
    """Trained parameters whose gradients are rounding noise, beside all others."""
    sizes = {name: _norm(_finite(kept.values)) for name, kept in record.grads.items()}
    total = math.sqrt(sum(v * v for v in sizes.values()))
    largest: dict[str, float] = {}
    for name, size in sizes.items():
        own = name.partition(" in step ")[0]
        largest[own] = max(largest.get(own, 0.0), size)
    return {name for name, size in largest.items() if size < NOISE_GRADIENT * total}


def _movement(record: Record, without: set[str]) -> dict[str, Kept]:
    return {
        name: Kept(_finite(kept.values) - _finite(record.before[name].values))
        for name, kept in record.parameters.items()
        if name not in without and name in record.before and kept.values.shape == record.before[name].values.shape
    }


def _state_error(expected: Record, actual: Record, exact: bool, *, buffers: bool) -> tuple[float, str]:
    """The largest error of buffers or of plain attributes, of those that a forward moves on."""
    own, other = (expected.buffers, actual.buffers) if buffers else (expected.attributes, actual.attributes)
    moving = expected.moving or frozenset()
    names: Iterable[str] = own.keys() | other.keys()
    if not (buffers and exact):
        # What a forward leaves behind of its batch alone differs by the batch, and no forward depends on it.
        names = [n for n in names if n in moving or (n in other and n not in own)]
    tensors: tuple[dict[str, Kept], dict[str, Kept]] = {}, {}
    for name in sorted(names):
        a, b = own.get(name), other.get(name)
        if isinstance(a, Kept) and isinstance(b, Kept):
            tensors[0][name], tensors[1][name] = a, b
        elif not same(a, b) and not _close(a, b, exact):
            return math.inf, name
    return _largest_error(*tensors)


def _close(a: object, b: object, exact: bool) -> bool:
    return not exact and isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=TOLERANCE)


def _moved_state(found: Differences, expected: Record) -> str:
    """The name of what forward moves and differs, "" where nothing does."""
    for kind in ("buffers", "attributes", "parameters"):
        error, where = found.errors[kind]
        if error > 0 and where and where.partition(" in step ")[0] in (expected.moving or ()):
            return where
    return ""


def _largest_error(expected: dict[str, Kept], actual: dict[str, Kept]) -> tuple[float, str]:
    """The largest relative error and where it is. Infinite where a tensor is missing, misshapen or not a number."""
    if expected.keys() != actual.keys():
        return math.inf, ", ".join(sorted(expected.keys() ^ actual.keys())[:3])
    different = [n for n, kept in expected.items() if not kept.same(actual[n])]
    if not different:
        return 0.0, ""
    floor = FLOOR * math.sqrt(sum(_norm(_finite(kept.values)) ** 2 for kept in expected.values()))
    largest, where = 0.0, ""
    for name in different:
        a, b = actual[name].values, expected[name].values
        if a.shape != b.shape or not _same_specials(a, b):
            return math.inf, name
        difference = _norm(_finite(a) - _finite(b))
        scale = max(_norm(_finite(b)), floor)
        # A checksum tells of a difference between the elements that were kept: small, and there.
        error = max(difference / scale if scale else math.inf * difference, 1e-16)
        norms = actual[name].norm, expected[name].norm
        if scale > floor and all(map(math.isfinite, norms)) and norms[1]:
            error = max(error, abs(norms[0] / norms[1] - 1))
        if not math.isfinite(error):
            return math.inf, name
        if error > largest:
            largest, where = error, name
    return largest, where


def _norm(tensor: Tensor) -> float:
    return tensor.norm().item()


def _finite(tensor: Tensor) -> Tensor:
    """In double precision, with zeros for infinities and NaNs: a causal mask's -inf must not hide every other error."""
    wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    return torch.where(wide.isfinite(), wide, 0.0)


def _same_specials(a: Tensor, b: Tensor) -> bool:
    """Whether infinities and NaNs are the same ones in the same places."""
    special = ~a.isfinite()
    if not torch.equal(special, ~b.isfinite()):
        return False
    return not special.any() or torch.allclose(a[special], b[special], equal_nan=True)


# -- what is said of it ----------------------------------------------------------------------------------------------


def _verification(found: Differences, expected: Record, scope: str, tolerance: float) -> Verification:
    errors = {name: error for name, (error, _) in found.errors.items()}
    largest = max(errors.values())
    return Verification(
        passed=True,
        status="equal",
        tolerance=tolerance,
        max_rel_err=largest if math.isfinite(largest) else None,
        loss_rel_err=errors["loss"],
        output_rel_err=errors.get("outputs"),
        grad_rel_err=errors["gradients"],
        grad_worst=found.errors["gradients"][1],
        block_input_grad_rel_err=errors.get("gradients at the block inputs"),
        buffer_rel_err=errors["buffers"],
        rng_equal=found.rng_equal,
        updates=expected.updates,
        bit_equal=found.none,
        scope=scope,
        steps=expected.steps,
        compared_share=expected.share,
    )


def _with_evidence(result: Verification, expected: Record) -> Verification:
    """Equal, unless what was compared is too little to say so."""
    if expected.share >= ENOUGH:
        return result
    reason = (
        f"after {expected.steps} steps only {expected.share:.0%} of the parameters had a finite gradient "
        "that is not zero; the rest was not compared"
    )
    return _refused(result, reason, "too_little_evidence", status="not_verified")


def _refused(
    result: Verification, reason: str, cause: str, where: str = "", *, status: str = "not_equal"
) -> Verification:
    return replace(result, passed=False, bit_equal=False, status=status, cause=cause, where=where, reason=reason)


#: `_refused` where it is no fault of the strategy's.
_not_comparable = partial(_refused, status="not_comparable")
