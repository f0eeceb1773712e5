"""One run of a few steps, and everything that verification compares of it, on the host."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sweep.outcomes import NotFinite
from sweep.schema import Dtype, Granularity, StrategyConf, WorkloadConf
from sweep.step import Phases, run_step, split
from sweep.strategy import applied
from sweep.verify_draws import FixedDraws
from sweep.workload import Batch, DataSource, Workload, build_workload, map_batch, to_device
from sweep.workload.randomness import python_states, random_states, restore, seed_everything

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
        force = stack.enter_context(applied(strategy, workload.model, workload.blocks, samples, phases, device))
        draws = FixedDraws() if how.fixed_draws else None
        around: Callable[[], AbstractContextManager[object]] = force.around_forward
        if draws is not None:
            around = partial(_same_draws, draws, conf.seed, force.around_forward, record)
        handle = workload.optimizer.register_step_post_hook(lambda *_: _count(record))
        stack.callback(handle.remove)
        record.before = {n: Kept.of(p) for n, p in workload.named_parameters()}
        begun = _attributes(workload)
        seed_everything(conf.seed + 1)  # dropout
        while True:
            step, batch = record.steps, _batch(workload, record.steps, how)
            with _watching(workload, watched, step, record):
                result = run_step(
                    workload, batch, phases, micro_batch_size=force.micro_batch_size, around_forward=around
                )
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


def _count(record: Record) -> None:
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
        for name, tensor in _tensors(output):
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


def _tensors(output: Any, prefix: str = "output") -> Iterator[tuple[str, Tensor]]:
    if isinstance(output, Tensor):
        yield prefix, output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            yield from _tensors(value, f"{prefix}.{key}")
    elif isinstance(output, (list, tuple)):
        for index, value in enumerate(output):
            yield from _tensors(value, f"{prefix}.{index}")


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


def first_that_mixes(
    conf: WorkloadConf, device: torch.device, data: DataSource, how: How, part: int
) -> str | None:
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


def plain_surroundings(device: torch.device) -> AbstractContextManager[object]:
    """TF32 and cuDNN's search for the fastest kernel are off, inside: both differ from run to run or from fp32."""
    return _no_tf32() if device.type == "cuda" else nullcontext()


@contextmanager
def _no_tf32() -> Iterator[None]:
    precision, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.benchmark
    torch.set_float32_matmul_precision("highest")
    cudnn.allow_tf32 = cudnn.benchmark = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        cudnn.allow_tf32, cudnn.benchmark = before
