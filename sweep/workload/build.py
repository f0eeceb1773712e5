"""From a workload's config to its parts. Anything with an nn.Module, a loss and batches can be one (`_target_`)."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, Protocol, TypeVar, cast

import torch
from hydra.errors import InstantiationException
from hydra.utils import get_class, get_object, instantiate
from torch import Tensor, nn

from sweep.config.schema import Dtype, Implementation, OptimizerName, Scheduler, WorkloadConf
from sweep.errors import BadInput, CannotPredict
from sweep.workload.data import Batch, checked, map_batch, samples_in, seed_everything


class DataSource(Protocol):
    """Batches of host tensors, the same for every strategy: they depend on the seed and the step alone.

    `same_shapes = True` on a source promises that all its batches of one size have the same shapes. Where that is not
    said, all batches that will run are drawn once before, to find the largest.
    """

    version: str  # digest of the data

    def describe(self) -> dict[str, str | int]: ...

    def train_batch(self, step: int, size: int) -> Batch: ...

    def eval_batch(self, index: int, size: int) -> Batch: ...


class Loss(Protocol):
    """The SUM of the loss over a batch's targets (0-dim), and how many targets a batch has."""

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor: ...

    def count(self, batch: Batch) -> int: ...


@dataclass(frozen=True)
class Block:
    """A repeated part of the model: what strategies recompute or offload."""

    name: str  # qualified, such as "layers.3"
    module: nn.Module

    @property
    def group(self) -> str:
        """The list that it belongs to: blocks of one list come one after the other and are alike."""
        return self.name.rpartition(".")[0]


@dataclass
class Workload:
    conf: WorkloadConf
    device: torch.device
    model: nn.Module
    blocks: list[Block]
    data: DataSource
    loss: Loss
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None
    scaler: torch.amp.GradScaler | None
    #: What the loss holds of modules and parameters (a learned temperature, class centres, a teacher), None: nothing.
    loss_state: nn.Module | None = None
    #: Device that autocast names; differs from `device` in prediction: CUDA's autocast rules on fake CPU tensors.
    autocast_device: str = field(default="")

    @property
    def grad_clip_norm(self) -> float | None:
        return self.conf.grad_clip_norm

    def modules_with_state(self) -> list[tuple[str, nn.Module]]:
        """All that is trained, with the prefix of its names: the model (""), and the loss where it has state."""
        return [("", self.model), *([] if self.loss_state is None else [("loss.", self.loss_state)])]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of the model and of the loss, each once, frozen ones too."""
        return _each_once((p + n, t) for p, m in self.modules_with_state() for n, t in m.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        return _each_once((p + n, t) for p, m in self.modules_with_state() for n, t in m.named_buffers())

    def parameters(self) -> list[nn.Parameter]:
        return [p for _, p in self.named_parameters()]

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Model and loss in evaluation mode, inside. Afterwards each module is in the mode that it was in."""
        modules = [m for _, m in self.modules_with_state()]
        before = [(m, m.training) for top in modules for m in top.modules()]
        try:
            for module in modules:
                module.eval()
            yield
        finally:
            for module in modules:
                module.train()  # by its own method, which may do more than set the flags
            for module, mode in before:
                module.training = mode  # such as that of a teacher, which stays in evaluation mode

    def autocast(self) -> AbstractContextManager[object]:
        """Autocast for model and loss, or nothing."""
        dtype = AUTOCAST_DTYPE.get(self.conf.dtype)
        if dtype is None:
            return nullcontext()
        return torch.autocast(self.autocast_device or self.device.type, dtype=dtype)

    def train_batch(self, step: int) -> Batch:
        """The batch of an optimizer step. Raises BadInput where the source gives another number of samples."""
        size = self.conf.global_batch_size
        batch = checked(self.data.train_batch(step, size), size, self.data, "train_batch")
        return _floats_as(batch, self.conf.dtype)

    def eval_batch(self, index: int, size: int) -> Batch:
        """A held-out batch. Raises as `train_batch`."""
        return _floats_as(checked(self.data.eval_batch(index, size), size, self.data, "eval_batch"), self.conf.dtype)


_T = TypeVar("_T", bound=Tensor)


def _each_once(named: Iterator[tuple[str, _T]]) -> Iterator[tuple[str, _T]]:
    seen: set[int] = set()
    for name, tensor in named:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


AUTOCAST_DTYPE = {Dtype.amp_bf16: torch.bfloat16, Dtype.amp_fp16: torch.float16}


def build_workload(conf: WorkloadConf, device: torch.device, data: DataSource | None = None) -> Workload:
    """Model (seeded), blocks, data, loss, optimizer and scheduler on `device`. Workloads may share `data`."""
    data = data if data is not None else build_data(conf)
    model = build_model(conf, device)
    loss = build_loss(conf)
    state = _loss_state(loss, conf)
    if state is not None:
        state = (state.to(torch.bfloat16) if conf.dtype is Dtype.bf16 else state).to(device)
    optimizer = build_optimizer(conf, model, *([] if state is None else [state]))
    return Workload(
        conf=conf,
        device=device,
        model=model,
        blocks=find_blocks(model, conf.blocks),
        data=data,
        loss=loss,
        loss_state=state,
        optimizer=optimizer,
        scheduler=build_scheduler(conf, optimizer),
        scaler=torch.amp.GradScaler(device.type) if conf.dtype is Dtype.amp_fp16 else None,
    )


def build_data(conf: WorkloadConf) -> DataSource:
    return cast(DataSource, _instantiate("workload.data", conf.data))


def build_model(conf: WorkloadConf, device: torch.device | None = None) -> nn.Module:
    """The model in training mode, its weights a function of the seed. None: on the current default device."""
    _import_targets([conf.model, conf.loss])  # the loss is built next, and may have parameters
    seed_everything(conf.seed)
    model = _instantiate("workload.model", conf.model)
    if not isinstance(model, nn.Module):
        raise BadInput("workload.model._target_", conf.model["_target_"], "is no nn.Module", "name a module class")
    if conf.dtype is Dtype.bf16:
        model = model.to(torch.bfloat16)
    return (model if device is None else model.to(device)).train()


def build_outline(conf: WorkloadConf) -> nn.Module:
    """The model without its weights, on the meta device: names, shapes and blocks. Costs no memory for them."""
    try:
        with torch.device("meta"):
            return build_model(conf)
    except BadInput:
        raise
    except Exception:  # a model whose construction reads values
        return build_model(conf)


def build_loss(conf: WorkloadConf) -> Loss:
    """The loss. A callable without `count` is taken to return the mean over the samples that it was given."""
    loss = _plain_function(conf.loss) or _instantiate("workload.loss", conf.loss)
    if not callable(loss):
        raise BadInput("workload.loss._target_", conf.loss["_target_"], "is not callable", "name a function or class")
    return cast(Loss, loss) if hasattr(loss, "count") else MeanOverSamples(loss)


def _plain_function(node: dict[str, Any]) -> Callable[[nn.Module, Batch], Tensor] | None:
    """The function that `_target_` names where it is the loss itself, and not a class or function that makes one."""
    if set(node) != {"_target_"}:
        return None
    try:
        found = get_object(node["_target_"])
    except Exception:
        return None  # `_instantiate` says what is wrong
    takes = inspect.signature(found).parameters.values() if inspect.isfunction(found) else ()
    return found if sum(p.default is p.empty for p in takes) == 2 else None


class MeanOverSamples:
    """Adapts `f(model, batch) -> mean over the samples`."""

    def __init__(self, mean: Callable[[nn.Module, Batch], Tensor]) -> None:
        self.mean = mean

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.mean(model, batch) * self.count(batch)

    def count(self, batch: Batch) -> int:
        return samples_in(batch)


def _loss_state(loss: Loss, conf: WorkloadConf) -> nn.Module | None:
    """The module that the loss is, or one of those modules and parameters that it holds; None: it has neither.

    Raises BadInput for state that cannot be reached by a device, an optimizer or a new trial.
    """
    of: Any = loss.mean if isinstance(loss, MeanOverSamples) else loss
    if isinstance(of, nn.Module):
        return of
    held = nn.Module()
    for name, found in _held(of, "", set(), depth=3):
        if isinstance(found, nn.Module):
            held.add_module(name, found)
        elif isinstance(found, nn.Parameter):
            held.register_parameter(name, found)
        else:
            raise BadInput(
                "workload.loss._target_",
                conf.loss["_target_"],
                f"{name} takes gradients and is no parameter",
                "make it an nn.Parameter",
            )
    for function in (of, type(of).__call__):
        if isinstance(function, FunctionType):
            for name in function.__code__.co_names:
                module = function.__globals__.get(name)
                if isinstance(module, nn.Module) and any(p.requires_grad for p in module.parameters()):
                    raise BadInput(
                        "workload.loss._target_",
                        conf.loss["_target_"],
                        f"uses the global {name}, whose parameters would go from one trial into the next",
                        "hold it in a class that makes it anew",
                    )
    return held if held._modules or held._parameters else None


def _held(value: Any, name: str, seen: set[int], depth: int) -> Iterator[tuple[str, nn.Module | Tensor]]:
    """Modules and tensors that take gradients within a loss: its attributes, arguments and closure, by name."""
    if id(value) in seen or depth < 0:
        return
    seen.add(id(value))
    if isinstance(value, (nn.Module, Tensor)):
        if isinstance(value, (nn.Module, nn.Parameter)) or value.requires_grad:
            yield name, value
        return
    inner: Mapping[Any, Any] = {}
    if isinstance(value, partial):
        inner = {"function": value.func, **dict(enumerate(value.args)), **value.keywords}
    elif isinstance(value, MethodType):
        inner = {"self": value.__self__}
    elif isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        inner = {n: _contents(c) for n, c in cells}
    elif isinstance(value, (list, tuple)):
        inner = dict(enumerate(value))
    elif isinstance(value, Mapping):
        inner = value
    elif not isinstance(value, type) and hasattr(value, "__dict__"):
        inner = vars(value)
    for key, item in inner.items():
        part = str(key).replace(".", "_")
        yield from _held(item, f"{name}_{part}" if name else part, seen, depth - 1)


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def build_optimizer(conf: WorkloadConf, *modules: nn.Module) -> torch.optim.Optimizer:
    """The optimizer over all parameters of the modules that take gradients, each once."""
    o = conf.optimizer
    names = {OptimizerName.adamw: "AdamW", OptimizerName.adam: "Adam", OptimizerName.sgd: "SGD"}
    path = o.target or f"torch.optim.{names[o.name]}"
    try:
        cls = get_class(path)
    except Exception as error:
        todo = "give the import path of a class"
        raise BadInput("workload.optimizer.target", path, _first_line(error), todo) from error
    step = getattr(cls, "step", None)
    closure = inspect.signature(step).parameters.get("closure") if callable(step) else None
    if closure is not None and closure.default is closure.empty:
        todo = "name an optimizer whose step needs no closure"
        raise BadInput("workload.optimizer.target", path, "computes the loss again within its step", todo)
    accepted = inspect.signature(cls).parameters
    kwargs: dict[str, Any] = {"lr": o.lr}
    # A weight decay of zero is passed on too: torch's AdamW has another default.
    if "weight_decay" in accepted:
        kwargs["weight_decay"] = o.weight_decay
    choice = {
        Implementation.auto: {},
        Implementation.fused: {"fused": True},
        Implementation.foreach: {"foreach": True},
        Implementation.loop: {"foreach": False},
    }[o.implementation]
    kwargs |= {k: v for k, v in choice.items() if k in accepted} | o.kwargs
    try:
        return cls(list(dict.fromkeys(p for m in modules for p in m.parameters() if p.requires_grad)), **kwargs)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadInput("workload.optimizer", path, _first_line(error), "change workload.optimizer.*") from error


def build_scheduler(
    conf: WorkloadConf, optimizer: torch.optim.Optimizer
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """Warm-up, then constant, linear to zero or half a cosine to zero; stepped once per optimizer step."""
    s = conf.scheduler
    if s.name is Scheduler.constant and not s.warmup_steps:
        return None

    def factor(step: int) -> float:
        if step < s.warmup_steps:
            return (step + 1) / s.warmup_steps
        done = min(1.0, (step - s.warmup_steps) / max(1, s.total_steps - s.warmup_steps))
        if s.name is Scheduler.linear:
            return 1.0 - done
        if s.name is Scheduler.cosine:
            return 0.5 * (1.0 + torch.cos(torch.tensor(done * torch.pi)).item())
        return 1.0

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def compiled_module(model: nn.Module) -> str | None:
    """The name ("": the model itself) of a module that is compiled or TorchScript, whose kernels no one sees from
    outside. None: there is none."""
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            return name
        if any(cls.__name__ == "ScriptModule" for cls in type(module).__mro__):
            return name
    return None


def find_blocks(model: nn.Module, pattern: str | Iterable[str] | None = None) -> list[Block]:
    """The model's blocks, in the order in which they run as far as the structure tells.

    pattern: qualified module names in which `*` stands for anything within one level, such as "layers.*"; several are
        a list, or separated by commas. None: all lists of like modules, the outermost ones; of stages, which are lists
        of lists, the inner ones. Experts, heads and other parts of a block are no blocks.

    Returns [] where nothing is found by itself; raises BadInput for a pattern that matches nothing.
    """
    if pattern is not None:
        patterns = pattern.split(",") if isinstance(pattern, str) else list(pattern)
        return _each_block_once(b for p in patterns for b in _matching(model, p.strip()))
    lists = [group for group in _lists_of_blocks(model, "") if group]
    real = [group for group in lists if not all(_is_operator(b.module) for b in group)]
    lists = real or lists or _one_for_all(model)
    sizes = [sum(_size(b.module) for b in group) for group in lists]
    worth = [group for group, size in zip(lists, sizes, strict=True) if size >= WORTH * max(sizes)]
    # Decoders and the way up run last, in whatever order they are registered.
    worth.sort(key=lambda group: bool(_LATE.search(group[0].name)))
    return _each_block_once(b for group in worth for b in group)


#: Lists of blocks with a smaller share of the largest one's parameters are left out.
WORTH = 0.02
#: Lists whose members run side by side.
_PARTS = re.compile("expert|head|branch|adapter|lora", re.IGNORECASE)
_LATE = re.compile(r"(^|\.)(dec|up)", re.IGNORECASE)


def _matching(model: nn.Module, pattern: str) -> list[Block]:
    depth = pattern.count(".")
    found = [Block(n, m) for n, m in model.named_modules() if n.count(".") == depth and fnmatchcase(n, pattern)]
    if not found:
        known = ", ".join([n for n in patterns_of(n for n, _ in model.named_modules()) if n][:8])
        raise BadInput("workload.blocks", pattern, "matches no module", f"give a pattern such as one of: {known}")
    return found


def _each_block_once(blocks: Iterable[Block]) -> list[Block]:
    found: dict[nn.Module, Block] = {}
    for block in blocks:
        found.setdefault(block.module, block)
    return list(found.values())


def _one_for_all(model: nn.Module) -> list[list[Block]]:
    """The largest list of one module: it runs again and again, as in ALBERT."""
    lists = [(n, m) for n, m in model.named_modules() if type(m) is nn.ModuleList and len(set(m)) == 1]
    found = [Block(f"{n}.0", m[0]) for n, m in lists if not _is_list(m[0]) and _is_compound(m[0])]
    return [[max(found, key=lambda b: _size(b.module))]] if found else []


def _lists_of_blocks(module: nn.Module, name: str, *, numbered: bool = True) -> Iterator[list[Block]]:
    """The lists of blocks in a module, not looking inside of blocks. All blocks of the stages of one list are one."""
    taken: set[str] = set()
    for run in _runs(module, name, numbered=numbered):
        taken |= {b.name for b in run}
        yield _blocks_of_stages(run) or run
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}" if name else child_name
        if full not in taken:
            yield from _lists_of_blocks(child, full, numbered=numbered)


def _blocks_of_stages(run: list[Block]) -> list[Block]:
    """The blocks inside of the run's members, where these are stages; []: they are blocks themselves."""
    inside = [_blocks_of_stage(member) for member in run]
    kinds = {type(b.module) for blocks in inside for b in blocks}
    for index, member in enumerate(run):
        if not inside[index]:  # a stage may have a single block, which is no list by itself
            inside[index] = [
                Block(".".join(filter(None, (member.name, n, "0"))), m[0])
                for n, m in member.module.named_modules()
                if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m) == 1 and type(m[0]) in kinds
            ][:1]
    if 2 * sum(map(bool, inside)) < len(run):
        return []
    whole = [[] if _is_list(member.module) else [member] for member in run]
    return [b for blocks, member in zip(inside, whole, strict=True) for b in blocks or member]


def _blocks_of_stage(member: Block) -> list[Block]:
    whole = _size(member.module)
    if _is_list(member.module):  # it is never called itself
        found = [b for group in _lists_of_blocks(member.module, member.name) for b in group]
        children = [Block(f"{member.name}.{n}", m) for n, m in member.module.named_children() if _size(m)]
        return found or [b for b in children if not _is_list(b.module) and not _is_operator(b.module)]
    groups = list(_lists_of_blocks(member.module, member.name, numbered=False))
    groups = [g for g in groups if not all(_is_operator(b.module) for b in g)]
    groups = [g for g in groups if not _PARTS.search(g[0].name[len(member.name) :])]
    found = [b for group in groups for b in group]
    share = sum(_size(b.module) for b in found) / whole
    normed = all(any("norm" in type(m).__name__.lower() for m in b.module.modules()) for b in found)
    compound = all(_is_compound(b.module) for b in found)
    return found if share >= 0.5 and compound and (normed or share == 1) else []


def _runs(module: nn.Module, name: str, *, numbered: bool) -> Iterator[list[Block]]:
    """Runs of at least two like neighbours that have parameters: in a list, or as numbered attributes."""
    listed, run, stems = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)), list[Block](), ""
    for child_name, child in [*module.named_children(), ("", None)]:
        stem = "" if listed else re.sub(r"\d+$", "", child_name)
        fits = child is not None and _size(child) > 0
        fits = fits and (listed or (numbered and stem != child_name and not _is_operator(cast(nn.Module, child))))
        if run and not (fits and type(child) is type(run[-1].module) and stem == stems):
            if len(run) > 1:
                yield run
            run = []
        if fits and child is not None:
            run.append(Block(f"{name}.{child_name}" if name else child_name, child))
            stems = stem


def _is_list(module: nn.Module) -> bool:
    """Whether it has no forward that one could replace."""
    return type(module) in (nn.ModuleList, nn.ModuleDict)


def _is_operator(module: nn.Module) -> bool:
    """One of torch's layers that are a single operator, such as Linear."""
    plain = type(module).__module__.startswith("torch.nn.") and not any(True for _ in module.children())
    return plain and not isinstance(module, nn.RNNBase)


def _is_compound(module: nn.Module) -> bool:
    """Whether it has more than one weight: a convolution with its norm is no block."""
    return sum(p.dim() > 1 for p in module.parameters()) > 1


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def patterns_of(names: Iterable[str]) -> list[str]:
    """Names of modules with their numbers as `*`, each once: ["layers.0", "layers.1"] -> ["layers.*"]."""
    return list(dict.fromkeys(re.sub(r"(?<![^._])\d+(?=[._]|$)", "*", name) for name in names))


def to_device(batch: Batch, device: torch.device) -> Batch:
    """A copy on the device, on a CPU too: there the device is emulated, and its inputs count as device memory."""
    return map_batch(lambda tensor: tensor.to(device, non_blocking=True, copy=True), batch)


def _floats_as(batch: Batch, dtype: Dtype) -> Batch:
    if dtype is not Dtype.bf16:
        return batch
    return map_batch(lambda tensor: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor, batch)


def _import_targets(node: Any) -> None:
    """Import what a config names, so that a module that draws random numbers when it is imported changes no seed."""
    if isinstance(node, Mapping):
        if isinstance(node.get("_target_"), str):
            parts = node["_target_"].split(".")
            with suppress(Exception):  # the rest is attributes, and `_instantiate` says what is wrong
                for end in range(1, len(parts)):
                    importlib.import_module(".".join(parts[:end]))
        for item in node.values():
            _import_targets(item)
    elif isinstance(node, (list, tuple)):
        for item in node:
            _import_targets(item)


def _instantiate(key: str, node: dict[str, Any]) -> Any:
    target = node["_target_"]
    try:
        return instantiate({"_convert_": "all"} | node)  # plain lists and dicts, not OmegaConf's
    except InstantiationException as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, (BadInput, CannotPredict)):
                raise cause from None
            if isinstance(cause, ModuleNotFoundError) or "Error locating target" in str(error):
                raise BadInput(f"{key}._target_", target, _locating(error), "check the import path") from error
            cause = cause.__cause__
        wrong = f"cannot be built: {_first_line(error.__cause__ or error)}"
        raise BadInput(key, target, wrong, "check its arguments") from error


def _locating(error: BaseException) -> str:
    """Why an import path does not work: the innermost cause, which names the missing module or attribute."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"cannot be imported: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
