"""The stock Hydra plugin's sampler on a table of results.

hydra-optuna-sweeper 1.3.0 needs optuna below 3, so it runs in a virtual environment of its own, made on first use.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ENVIRONMENT = Path(__file__).resolve().parent / ".stock_venv"
#: SQLAlchemy 2 came after optuna 2.10, numpy 2 as well.
PACKAGES = ["hydra-optuna-sweeper==1.3.0", "optuna==2.10.1", "sqlalchemy<2", "numpy<2", "setuptools<81"]

#: Runs inside of that environment: the plugin's own defaults for its TPE, points as they are conditional on each other.
PROGRAM = """
import json, sys, warnings
warnings.simplefilter("ignore")
import optuna
from omegaconf import OmegaConf
from hydra_plugins.hydra_optuna_sweeper.config import TPESamplerConfig
optuna.logging.set_verbosity(optuna.logging.ERROR)
asked = json.load(sys.stdin)
points, values = asked["points"], asked["values"]
index = {json.dumps(p, sort_keys=True): i for i, p in enumerate(points)}
conf = OmegaConf.to_container(OmegaConf.structured(TPESamplerConfig))
conf = {k: v for k, v in conf.items() if not k.startswith("_")}

def suggest(trial):
    left, chosen = points, {}
    while True:
        keys = [k for k in left[0] if k not in chosen]
        if not keys:
            break
        key = keys[0]
        choices = list(dict.fromkeys(p[key] for p in left))
        # A key has the same choices wherever it means something, as Optuna asks for.
        chosen[key] = trial.suggest_categorical(key, all_choices[key])
        left = [p for p in left if p.get(key, None) == chosen[key]]
    return index[json.dumps(chosen, sort_keys=True)]

all_choices = {}
for p in points:
    for k, v in p.items():
        all_choices.setdefault(k, [])
        if v not in all_choices[k]:
            all_choices[k].append(v)

orders = []
for seed in range(asked["seeds"]):
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(**{**conf, "seed": seed}))
    order = []
    for _ in range(asked["runs"]):
        trial = study.ask()
        i = suggest(trial)
        order.append(i)
        study.tell(trial, values[i])
    orders.append(order)
print(json.dumps(orders))
"""


def stock(
    points: list[dict[str, Any]],
    values: list[float],
    *,
    seeds: int,
    runs: int,
    count: Callable[[list[int]], dict[str, Any]],
) -> list[dict[str, Any]] | str:
    """One count per seed, or why there is none. values: samples/s per point, 0 where it went out of memory."""
    python = ENVIRONMENT / "bin" / "python"
    try:
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True, capture_output=True, text=True)
        if not (ENVIRONMENT / "ready").exists():
            pip = [str(python), "-m", "pip", "install", "--quiet", *PACKAGES]
            subprocess.run(pip, check=True, capture_output=True, text=True)
            (ENVIRONMENT / "ready").touch()
    except (OSError, subprocess.CalledProcessError) as error:
        said = str(getattr(error, "stderr", "") or error).strip().splitlines()
        return f"not compared: {' '.join(PACKAGES)} could not be installed ({said[-1] if said else error})"
    asked = json.dumps({"points": points, "values": values, "seeds": seeds, "runs": runs})
    done = subprocess.run([str(python), "-c", PROGRAM], input=asked, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"not compared: {(done.stderr.strip().splitlines() or ['it failed'])[-1]}"
    return [count(order) for order in json.loads(done.stdout.strip().splitlines()[-1])]
