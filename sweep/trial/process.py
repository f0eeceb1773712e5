"""A trial in its own process: no peak, fragmentation or broken CUDA context carries over, and a crash is a result.

The parent writes request.json into the trial's folder and starts `python -m sweep.trial.process <folder>`; the child
writes result.json there (run.json: one repeat of a trial; traced.json: a look inside of one) and tells its progress as
JSON lines on standard output.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from sweep.config.check import typed
from sweep.config.schema import Config, plain
from sweep.errors import BadInput
from sweep.interrupts import end_with_parent
from sweep.results import Outcome, Run, Trace, TrialResult, from_dict, read_trial, write_json
from sweep.trial.measure import Progress, no_progress
from sweep.trial.trial import describe, run_repeat, run_trace, run_trial, save

#: Start of an interpreter, imports and the model; the trial itself is limited by measure.timeout_s.
STARTUP_S = 120.0
RESULT, RUN, TRACED = "result.json", "run.json", "traced.json"
TAIL_CHARACTERS = 4000


def run_isolated(
    config: Config,
    name: str,
    folder: Path,
    *,
    progress: Progress = no_progress,
    first_round: bool = False,
    shared: Path | None = None,
) -> TrialResult:
    """Run one trial in a fresh process. Raises BadInput as the trial would; everything else is in the result.

    shared: see sweep.trial.verify.verify.
    """
    started = time.perf_counter()
    request = {"config": plain(config), "name": name, "first_round": first_round, "shared": shared and str(shared)}
    failed = run_child(request, folder, RESULT, config.measure.timeout_s, progress)
    if failed is None:
        return read_trial(folder / RESULT)
    result = describe(config, name)
    result.outcome, result.error = failed[0].value, failed[1]
    result.details = (folder / "stderr.log").read_text(errors="replace")[-TAIL_CHARACTERS:]
    result.wall_s = time.perf_counter() - started
    return result


def run_isolated_repeat(config: Config, index: int, folder: Path, *, progress: Progress = no_progress) -> Run:
    """Repeat a trial's timed run in a fresh process, as round `index`. Whatever goes wrong is in Run.error.

    folder: for the request, the answer and the process's errors.
    """
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    request = {"config": plain(config), "repeat": index}
    try:
        failed = run_child(request, folder, RUN, config.measure.timeout_s, progress)
    except BadInput as error:
        failed = Outcome.invalid, str(error)
    if failed is None:
        return from_dict(Run, json.loads((folder / RUN).read_text(encoding="utf-8")))
    seed = config.workload.seed + index % config.measure.seeds
    outcome, wrong = failed
    return Run(index, seed, started_at, fresh_process=True, error=wrong, outcome=outcome.value)


def run_isolated_trace(config: Config, name: str, folder: Path, *, progress: Progress = no_progress) -> Trace:
    """Trace a trial in a fresh process, into `folder`. Raises RuntimeError where that process gave no trace."""
    failed = run_child({"config": plain(config), "trace": name}, folder, TRACED, config.measure.timeout_s, progress)
    if failed is not None:
        last = [line for line in (folder / "stderr.log").read_text(errors="replace").splitlines() if line.strip()]
        raise RuntimeError(f"{failed[1]}: {last[-1]}" if last else failed[1])
    return from_dict(Trace, json.loads((folder / TRACED).read_text(encoding="utf-8")))


def run_child(
    request: dict[str, Any],
    folder: Path,
    answer: str,
    timeout_s: float,
    progress: Progress,
    module: str = "sweep.trial.process",
) -> tuple[Outcome, str] | None:
    """Let a fresh process write `folder / answer`. Returns None where it is there, else what happened, in words."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / answer).unlink(missing_ok=True)
    write_json(request, folder / "request.json")
    with (folder / "stderr.log").open("wb") as stderr:
        child = subprocess.Popen(
            [sys.executable, "-m", module, str(folder)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            stdin=subprocess.PIPE,  # see `end_with_parent`
            env=_environment(),
            start_new_session=True,  # so that whatever it starts can be ended with it
        )
        try:
            bad_input = _follow(child, progress, time.perf_counter() + timeout_s + STARTUP_S)
        except subprocess.TimeoutExpired:
            _kill(child)
            if (folder / answer).is_file():  # it was done, only its process did not end
                return None
            return Outcome.timeout, f"measure.timeout_s={timeout_s:g}: it did not end in time and was killed"
        except BaseException:
            _kill(child)
            raise
        finally:
            assert child.stdin is not None
            child.stdin.close()
    if bad_input is not None:
        raise bad_input
    if (folder / answer).is_file():
        return None
    return Outcome.crashed, f"the process {_how_it_ended(child.returncode)}"


def _follow(child: subprocess.Popen[bytes], progress: Progress, deadline: float) -> BadInput | None:
    """Hand on the child's progress until it ends. Raises TimeoutExpired at the deadline (perf_counter seconds)."""
    lines: queue.Queue[bytes | None] = queue.Queue()
    assert child.stdout is not None
    threading.Thread(target=_read_lines, args=(child.stdout, lines), daemon=True).start()
    bad_input = None
    while True:
        left = deadline - time.perf_counter()
        try:
            line = lines.get(timeout=max(left, 0.0))
        except queue.Empty:
            raise subprocess.TimeoutExpired(child.args, deadline) from None
        if line is None:
            child.wait(timeout=30)
            return bad_input
        try:
            message = json.loads(line)
        except ValueError:
            continue  # something that the user's own code printed
        if isinstance(message, dict) and "progress" in message:
            progress(*message["progress"])
        elif isinstance(message, dict) and "bad_input" in message:
            bad_input = BadInput(*message["bad_input"])


def _read_lines(stream: IO[bytes], lines: queue.Queue[bytes | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _kill(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code} and no result"
    name = signal.Signals(-code).name
    hint = " (often the host's out-of-memory killer)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def _environment() -> dict[str, str]:
    """The parent's, with its import path, so that the user's own modules are found whatever the working directory."""
    env = dict(os.environ)
    root = str(Path(__file__).resolve().parents[2])
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([root, *(p for p in sys.path if p)]))
    env.pop("MLFLOW_RUN_ID", None)
    return env


def main(folder: Path) -> int:
    end_with_parent()
    # Only progress goes to standard output; what a model or library prints goes where errors go.
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(**message: object) -> None:
        channel.write(json.dumps(message) + "\n")

    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    config, name = typed(request["config"]), request.get("name")

    def progress(done: int, total: int, what: str) -> None:
        say(progress=[done, total, what])

    try:
        if "trace" in request:
            write_json(run_trace(config, request["trace"], folder, progress=progress), folder / TRACED)
            return 0
        if name is None:
            run = run_repeat(config, request["repeat"], progress=progress)
            run.fresh_process = True
            write_json(run, folder / RUN)
            return 0
        shared = request["shared"] and Path(request["shared"])
        result = run_trial(config, name, progress=progress, first_round=request["first_round"], shared=shared)
    except BadInput as error:
        value = error.value if isinstance(error.value, (str, int, float, type(None))) else str(error.value)
        say(bad_input=[error.key, value, error.wrong, error.todo])
        return 2
    for run in result.measurement.runs if result.measurement is not None else ():
        run.fresh_process = True
    save(result, folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
