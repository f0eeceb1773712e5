"""Predicted against published peak memory: the predictor's yardstick, and any other setting of the same families.

    python benchmarks/published.py                     # all points: table, summary, results/published.json and .md
    python benchmarks/published.py --family cs336 --size medium --pass train --batch 1 --seq 2048 --amp bf16 \
        --checkpoint-group 2 --optimizer adamw_foreach --device rtx_4090        # one JSON line

published_points.json: 45 measurements of torch.cuda.max_memory_allocated and max_memory_reserved (MiB) made by others
on real GPUs, each with its source and every setting that is needed to repeat it. `confidence` says how sure the
settings are (high, medium-high, medium); null means that the number was not published. Nothing in the predictor is
fitted to them. published_notes.md, appended to the table, explains each miss.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.published_families import FAMILIES, Setting, build, setting_of  # noqa: E402
from benchmarks.published_report import Row, render, summary  # noqa: E402
from sweep.errors import EXIT_BAD_INPUT, EXIT_OK, BadInput, CannotPredict  # noqa: E402
from sweep.results import Prediction, write_json  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
CHOICES = {
    "size": ("small", "medium", "large", "xl"),
    "pass": ("forward", "forward_backward", "train"),
    "optimizer": ("course_adamw", "adamw_foreach"),
    "strategy": ("baseline", "checkpoint", "offload", "hybrid"),
    "variant": ("baseline", "mask_on_the_fly", "bf16", "torch_layernorm_gelu", "sdpa"),
    "dtype": ("fp32", "amp_fp16", "bf16"),
    "amp": ("none", "bf16"),
}
#: Flags that mean something to a family; the others have no effect there.
COMMON = ("family", "device", "batch", "seq", "amp", "limit_mib", "steps", "eval_batches")
RELEVANT = {
    "cs336": (*COMMON, "size", "what", "optimizer", "checkpoint_group"),
    "qwen2_5_0_5b": (*COMMON, "strategy"),
    "gpt_124m": (*COMMON, "variant"),
    "vit_l_16": (*COMMON, "dtype", "accumulation"),
}


def main(arguments: list[str] | None = None) -> int:
    args = _parse(arguments)
    try:
        if args.family is not None:
            print(json.dumps(one(_setting(args))))
        else:
            everything(args.points, args.out)
    except (BadInput, CannotPredict) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    return EXIT_OK


def one(setting: Setting) -> dict[str, Any]:
    """One prediction as plain data."""
    p = predicted(setting)
    flags = {name: value for name, value in dataclasses.asdict(setting).items() if name in RELEVANT[setting.family]}
    return {
        **{"pass" if name == "what" else name: value for name, value in flags.items() if value is not None},
        "allocated_mib": round(p.allocated_mib, 4),
        "reserved_mib": round(p.reserved_mib, 4),
        "context_mib": p.context_mib,
        "fits": p.fits,
        "headroom_mib": None if p.headroom_mib is None else round(p.headroom_mib, 1),
        "peak_phase": p.peak_phase,
        "peak_operator": p.peak_operator,
        "at_peak_mib": {k: round(v, 2) for k, v in p.at_peak_mib.items()},
        "evidence": "predicted",
        "seconds": round(p.seconds, 2),
    }


def predicted(setting: Setting) -> Prediction:
    from sweep.trial.predict import predict

    job = build(setting)
    return predict(job.config, **job.options)


def everything(points: Path, out: Path) -> None:
    """All published points: predict, compare, print, and keep."""
    rows = []
    for point in _read(points):
        setting = setting_of(point)
        rows.append(Row.of(point, setting.family, predicted(setting)))
        print(rows[-1].line(), flush=True)
    write_json({"summary": summary(rows), "rows": [row.as_dict() for row in rows]}, out / "published.json")
    notes = (ROOT / "benchmarks" / "published_notes.md").read_text(encoding="utf-8")
    page = f"# Predicted and published peak memory\n\n{render(rows)}\n{notes}"
    (out / "published.md").write_text(page, encoding="utf-8")
    print("\n" + render(rows))


def _read(points: Path) -> list[dict[str, Any]]:
    try:
        return list(json.loads(points.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise BadInput("--points", points, f"cannot be read ({error})", "give a file of published points") from error


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--family", choices=tuple(FAMILIES), help="one setting of this family; without it, all points")
    parser.add_argument("--device", default="a100_80gb", help="name of a profile in conf/device (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="samples per micro-batch")
    parser.add_argument("--seq", type=int, default=1024, help="tokens per sample")
    for name, values in CHOICES.items():
        default = getattr(Setting, "what" if name == "pass" else name)
        parser.add_argument(f"--{name}", choices=values, default=default, dest="what" if name == "pass" else name)
    parser.add_argument("--checkpoint-group", type=int, default=0, help="cs336: blocks per checkpoint; 0: none")
    parser.add_argument("--accumulation", type=int, default=1, help="vit_l_16: micro-batches per optimizer step")
    parser.add_argument("--limit-mib", type=float, help="the process's own limit (set_per_process_memory_fraction)")
    parser.add_argument("--steps", type=int, default=Setting.steps, help="steps, the last of which is the window")
    parser.add_argument("--eval-batches", type=int, help="evaluations in the window (default: as published)")
    parser.add_argument("--points", type=Path, default=ROOT / "benchmarks" / "published_points.json")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results (default: %(default)s)")
    return parser.parse_args(arguments)


def _setting(args: argparse.Namespace) -> Setting:
    names = {f.name for f in dataclasses.fields(Setting)}
    values = {name: value for name, value in vars(args).items() if name in names}
    if values["eval_batches"] is None:
        values["eval_batches"] = int(args.family == "qwen2_5_0_5b")  # its notebooks evaluate within the window
    for name in ("batch", "seq", "accumulation", "steps"):
        if values[name] < 1:
            raise BadInput(f"--{name}", values[name], "is below 1", "give 1 or more")
    if values["checkpoint_group"] < 0:
        raise BadInput("--checkpoint-group", values["checkpoint_group"], "is below 0", "give 0 for none, or 1 or more")
    return Setting(**values)


if __name__ == "__main__":
    sys.exit(main())
