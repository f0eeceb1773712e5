"""Saving less: blocks (or groups, or parts of them) keep only their inputs and are computed again in backward.

Non-reentrant checkpointing with the random state preserved. Added to torch's own: the tensors in keyword arguments and
containers are passed by position, since outer saved-tensor hooks (offload) see positional tensors only; state that a
forward changes is what it was when it is computed again, and is not changed again (see `sweep.strategy.state`);
Python's and numpy's random numbers are drawn again as torch's are; and what was computed again is counted.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import CheckpointError, checkpoint

from sweep.config.schema import MATMUL_AND_ATTENTION, CheckpointConf, Granularity
from sweep.errors import BadInput, NotEquivalent, one_line, outcome_of
from sweep.results import Outcome, Phase
from sweep.strategy.state import StateGuard, restored, with_tensors, without_tensors
from sweep.workload import Block
from sweep.workload.step import Phases

Forward = Callable[..., Any]


@contextmanager
def patched_forward(module: nn.Module, wrap: Callable[[Forward], Forward]) -> Iterator[None]:
    """`module.forward` is `wrap(module.forward)` inside. Parameter names, hooks and the class stay as they are."""
    before = module.__dict__.get("forward")
    module.forward = wrap(module.forward)
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


Wrap = Callable[[Forward], Forward]
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
def checkpointing(conf: CheckpointConf, blocks: list[Block], phases: Phases) -> Iterator[Recomputed]:
    """The blocks' forwards recompute as `conf` says, inside."""
    check(conf, blocks)
    done = Recomputed()
    with ExitStack() as stack:
        stack.enter_context(differences_named(done))
        for module, wrap in _wrappers(conf, blocks, phases, done):
            stack.enter_context(patched_forward(module, wrap))
        yield done


def _wrappers(
    conf: CheckpointConf, blocks: list[Block], phases: Phases, done: Recomputed
) -> Iterable[tuple[nn.Module, Wrap]]:
    if conf.granularity is Granularity.segments:
        lists = [list(group) for _, group in groupby(blocks, key=lambda b: b.group)]
        groups = [of[i : i + conf.segment_size] for of in lists for i in range(0, len(of), conf.segment_size)]
        return [pair for group in groups for pair in _segment(group, phases, done)]
    if conf.granularity is Granularity.none:
        return []
    chosen = _parts(conf, blocks) if conf.granularity is Granularity.parts else blocks[:: conf.every_k]
    kept = _kept_operators(conf) if conf.granularity is Granularity.selective else None
    return [(b.module, lambda f, b=b: recomputed(f, [b], phases, done, kept)) for b in chosen]  # type: ignore[misc]


def recomputed(
    forward: Forward,
    parts: list[Block],
    phases: Phases,
    done: Recomputed,
    kept: frozenset[Any] | None = None,
) -> Forward:
    """`forward` under a checkpoint. `kept`: operators whose results are saved all the same; None: only the inputs are.

    `parts` are the modules that `forward` runs; their state is guarded while it is computed again.
    """
    name, guard = parts[0].name, StateGuard([(part.name, part.module) for part in parts])
    draws = _Draws()
    done.asked.append(name)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        done.called.add(name)
        # Containers are given as their tensors, or outer hooks would not see these; and each time that it is computed
        # again it gets containers of its own, as they were before the first run wrote to them.
        recipe, tensors = without_tensors((args, kwargs))
        first = [(args, kwargs)]
        del args, kwargs
        snapshot, states = guard.before(), draws.states()

        def call(*flat: Any) -> Any:
            positional, named = first.pop() if first else with_tensors(recipe, flat)
            return forward(*positional, **named)

        def contexts() -> ContextPair:
            def once_more() -> Iterator[AbstractContextManager[Any]]:
                yield phases(Phase.recompute)
                yield done.counting(name)
                yield restored(snapshot)
                yield states.again()
                if kept is not None:
                    yield _Reusing(kept, results)

            results: Results = defaultdict(list)
            return nullcontext() if kept is None else _Keeping(kept, results), _Repeatedly(once_more)

        out = checkpoint(call, *tensors, use_reentrant=False, preserve_rng_state=True, context_fn=contexts)
        guard.after(snapshot)
        draws.learn(states)
        return out

    return run


class _Repeatedly(AbstractContextManager[None]):
    """Contexts that are made anew each time they are entered: a second backward computes again once more."""

    def __init__(self, make: Callable[[], Iterator[AbstractContextManager[Any]]]) -> None:
        self._make = make
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self._make():
                stack.enter_context(context)
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


@dataclass
class _States:
    """The states of Python's generator and of numpy's global one, where that is drawn from."""

    python: Any
    numpy: Any

    @contextmanager
    def again(self) -> Iterator[None]:
        """Random numbers as they were drawn from here on, inside; torch's are checkpoint's own matter."""
        now = _States(random.getstate(), None if self.numpy is None else np.random.get_state())
        self._set()
        try:
            yield
        finally:
            now._set()

    def _set(self) -> None:
        random.setstate(self.python)
        if self.numpy is not None:
            np.random.set_state(self.numpy)


class _Draws:
    """Takes the states before each run. numpy's takes long, and is taken in the first runs and where these drew."""

    RUNS = 8

    def __init__(self) -> None:
        self._left, self._from_numpy = self.RUNS, False

    def states(self) -> _States:
        return _States(random.getstate(), np.random.get_state() if self._left or self._from_numpy else None)

    def learn(self, before: _States) -> None:
        if self._left and not self._from_numpy:
            self._left -= 1
            (_, keys, *rest), (_, keys_now, *rest_now) = before.numpy, np.random.get_state()
            self._from_numpy = rest != rest_now or not np.array_equal(keys, keys_now)


@dataclass
class Recomputed:
    """What was to be computed again, and what was."""

    asked: list[str] = field(default_factory=list)  # names; of a segment its first block's
    called: set[str] = field(default_factory=set)  # in training
    again: dict[str, int] = field(default_factory=dict)  # times
    last: str = "a block"

    @contextmanager
    def counting(self, name: str) -> Iterator[None]:
        self.again[name], self.last = self.again.get(name, 0) + 1, name
        try:
            yield
        except Exception as error:
            if type(error).__name__ != "_StopRecomputationError" and outcome_of(error) is Outcome.failed:
                wrong = f"fails when it is computed again ({one_line(error)})"
                raise NotEquivalent(f"{name} {wrong}; {_LOOK}", "state") from error
            raise


_LOOK = "look for state that its forward changes, outside of its module or in what it is given"


@contextmanager
def differences_named(done: Recomputed) -> Iterator[None]:
    """torch's error about a recomputation that saves other tensors than the forward did: named by the block."""
    try:
        yield
    except CheckpointError as error:
        wrong = f"computes other tensors when it is computed again ({one_line(error)})"
        raise NotEquivalent(f"{done.last} {wrong}; {_LOOK}", "state") from error


_NO_CHAIN = (
    "strategy.checkpoint.granularity=segments: needs blocks that hand their first argument on, but these {}; "
    "use granularity=blocks"
)


def _segment(group: list[Block], phases: Phases, done: Recomputed) -> list[tuple[nn.Module, Wrap]]:
    """The group's first block computes all of them under one checkpoint; the others hand on what they are given.

    Right for blocks that are called one after the other, each on the result of the one before and with the same further
    arguments. Where a model does otherwise, `verify` finds it.
    """
    forwards = [block.module.forward for block in group]

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

        return recomputed(chain, group, phases, done)

    def hand_on(_: Forward) -> Forward:
        return lambda state, *args, **kwargs: state

    return [(group[0].module, whole), *((block.module, hand_on) for block in group[1:])]


#: Results of kept operators, in order, with the random state after those that draw. None: used, or written to.
Results = dict[Any, list[tuple[Any, list[torch.Tensor]] | None]]


class _Keeping(TorchDispatchMode):
    """Keeps the results of some operators.

    torch's own selective contexts ask each operator's place in the order of all calls. Autocast's cache of cast weights
    changes that order, and a second backward finds nothing; here both compute what is not kept, or no longer.
    """

    def __init__(self, kept: frozenset[Any], results: Results) -> None:
        super().__init__()
        self.kept, self.results = kept, results
        self._places: dict[int, tuple[Any, int]] = {}  # of the results, by storage

    def keeps(self, func: Any, args: Any) -> bool:
        # Whether autocast casts a weight here depends on who has used it before, so casts of weights are not kept.
        return func in self.kept and not (func is _TO_COPY and args[0].is_leaf and args[0].requires_grad)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.keeps(func, args):
            draws = torch.Tag.nondeterministic_seeded in func.tags
            place = func, len(self.results[func])
            self.results[func].append((tree_map(_Kept, out), _random_states(out) if draws else []))
            self._places |= dict.fromkeys(_storages(out), place)
        elif func._schema.is_mutable and self._places:
            self._forget_written(func, args, kwargs or {})
        return out

    def _forget_written(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Drop the results that `func` has written to. Versions do not tell: a matmul's result is handed on as another
        tensor on the same memory, with a counter of its own, so that `scores += bias` changes what is kept unseen."""
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for storage in _storages(args[index] if index < len(args) else kwargs.get(argument.name)):
                    if storage in self._places:
                        kept, position = self._places.pop(storage)
                        self.results[kept][position] = None


def _storages(value: Any) -> list[int]:
    return [t.untyped_storage()._cdata for t in tree_leaves(value) if isinstance(t, torch.Tensor)]


class _Reusing(_Keeping):
    """Hands out the results that _Keeping has kept, each once. What was changed since is computed again.

    What is handed out is not drawn again, so that the random state moves on to where it was after drawing.
    """

    def __enter__(self) -> Any:
        self._position: dict[Any, int] = defaultdict(int)
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.keeps(func, args):
            position, results = self._position[func], self.results[func]
            self._position[func] += 1
            if position < len(results) and (found := results[position]) is not None:
                results[position] = None
                out, states = found
                if all(item.unchanged() for item in tree_leaves(out)):
                    _set_random_states(states)
                    return tree_map(lambda item: item.value, out)
        return func(*args, **(kwargs or {}))


class _Kept:
    """A kept result, or an item of one."""

    def __init__(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            # With its version counter, and without a graph, which would be a reference cycle.
            with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
                value = value.detach()
        self.value = value
        self._version = getattr(value, "_version", 0)

    def unchanged(self) -> bool:
        return getattr(self.value, "_version", 0) == self._version


def _random_states(out: Any) -> list[torch.Tensor]:
    device = next(t.device for t in tree_leaves(out) if isinstance(t, torch.Tensor))
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _set_random_states(states: list[torch.Tensor]) -> None:
    for state, put in zip(states, (torch.set_rng_state, torch.cuda.set_rng_state)):
        put(state)


_TO_COPY = torch.ops.aten._to_copy.default


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


def _parts(conf: CheckpointConf, blocks: list[Block]) -> list[Block]:
    parts: dict[nn.Module, Block] = {}
    for pattern in conf.parts:
        found = {
            module: Block(f"{block.name}.{name}", module)
            for block in blocks[:: conf.every_k]
            for name, module in block.module.named_modules()
            if name and fnmatchcase(name, pattern)
        }
        if not found:
            known = ", ".join(name for name, _ in blocks[0].module.named_children())
            raise BadInput(
                "strategy.checkpoint.parts", pattern, "matches nothing inside a block", f"a block has: {known}"
            )
        parts = found | parts
    return list(parts.values())
