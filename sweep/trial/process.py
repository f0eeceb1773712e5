"""A function of a config in a process of its own: no peak, fragmentation or broken CUDA context carries over.

The parent writes request.json into a folder and starts `python -m sweep.trial.process FOLDER`; the child calls the
function that the request names, writes what it returns as JSON and tells its progress as JSON lines on standard output.
"""

from __future__ import annotations

import contextlib
import json
import os
import pkgutil
import queue
import signal
import subprocess
import sys
import threading
import time
import typing
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, TypeVar

from sweep.config.check import typed
from sweep.config.schema import Config, plain
from sweep.errors import BadInput
from sweep.interrupts import end_with_parent
from sweep.results import Outcome, Run, Trace, TrialResult, read_as, write_json
from sweep.trial.measure import Progress, no_progress
from sweep.trial.trial import describe, run_repeat, run_trace, run_trial

T = TypeVar("T")

#: Start of an interpreter, imports and the model; the trial itself is limited by measure.timeout_s.
STARTUP_S = 120.0
TAIL_CHARACTERS = 4000


class Died(RuntimeError):
    """A process gave no answer. last_words: the end of what it wrote to standard error."""

    def __init__(self, outcome: Outcome, what: str, last_words: str) -> None:
        super().__init__(what)
        self.outcome, self.last_words = outcome, last_words


def run_isolated(
    config: Config,
    name: str,
    folder: Path,
    *,
    progress: Progress = no_progress,
    first_round: bool = False,
    shared: Path | None = None,
) -> TrialResult:
    """`run_trial` in a fresh process. Raises BadInput as it does; everything else is in the result."""
    started = time.perf_counter()
    more = {"name": name, "first_round": first_round, "shared": shared and str(shared)}
    try:
        result = call(run_trial, config, folder, "result.json", progress, **more)
    except Died as died:
        result = describe(config, name)
        result.outcome, result.error, result.details = died.outcome.value, str(died), died.last_words
        result.wall_s = time.perf_counter() - started
    for run in result.measurement.runs if result.measurement is not None else ():
        run.fresh_process = True
    return result


def run_isolated_repeat(config: Config, index: int, folder: Path, *, progress: Progress = no_progress) -> Run:
    """`run_repeat` in a fresh process. Whatever goes wrong is in Run.error."""
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        run = call(run_repeat, config, folder, "run.json", progress, index=index)
    except Died as died:
        seed = config.workload.seed + index % config.measure.seeds
        run = Run(index=index, seed=seed, started_at=started_at, error=str(died), outcome=died.outcome.value)
    run.fresh_process = True
    return run


def run_isolated_trace(config: Config, name: str, folder: Path, *, progress: Progress = no_progress) -> Trace:
    """`run_trace` in a fresh process. Raises RuntimeError where that gave no trace."""
    try:
        return call(run_trace, config, folder, "traced.json", progress, name=name, into=str(folder))
    except Died as died:
        last = [line for line in died.last_words.splitlines() if line.strip()]
        raise RuntimeError(f"{died}: {last[-1]}" if last else str(died)) from died


def call(
    function: Callable[..., T], config: Config, folder: Path, answer: str, progress: Progress, **arguments: Any
) -> T:
    """`function(config, progress=..., **arguments)` in a fresh process, which leaves what it returns as folder/answer.

    function: of a module, returning a dataclass. arguments: what JSON can hold. Raises Died, or BadInput as it does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / answer).unlink(missing_ok=True)
    name = f"{function.__module__}:{function.__qualname__}"
    request = {"function": name, "config": plain(config), "arguments": arguments, "answer": answer}
    write_json(request, folder / "request.json")
    failed = _run(folder, answer, config.measure.timeout_s, progress)
    if failed is not None:
        raise Died(*failed, (folder / "stderr.log").read_text(errors="replace")[-TAIL_CHARACTERS:])
    return read_as(typing.get_type_hints(function)["return"], folder / answer)


def _run(folder: Path, answer: str, timeout_s: float, progress: Progress) -> tuple[Outcome, str] | None:
    """Let a fresh process answer the request in `folder`. None where the answer is there, else what happened."""
    with (folder / "stderr.log").open("wb") as stderr:
        child = subprocess.Popen(
            [sys.executable, "-m", "sweep.trial.process", str(folder)],
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
    return None if (folder / answer).is_file() else (Outcome.crashed, f"the process {_how_it_ended(child.returncode)}")


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

    def progress(done: int, total: int, what: str) -> None:
        say(progress=[done, total, what])

    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    function = pkgutil.resolve_name(request["function"])
    try:
        found = function(typed(request["config"]), progress=progress, **request["arguments"])
    except BadInput as error:
        value = error.value if isinstance(error.value, (str, int, float, type(None))) else str(error.value)
        say(bad_input=[error.key, value, error.wrong, error.todo])
        return 2
    write_json(found, folder / request["answer"])
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
