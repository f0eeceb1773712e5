"""Saving less: blocks (or groups, or parts of them) keep only their inputs and are computed again in backward.

Non-reentrant checkpointing with the random state preserved. Two things are added to torch's own: keyword arguments are
passed by position, since outer saved-tensor hooks (offload) see positional tensors only; and buffers that a forward
changes (BatchNorm's running statistics) are not changed again by recomputation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from sweep.errors import BadInput, NotEquivalent
from sweep.results import Phase
from sweep.schema import CheckpointConf, Granularity
from sweep.step import Phases
from sweep.strategy.patching import Forward, patched_forward
from sweep.workload import Block

#: Results that `selective` keeps: they are dear to compute. Everything else is cheap and computed again.
MATMUL_AND_ATTENTION = (
    "aten.mm.default",
    "aten.addmm.default",
    "aten.bmm.default",
    "aten.baddbmm.default",
    "aten.convolution.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_fused_attention_overrideable.default",
)

ContextPair = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def check(conf: CheckpointConf, blocks: list[Block]) -> None:
    """Raise BadInput where the config does not fit the model's blocks."""
    if conf.granularity is Granularity.none:
        return
    count = len(blocks)
    if not blocks:
        raise BadInput(
            "strategy.checkpoint.granularity",
            conf.granularity.name,
            "the model has no repeated blocks",
            "name them with workload.blocks",
        )
    size, key = (
        (conf.segment_size, "segment_size") if conf.granularity is Granularity.segments else (conf.every_k, "every_k")
    )
    if size > count:
        raise BadInput(f"strategy.checkpoint.{key}", size, f"the model has only {count} blocks", f"give 1 to {count}")
    if conf.granularity is Granularity.parts:
        _parts(conf, blocks)
    if conf.granularity is Granularity.selective:
        _kept_operators(conf)


@contextmanager
def checkpointing(conf: CheckpointConf, blocks: list[Block], phases: Phases) -> Iterator[None]:
    """The blocks' forwards recompute as `conf` says, inside."""
    check(conf, blocks)
    with ExitStack() as stack:
        for module, wrap in _wrappers(conf, blocks, phases):
            stack.enter_context(patched_forward(module, wrap))
        yield


def _wrappers(
    conf: CheckpointConf, blocks: list[Block], phases: Phases
) -> Iterable[tuple[nn.Module, Callable[[Forward], Forward]]]:
    chosen = [b.module for b in blocks[:: conf.every_k]]
    if conf.granularity in (Granularity.blocks, Granularity.selective):
        kept = _kept_operators(conf) if conf.granularity is Granularity.selective else None
        return [(m, lambda f, m=m: recomputed(f, [m], phases, kept)) for m in chosen]  # type: ignore[misc]
    if conf.granularity is Granularity.parts:
        return [(m, lambda f, m=m: recomputed(f, [m], phases, None)) for m in _parts(conf, blocks)]  # type: ignore[misc]
    if conf.granularity is Granularity.segments:
        modules = [b.module for b in blocks]
        groups = [modules[i : i + conf.segment_size] for i in range(0, len(modules), conf.segment_size)]
        return [pair for group in groups for pair in _segment(group, phases)]
    return []


def recomputed(forward: Forward, modules: list[nn.Module], phases: Phases, kept: frozenset[Any] | None) -> Forward:
    """`forward` under a checkpoint. `kept`: operators whose results are saved all the same; None: only the inputs are.

    `modules` are those that `forward` runs; their buffers are guarded while it is computed again.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        names, guard = list(kwargs), BufferGuard(modules)

        def call(*flat: Any) -> Any:
            positional, named = flat[: len(args)], dict(zip(names, flat[len(args) :], strict=True))
            return forward(*positional, **named)

        def contexts() -> ContextPair:
            first, again = (nullcontext(), nullcontext()) if kept is None else _selective(kept)
            return _all(guard.recording(), first), _all(phases(Phase.recompute), guard.discarding(), again)

        return checkpoint(
            call, *args, *kwargs.values(), use_reentrant=False, preserve_rng_state=True, context_fn=contexts
        )

    return run


class BufferGuard:
    """Lets a forward change buffers once, not again when it is recomputed.

    Recomputation works on copies of all small buffers, and of those larger ones that the first run changed by their
    version counters. These alone do not do: batch normalisation's kernels change running statistics without counting.
    """

    #: Buffers up to this size are copied without asking: statistics are small, masks and tables are not.
    SMALL_BYTES = 64 * 1024

    def __init__(self, modules: list[nn.Module]) -> None:
        self._owners = [m for top in modules for m in top.modules() if m._buffers]
        self._changed: list[tuple[nn.Module, str]] = []

    def _live(self) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
        for owner in self._owners:
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    yield owner, name, buffer

    @contextmanager
    def recording(self) -> Iterator[None]:
        before = {(id(owner), name): (buffer, buffer._version) for owner, name, buffer in self._live()}
        yield
        for owner, name, buffer in self._live():
            known, version = before.get((id(owner), name), (None, -1))
            small = buffer.numel() * buffer.element_size() <= self.SMALL_BYTES
            if small or buffer is not known or buffer._version != version:
                self._changed.append((owner, name))

    @contextmanager
    def discarding(self) -> Iterator[None]:
        originals = [(owner, name, owner._buffers[name]) for owner, name in self._changed]
        for owner, name, buffer in originals:
            owner._buffers[name] = None if buffer is None else buffer.detach().clone()
        try:
            yield
        finally:
            for owner, name, buffer in originals:
                owner._buffers[name] = buffer


_NO_CHAIN = (
    "strategy.checkpoint.granularity=segments: needs blocks that hand their first argument on, but these {}; "
    "use granularity=blocks"
)


def _segment(group: list[nn.Module], phases: Phases) -> list[tuple[nn.Module, Callable[[Forward], Forward]]]:
    """The group's first block computes all of them under one checkpoint; the others hand on what they are given.

    Right for blocks that are called one after the other, each on the result of the one before and with the same further
    arguments. Where a model does otherwise, `verify` finds it.
    """
    forwards = [module.forward for module in group]

    def whole(first: Forward) -> Forward:
        def chain(*args: Any, **kwargs: Any) -> Any:
            if not args:
                raise NotEquivalent(_NO_CHAIN.format("are called with keyword arguments alone"))
            state = args[0]
            for forward in [first, *forwards[1:]]:
                state = forward(state, *args[1:], **kwargs)
                if type(state) is not type(args[0]):
                    given, got = type(args[0]).__name__, type(state).__name__
                    raise NotEquivalent(_NO_CHAIN.format(f"are given a {given} and return a {got}"))
            return state

        return recomputed(chain, group, phases, None)

    def hand_on(_: Forward) -> Forward:
        return lambda state, *args, **kwargs: state

    return [(group[0], whole), *((module, hand_on) for module in group[1:])]


def _selective(kept: frozenset[Any]) -> ContextPair:
    first, again = _selective_of_torch(kept)
    draws = frozenset(op for op in kept if torch.Tag.nondeterministic_seeded in op.tags)
    states: deque[list[torch.Tensor]] = deque()
    return _all(first, _Recording(draws, states)), _all(again, _Restoring(draws, states))


class _Recording(TorchDispatchMode):
    """Notes the random state after each kept operator that draws random numbers, such as attention with dropout.

    Recomputation does not run what was kept, so that later draws would begin where it had begun: other dropout masks.
    """

    def __init__(self, draws: frozenset[Any], states: deque[list[torch.Tensor]]) -> None:
        super().__init__()
        self.draws, self.states = draws, states

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in self.draws:
            self.after_draw((out[0] if isinstance(out, (tuple, list)) else out).device)
        return out

    def after_draw(self, device: torch.device) -> None:
        on_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
        self.states.append([torch.get_rng_state(), *on_device])


class _Restoring(_Recording):
    def after_draw(self, device: torch.device) -> None:
        on_host, *on_device = self.states.popleft()
        torch.set_rng_state(on_host)
        for state in on_device:
            torch.cuda.set_rng_state(state, device)


def _selective_of_torch(kept: frozenset[Any]) -> ContextPair:
    # The policy keeps no state: torch asks it in both runs, and an answer that depended on earlier calls would differ.
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    first, again = create_selective_checkpoint_contexts(policy)
    return first, again


def _kept_operators(conf: CheckpointConf) -> frozenset[Any]:
    found = []
    for name in conf.keep_ops if conf.keep_ops is not None else MATMUL_AND_ATTENTION:
        try:
            namespace, op, *overload = name.split(".")
            found.append(getattr(getattr(getattr(torch.ops, namespace), op), overload[0] if overload else "default"))
        except (AttributeError, ValueError, RuntimeError):
            if conf.keep_ops is not None:  # a default that this torch does not have is no one's mistake
                raise BadInput(
                    "strategy.checkpoint.keep_ops", name, "is no operator of this torch", "write it as aten.mm.default"
                ) from None
    return frozenset(found)


def _parts(conf: CheckpointConf, blocks: list[Block]) -> list[nn.Module]:
    parts = []
    for pattern in conf.parts:
        found = [
            module
            for block in blocks[:: conf.every_k]
            for name, module in block.module.named_modules()
            if name and fnmatchcase(name, pattern)
        ]
        if not found:
            known = ", ".join(name for name, _ in blocks[0].module.named_children())
            raise BadInput(
                "strategy.checkpoint.parts", pattern, "matches nothing inside a block", f"a block has: {known}"
            )
        parts += found
    return list(dict.fromkeys(parts))


@contextmanager
def _all(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
