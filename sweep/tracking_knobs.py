"""A strategy in a few short parameters and a colour: how MLflow's page tells a hundred runs apart.

The whole config is logged too, in some eighty parameters; these are the few that MLflow's parallel coordinates, columns
and filters are for. They are values that were used, not ones that were asked for: MLflow drops a run from a chart where
a value is missing, and a micro-batch size of null (the whole batch at once) would be one.
"""

from __future__ import annotations

import colorsys
import math
from typing import Any

from sweep.knobs import CHANGES_LEAST_FIRST, change_rank
from sweep.results import TrialResult
from sweep.schema import OffloadConf, plain

#: Short, for the labels of axes and columns; no key of the config is called so.
STRATEGY, MICRO_BATCH, ACCUMULATION = "strategy", "micro_batch", "accumulation"
CHECKPOINT, OFFLOAD = "checkpoint", "offload"

#: Hue in degrees of each kind of strategy.
HUES = {"micro_batch": 212, "checkpoint": 28, "checkpoint_selective": 345, "offload": 150, "hybrid": 280}
BASELINE_COLOR = "#3f4650"
#: Lightness by halvings of the batch: the smaller the micro-batch, the darker.
SHADES = (0.68, 0.57, 0.47, 0.38, 0.29)


def knobs_of(config: dict[str, Any]) -> dict[str, str]:
    """The knobs of a resolved config; none where it has no strategy.

    `micro_batch`: samples at once. `accumulation`: micro-steps per optimizer step. `checkpoint`: none, blocks, blocks/2
    (every second), selective, segments of 2, or the parts. `offload`: none, inputs, all, first:2.
    """
    config = plain(config) if config else {}
    strategy = config.get("strategy")
    if not isinstance(strategy, dict):
        return {}
    knobs = {STRATEGY: str(strategy.get("name") or "")}
    batch = (config.get("workload") or {}).get("global_batch_size")
    micro = strategy.get("micro_batch_size") or batch
    if micro:
        at_once = min(int(micro), int(batch)) if batch else int(micro)
        knobs[MICRO_BATCH] = str(at_once)
        knobs |= {ACCUMULATION: str(-(-int(batch) // at_once))} if batch else {}
    knobs[CHECKPOINT] = _checkpoint(strategy.get("checkpoint") or {})
    knobs[OFFLOAD] = _offload(strategy.get("offload") or {})
    return {name: value for name, value in knobs.items() if value}


def color_of(result: TrialResult) -> str:
    """#rrggbb: the hue says what kind of strategy it is, the shade how small its micro-batches are."""
    kind, knobs = CHANGES_LEAST_FIRST[change_rank(result)], knobs_of(result.config)
    if kind not in HUES:
        return BASELINE_COLOR
    if kind == "checkpoint" and knobs.get(CHECKPOINT, "").startswith("selective"):
        kind = "checkpoint_selective"
    halvings = round(math.log2(int(knobs.get(ACCUMULATION, 1))))
    shade = SHADES[min(halvings, len(SHADES) - 1)]
    red, green, blue = colorsys.hls_to_rgb(HUES[kind] / 360, shade, 0.62)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def _checkpoint(c: dict[str, Any]) -> str:
    granularity, every_k = str(c.get("granularity", "none")), int(c.get("every_k") or 1)
    if granularity == "parts":
        return "+".join(str(part) for part in c.get("parts") or ()) or granularity
    if granularity == "segments":
        return f"segments of {c.get('segment_size', 1)}"
    return f"{granularity}/{every_k}" if granularity != "none" and every_k > 1 else granularity


def _offload(o: dict[str, Any]) -> str:
    """Where, and what differs from the defaults."""
    placement = str(o.get("placement", "none"))
    if placement == "none":
        return placement
    said = [str(o.get("blocks") or placement) if placement == "blocks" else placement]
    least, usual = float(o.get("min_tensor_kib", OffloadConf.min_tensor_kib)), OffloadConf.min_tensor_kib
    said += [f">={least:g}K"] if least != usual else []
    said += [f"keep {o['keep_last']}"] if o.get("keep_last", OffloadConf.keep_last) != OffloadConf.keep_last else []
    said += ["save_on_cpu"] if o.get("implementation") == "save_on_cpu" else []
    return " ".join(said)
