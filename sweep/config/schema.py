"""The configuration: every field typed, with its unit and meaning beside it.

Hydra composes the YAML files under conf/ into these dataclasses, which refuse unknown keys and wrong types.
Ranges, and what depends on several fields at once, are checked in check.py.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Optional

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import MISSING, OmegaConf

# OmegaConf reads the annotations at run time and knows Optional/Union, hence no `X | None` in this file.
# Members are lower case: OmegaConf matches enum values by member name.


class Mode(Enum):
    measure = "measure"  # run it
    predict = "predict"  # predict the peak, run nothing
    diagnose = "diagnose"  # predict what fills the memory, what could be saved and in which order to try


class Dtype(Enum):
    fp32 = "fp32"
    bf16 = "bf16"  # parameters and computation
    amp_bf16 = "amp_bf16"  # fp32 parameters, forward and loss under autocast
    amp_fp16 = "amp_fp16"  # likewise in fp16, with a gradient scaler


class Attention(Enum):
    sdpa = "sdpa"  # torch's scaled_dot_product_attention, fused where there is a kernel
    eager = "eager"  # written out: the probabilities are stored


class OptimizerName(Enum):
    adamw = "adamw"
    adam = "adam"
    sgd = "sgd"


class Implementation(Enum):
    auto = "auto"  # torch's default: foreach on CUDA, loop on a CPU
    fused = "fused"  # one kernel, no temporaries
    foreach = "foreach"  # a few kernels over all tensors, temporaries about as large as the parameters
    loop = "loop"  # tensor by tensor


class Scheduler(Enum):
    constant = "constant"
    cosine = "cosine"
    linear = "linear"


class Granularity(Enum):
    none = "none"
    blocks = "blocks"  # every `every_k`-th block is recomputed
    segments = "segments"  # groups of `segment_size` consecutive blocks, each recomputed as one
    selective = "selective"  # every `every_k`-th block, but results of matmul and attention operators are kept
    parts = "parts"  # only the parts of a block that match `parts` (such as its attention or its MLP)


class Placement(Enum):
    none = "none"
    inputs = "inputs"  # block inputs only: what checkpointing leaves
    blocks = "blocks"  # everything that the chosen `blocks` save
    all = "all"  # everything that is saved, outside of blocks too


class OffloadImplementation(Enum):
    hooks = "hooks"  # ours: skips parameters, keeps strides and aliases
    save_on_cpu = "save_on_cpu"  # torch.autograd.graph.save_on_cpu around the whole model, for comparison


class Isolate(Enum):
    auto = "auto"  # a fresh process on CUDA, in process on a CPU
    always = "always"
    never = "never"


class MinEvidence(Enum):
    auto = "auto"  # measured on a GPU, cpu on a CPU, predicted when only predicting
    predicted = "predicted"
    cpu = "cpu"
    smoke = "smoke"
    measured = "measured"


@dataclass
class OptimizerConf:
    name: OptimizerName = OptimizerName.adamw
    implementation: Implementation = Implementation.auto
    lr: float = 3e-4
    weight_decay: float = 0.0
    kwargs: dict[str, Any] = field(default_factory=dict)  # passed on as they are: betas, eps, momentum, ...
    target: Optional[str] = None  # import path of another optimizer class, instead of `name`


@dataclass
class SchedulerConf:
    name: Scheduler = Scheduler.constant
    warmup_steps: int = 0  # optimizer steps
    total_steps: int = 1000  # optimizer steps until the end of the decay


@dataclass
class WorkloadConf:
    """What is trained. Fixed within a comparison."""

    name: str = MISSING
    model: dict[str, Any] = MISSING  # `_target_` (an nn.Module) and its arguments
    data: dict[str, Any] = MISSING  # `_target_` (a data source) and its arguments
    loss: dict[str, Any] = field(default_factory=lambda: {"_target_": "sweep.workload.loss.CrossEntropy"})
    dtype: Dtype = Dtype.fp32
    attention: Attention = Attention.sdpa
    optimizer: OptimizerConf = field(default_factory=OptimizerConf)
    scheduler: SchedulerConf = field(default_factory=SchedulerConf)
    grad_clip_norm: Optional[float] = None  # largest norm of all gradients together
    global_batch_size: int = 16  # samples per optimizer step
    seq_len: Optional[int] = None  # tokens per sample, where there are any
    seed: int = 0  # weights, batches and dropout
    blocks: Any = None  # pattern of module names, such as "layers.*", or several in a list; null: found by itself
    hold_outputs: bool = True  # as in `logits = model(x)`: they stay until the step ends; false: they go with the loss


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


@dataclass
class CheckpointConf:
    granularity: Granularity = Granularity.none
    every_k: int = 1  # blocks and selective: the first block of every k is recomputed
    segment_size: int = 1  # segments: blocks per segment
    parts: list[str] = field(default_factory=list)  # parts: patterns of names inside a block, such as "attn" or "mlp"
    keep_ops: Optional[list[str]] = (
        None  # selective: operators kept, such as "aten.mm.default"; null: matmul and attention
    )


@dataclass
class OffloadConf:
    placement: Placement = Placement.none
    blocks: Optional[str] = None  # blocks: "first:N", "every:K" or "0,3,5"
    min_tensor_kib: float = 64.0  # smaller tensors stay on the device
    keep_last: int = 1  # blocks at the end whose tensors stay: backward needs them at once
    pin_memory: bool = True  # CUDA: page-locked host buffers
    implementation: OffloadImplementation = OffloadImplementation.hooks


@dataclass
class StrategyConf:
    """How the memory is spent. The only thing that changes within a comparison."""

    name: str = MISSING
    micro_batch_size: Optional[int] = None  # samples; null: the whole global batch at once
    checkpoint: CheckpointConf = field(default_factory=CheckpointConf)
    offload: OffloadConf = field(default_factory=OffloadConf)


@dataclass
class BudgetConf:
    memory_mib: Optional[float] = None  # cap on the peak; null: the device's capacity
    min_throughput_ratio: Optional[float] = None  # to the baseline's samples per second
    min_samples_per_s: Optional[float] = None
    max_eval_loss_ratio: Optional[float] = None  # to the baseline's held-out loss
    max_eval_loss: Optional[float] = None
    min_saving_mib: Optional[float] = None  # smallest saving against the baseline that counts
    min_evidence: MinEvidence = MinEvidence.auto  # least evidence that may be accepted


@dataclass
class DeviceConf:
    name: str = MISSING
    type: str = "auto"  # auto | cpu | cuda
    index: int = 0
    capacity_mib: Optional[float] = None  # on a CPU: enforced by the ledger; a CUDA device: set as the process's limit
    context_mib: Optional[float] = None  # what driver and CUDA context take beside the allocator
    compute_capability: Optional[str] = None  # such as "8.9"; null: not CUDA
    cublas_workspace_mib: Optional[float] = None  # per handle and stream; null: by card and torch
    multiprocessors: Optional[int] = None  # streaming multiprocessors; null: not known
    memory_bandwidth_gb_s: Optional[float] = None  # 1e9 bytes per second
    link_bandwidth_gb_s: Optional[float] = None  # host to device, one way, 1e9 bytes per second
    torch_name: Optional[str] = None  # pattern of torch.cuda.get_device_name, such as "*A100*80GB*"
    alloc_conf: str = ""  # PYTORCH_CUDA_ALLOC_CONF to predict for ("expandable_segments:True"); "": this process's
    peak_tflops: dict[str, float] = field(default_factory=dict)  # by dtype, dense: fp32, tf32, bf16, fp16
    source: str = ""  # where the numbers were published


@dataclass
class MeasureConf:
    warmup_steps: int = 2  # optimizer steps, not timed
    steps: int = 5  # timed optimizer steps per repeat
    repeats: int = 3
    interleave: bool = True  # repeats are whole runs, in turn over the trials (A B A B); a search repeats at once
    drift: bool = True  # with interleave: repeat the baseline at the end
    seeds: int = 1  # repeats differ in their seed, this many in turn: workload.seed, workload.seed + 1, ...
    eval_batches: int = 2  # held-out batches, before and after
    verify: Any = True  # compare with the baseline before measuring: true | false | quick (one step)
    verify_steps: int = 2  # optimizer steps compared, at least
    ledger: bool = True  # CPU: the memory pass (peaks are unknown without it); CUDA: the explanation
    isolate: Isolate = Isolate.auto
    timeout_s: float = 1800.0  # per trial with its first run, and per later run


@dataclass
class TrackingConf:
    enabled: bool = True
    uri: Optional[str] = None  # an MLflow server or database; null: MLFLOW_TRACKING_URI, else mlruns/mlflow.db
    experiment: str = "memory-strategies"
    system_metrics: bool = True  # MLflow's own sampling of CPU, GPU and memory


@dataclass
class SearchSpaceConf:
    """What `search=budget` and `search=pareto` choose from. null: made from the workload and its model."""

    micro_batch_sizes: Optional[list[int]] = None  # null: every divisor of the global batch
    every_k: list[int] = field(default_factory=lambda: [4, 2, 1])  # every k-th block is recomputed
    selective: bool = True  # blocks recomputed but for matmul and attention results
    parts: Optional[list[str]] = None  # parts of a block, each by itself; null: those with a tenth of its parameters
    placements: list[Placement] = field(
        default_factory=lambda: [Placement.none, Placement.inputs, Placement.blocks, Placement.all]
    )
    first_blocks: Optional[list[int]] = None  # placement=blocks: how many of the first; null: a quarter, half, 3/4
    min_tensor_kib: list[float] = field(default_factory=lambda: [64.0, 1024.0])


@dataclass
class SearchConf:
    """The search for the fastest strategy that fits. See conf/search/."""

    name: Optional[str] = None  # budget | pareto; null: no search, or one over a space of one's own
    n_trials: Optional[int] = 20  # trials run, those of earlier commands included; null: until the space is exhausted
    timeout_s: Optional[float] = None  # after that no new trial is begun
    seed: int = 0  # of the sampler
    preflight: bool = True  # a candidate that is predicted not to fit is not run
    margin: float = 0.02  # share by which prediction and measurement may differ without being told
    plan_points: int = 6  # candidates with the best estimates, tried right after the baseline; 0: no plan
    report_best: int = 10  # trials in the report, beside the baseline
    space: SearchSpaceConf = field(default_factory=SearchSpaceConf)


@dataclass
class Config:
    workload: WorkloadConf = MISSING
    strategy: StrategyConf = MISSING
    budget: BudgetConf = field(default_factory=BudgetConf)
    device: DeviceConf = MISSING
    measure: MeasureConf = field(default_factory=MeasureConf)
    tracking: TrackingConf = field(default_factory=TrackingConf)
    search: SearchConf = field(default_factory=SearchConf)
    mode: Mode = Mode.measure
    compare: bool = True  # run the baseline too, where the sweep leaves it out
    explain: bool = False  # profile the baseline and the preferred trial, and say where memory and time went


def plain(config: Any) -> Any:
    """A config dataclass as JSON's own types; enums by name."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: plain(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, Enum):
        return config.name
    if isinstance(config, dict):
        return {str(k): plain(v) for k, v in config.items()}
    if isinstance(config, (list, tuple)):
        return [plain(v) for v in config]
    return config


def encode(value: Any) -> str:
    """A value in Hydra's grammar, such that parsing gives back exactly this value and type."""
    if isinstance(value, QuotedString):
        value = value.text
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{encode(k)}:{encode(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(encode(v) for v in value) + "]"
    text = str(value)
    return text if _reads_back(text) else QuotedString(text, Quote.single).with_quotes()


@functools.cache
def _reads_back(text: str) -> bool:
    """Whether a string can stand without quotes, also inside of a list."""
    if not text or not all(c.isalnum() or c in "_-./+@%" for c in text):
        return False
    parsed = OverridesParser.create().parse_override(f"k=[{text}]").value()
    return isinstance(parsed, list) and parsed == [text]


def quarter_of(samples: int) -> int:
    """A quarter of the global batch, rounded up: `${quarter_of:${workload.global_batch_size}}` in a config."""
    return max(1, -(-samples // 4))


OmegaConf.register_new_resolver("quarter_of", quarter_of, replace=True)
ConfigStore.instance().store(name="schema", node=Config)
