"""A short comparison on the CUDA device that is here, kept with device, driver and torch version.

    python benchmarks/gpu.py [overrides]      # such as workload=llama_1b; about three minutes with the default

Runs `train.py -m strategy=glob(*) workload=gpt2_124m`, prints predicted against measured peaks, and writes
benchmarks/results/gpu_<device>.json (the report and the environment). Exit code 2 without a CUDA device.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(overrides: list[str]) -> int:
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device here; `python train.py mode=predict device=...` needs none", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "train.py"), "-m", "strategy=glob(*)", f"hydra.sweep.dir={folder}"]
        done = subprocess.run([*command, "workload=gpt2_124m", "measure.steps=10", *overrides], check=False)
        report = json.loads((Path(folder) / "report.json").read_text(encoding="utf-8"))
    print(
        f"\n{'strategy':24}{'predicted MiB':>15}{'measured MiB':>15}{'error':>9}{'reserved: pred.':>20}{'measured':>12}"
    )
    for row in [report["baseline"], *report["candidates"]]:
        predicted, peak = row["predicted"] or {}, row["peak_mib"]
        if predicted and row["outcome"] == "ok":
            error = predicted["allocated_mib"] / peak - 1
            print(
                f"{row['name']:24}{predicted['allocated_mib']:15.1f}{peak:15.1f}{100 * error:8.2f}%"
                f"{predicted['reserved_mib']:20.1f}{row['reserved_mib'] or 0:12.1f}"
            )
    name = re.sub(r"\W+", "_", torch.cuda.get_device_name()).lower()
    path = ROOT / f"benchmarks/results/gpu_{name}.json"
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}: {path}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
