"""Takes the pictures of docs/mlflow.md anew, from a running MLflow: the latest sweep as a person sees it.

python train.py -m 'strategy=glob(*)' explain=true
mlflow ui --backend-store-uri sqlite:///mlruns/mlflow.db
python docs/screenshots.py http://127.0.0.1:5000        # needs the dev extra, Chromium and chromedriver
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mlflow import MlflowClient
from PIL import Image

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

from browser import Page, open_page, programs  # noqa: E402

TYPE = "workflowType=machine_learning"


def latest_sweep(address: str) -> tuple[str, str, str]:
    """Experiment, run id and preferred trial's run id of the newest sweep that came to its end."""
    client = MlflowClient(address)
    experiments = [e.experiment_id for e in client.search_experiments()]
    found = client.search_runs(experiments, "tags.kind = 'sweep' and attributes.status = 'FINISHED'", max_results=1)
    if not found:
        raise SystemExit(f"{address}: there is no sweep here; run one first")
    sweep = found[0]
    children = client.search_runs(
        [sweep.info.experiment_id], f"tags.`mlflow.parentRunId` = '{sweep.info.run_id}'", max_results=1000
    )
    preferred = next((c for c in children if c.info.run_name == sweep.data.tags.get("preferred")), children[0])
    return sweep.info.experiment_id, sweep.info.run_id, preferred.info.run_id


def settled(page: Page) -> Page:
    """Without the assistant that MLflow opens over a third of the window."""
    close = "[data-component-id='mlflow.assistant.chat_panel.close']"
    page.run("document.querySelector(arguments[0])?.click()", close)
    page.until("the whole window", lambda: page.run("return !document.querySelector(arguments[0])", close))
    return page


def take(page: Page, experiment: str, sweep: str, trial: str, folder: Path) -> None:
    runs = f"#/experiments/{experiment}/runs"
    page.open(f"{runs}?viewStateShareKey=sweep-{sweep[:8]}&{TYPE}")
    page.until("the trials", lambda: len(page.rows()) >= 2)
    settled(page).picture(folder / "mlflow-table.png")
    page.open(f"{runs}?viewStateShareKey=sweep-{sweep[:8]}&compareRunsMode=CHART&{TYPE}")
    page.shows("Parallel Coordinates")
    drawn = "return document.querySelector('.parcoords text') && document.querySelector('.point') ? 1 : 0"
    page.until("the charts", lambda: page.run(drawn))
    settled(page).picture(folder / "mlflow-charts.png")
    page.open(f"{runs}/{sweep}?{TYPE}")
    page.shows("Verdict")
    settled(page).picture(folder / "mlflow-sweep.png")
    page.open(f"{runs}/{sweep}/artifacts?{TYPE}")
    page.click("div, span", "report.html")
    page.until("the report in a frame", lambda: page.run("return document.querySelectorAll('iframe').length"))
    settled(page).picture(folder / "mlflow-report.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("address", help="of the running MLflow, such as http://127.0.0.1:5000")
    parser.add_argument("--folder", type=Path, default=HERE / "images", help="where the pictures go")
    arguments = parser.parse_args()
    if programs() is None:
        raise SystemExit("Chromium or chromedriver is missing (Debian: apt-get install chromium chromium-driver)")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with open_page(arguments.address, width=1700, height=1050) as page:
        take(page, *latest_sweep(arguments.address), arguments.folder)
    for path in arguments.folder.glob("mlflow-*.png"):
        # A page has few colours: a third of the bytes.
        Image.open(path).convert("RGB").quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(
            path, optimize=True
        )
    print(f"wrote {', '.join(sorted(p.name for p in arguments.folder.glob('mlflow-*.png')))} to {arguments.folder}")


if __name__ == "__main__":
    main()
