"""A trial in its own process: no peak, fragmentation or broken CUDA context carries over, and a crash is a result.

The parent writes request.json into the trial's folder and starts `python -m sweep.isolate <folder>`; the child writes
result.json there and reports its progress as JSON lines on standard output.
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
from pathlib import Path
from typing import IO

from sweep.errors import BadInput
from sweep.measure import Progress, no_progress
from sweep.results import Outcome, TrialResult, read_trial, write_json
from sweep.schema import Config, plain, typed
from sweep.trial import describe, run_trial, save

#: Start of an interpreter, imports and the model; the trial itself is limited by measure.timeout_s.
STARTUP_S = 120.0
TAIL_CHARACTERS = 4000


def run_isolated(config: Config, name: str, folder: Path, *, progress: Progress = no_progress) -> TrialResult:
    """Run one trial in a fresh process. Raises BadInput as the trial would; everything else is in the result."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").unlink(missing_ok=True)
    write_json({"config": plain(config), "name": name}, folder / "request.json")
    started = time.perf_counter()
    with (folder / "stderr.log").open("wb") as stderr:
        child = subprocess.Popen(
            [sys.executable, "-m", "sweep.isolate", str(folder)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            stdin=subprocess.DEVNULL,
            env=_environment(),
            start_new_session=True,  # so that whatever it starts can be ended with it
        )
        try:
            bad_input = _follow(child, progress, started + config.measure.timeout_s + STARTUP_S)
        except subprocess.TimeoutExpired:
            _kill(child)
            if (folder / "result.json").is_file():  # the trial was done, only its process did not end
                return read_trial(folder / "result.json")
            return _failure(
                config, name, folder, started, Outcome.timeout,
                f"measure.timeout_s={config.measure.timeout_s:g}: the trial did not end in time and was killed",
            )  # fmt: skip
        except BaseException:
            _kill(child)
            raise
    if bad_input is not None:
        raise bad_input
    if (folder / "result.json").is_file():
        return read_trial(folder / "result.json")
    return _failure(config, name, folder, started, Outcome.crashed, f"the process {_how_it_ended(child.returncode)}")


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


def _failure(config: Config, name: str, folder: Path, started: float, outcome: Outcome, error: str) -> TrialResult:
    result = describe(config, name)
    result.outcome, result.error = outcome.value, error
    result.details = (folder / "stderr.log").read_text(errors="replace")[-TAIL_CHARACTERS:]
    result.wall_s = time.perf_counter() - started
    return result


def _environment() -> dict[str, str]:
    """The parent's, with its import path, so that the user's own modules are found whatever the working directory."""
    env = dict(os.environ)
    root = str(Path(__file__).resolve().parent.parent)
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([root, *(p for p in sys.path if p)]))
    env.pop("MLFLOW_RUN_ID", None)
    return env


def main(folder: Path) -> int:
    # Only progress goes to standard output; what a model or library prints goes where errors go.
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(**message: object) -> None:
        channel.write(json.dumps(message) + "\n")

    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    try:
        result = run_trial(
            typed(request["config"]),
            request["name"],
            progress=lambda done, total, what: say(progress=[done, total, what]),
        )
    except BadInput as error:
        value = error.value if isinstance(error.value, (str, int, float, type(None))) else str(error.value)
        say(bad_input=[error.key, value, error.wrong, error.todo])
        return 2
    save(result, folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
