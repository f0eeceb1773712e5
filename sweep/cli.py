"""From exceptions to exit codes: a person's mistake gets one line, an interruption its code, a bug its traceback."""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from sweep.addresses import ENVIRONMENT, conceal_word, without_secrets
from sweep.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_TERMINATED, BadInput
from sweep.interrupts import Terminated, ended_by_signals, whole

FULL_ERROR = "HYDRA_FULL_ERROR"


def guarded(main: Callable[[], Any]) -> int:
    """Run Hydra's main and return the exit code. With HYDRA_FULL_ERROR=1 exceptions keep their traceback.

    Ctrl-C and SIGTERM end it with the report of what was measured so far; a further one changes nothing.
    """
    sys.argv = with_multirun([sys.argv[0], *map(conceal_word, sys.argv[1:])])
    try:
        with ended_by_signals() as came:
            return _run(main, came)
    finally:
        os.environ.pop(ENVIRONMENT, None)


def _run(main: Callable[[], Any], came: Sequence[int]) -> int:
    before = os.environ.get(FULL_ERROR)
    os.environ[FULL_ERROR] = "1"  # Hydra would print its own version of the error and exit with 1
    try:
        main()
        return _exit_code()
    except (Exception, Escaping, KeyboardInterrupt) as caught:
        error = caught.error if isinstance(caught, Escaping) else caught
        terminated = isinstance(error, Terminated) or signal.SIGTERM in came[:1]
        # OmegaConf, interrupted between two of its statements, may raise what it finds in place of the interrupt.
        interrupted = bool(came) or isinstance(error, KeyboardInterrupt)
        bad = None if interrupted else as_bad_input(error)
        with suppress(KeyboardInterrupt), whole():
            _finish("KILLED" if interrupted else "FAILED", error)
            if interrupted:
                how = "terminated" if terminated else "interrupted"
                print(f"{how}; what was measured so far is kept", file=sys.stderr)
        if interrupted:
            return EXIT_TERMINATED if terminated else EXIT_INTERRUPTED
        if bad is None or before == "1":
            raise error from error.__cause__
        print(f"error: {without_secrets(str(bad))}", file=sys.stderr)
        return EXIT_BAD_INPUT
    finally:
        os.environ.pop(FULL_ERROR)
        if before is not None:
            os.environ[FULL_ERROR] = before


#: Hydra's flags that say what to do; it takes one of them.
_MODES = ("-m", "--multirun", "-r", "--run", "-c", "--cfg", "-i", "--info", "-sc", "--shell-completion", "-h", "--help",
          "--hydra-help", "--version")  # fmt: skip


def with_multirun(argv: list[str]) -> list[str]:
    """A search is many trials: choosing one (`search=budget`, `hydra/sweeper=budget`) means --multirun."""
    words = argv[1:]
    searches = any(w.lstrip("+").startswith(("search=", "hydra/sweeper=")) for w in words)
    searches &= not any(w.lstrip("+") in ("search=null", "search=") for w in words)
    said = {w.partition("=")[0] for w in words if w.startswith("-")}
    return [argv[0], "--multirun", *words] if searches and not said & set(_MODES) else argv


class Escaping(BaseException):
    """Carries an exception through places that swallow exceptions: Hydra turns those of a callback into warnings."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def not_swallowed() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise Escaping(error) from error


def _finish(status: str, error: BaseException) -> None:
    """Close the session of this process, if it got so far as to open one.

    The frames that the error has left keep cursors, and so locks of the store, and whatever else was large in them.
    """
    for each in _chain(error):
        traceback.clear_frames(each.__traceback__)
    session_module = sys.modules.get("sweep.session")
    if session_module is not None and session_module.Session.current is not None:
        session_module.Session.current.finish(status)


def _exit_code() -> int:
    session_module = sys.modules.get("sweep.session")
    return 0 if session_module is None else session_module.Session.exit_code


def as_bad_input(error: BaseException) -> BadInput | None:
    """The person's mistake behind an exception, ours or Hydra's, or None."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, BadInput):
            return cause
        cause = cause.__cause__ or cause.__context__
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(error, (HydraException, OmegaConfBaseException)):
        return _from_hydra(error)
    if "Config group override must be a string" in str(error):
        nulls = [key for key, _, value in (word.partition("=") for word in sys.argv[1:]) if value in ("", "null")]
        group = nulls[-1] if nulls else "command line"
        return BadInput(group, None, "is no option of the group", "choose one; see --help")
    if key := _full_key(str(error)):  # OmegaConf names the key in whatever it runs into
        return BadInput(key, _value_on_command_line(key), "cannot be set so", "see --help for what may be set")
    return None


def _from_hydra(error: BaseException) -> BadInput:
    """One line out of Hydra's and OmegaConf's own messages."""
    from omegaconf.errors import OmegaConfBaseException

    text = "\n".join(str(e) for e in _chain(error))
    flat = " ".join(str(error).split())

    if m := re.search(
        r"Could not find '([\w./-]+)/([\w.-]+)'(?:.*?Available options in '[^']*':\s*(.*?))?(?:Config search path|$)",
        text,
        re.S,
    ):
        options = ", ".join((m.group(3) or "").split())
        return BadInput(
            m.group(1), m.group(2), "there is no such option", f"choose one of: {options}" if options else "see --help"
        )
    if m := re.search(r"[Mm]issing mandatory value: (\S+)", text):
        key = _full_key(text) or m.group(1)
        return BadInput(key, "???", "has to be given", f"add it, such as '+{key}={{_target_: my.module.Name}}'")
    if (m := re.search(r"Could not override '([^']+)'", text)) and m.group(1) in _known_keys():
        value = _value_on_command_line(m.group(1))
        return BadInput(m.group(1), value, "has keys that are not there yet", f"write +{m.group(1)}=...")
    if m := re.search(r"Could not override '([^']+)'", text):
        return BadInput(m.group(1), _value_on_command_line(m.group(1)), "there is no such key", _near(m.group(1)))
    if m := re.search(r"(?:Key|key) '([^']+)' (?:is )?not in '?(\w+)'?", text):
        key = _full_key(text) or m.group(1)
        return BadInput(key, _value_on_command_line(key), "there is no such key", _near(key))
    if m := re.search(r"Could not append to config. An item is already at '([^']+)'", text):
        return BadInput(m.group(1), _value_on_command_line(m.group(1)), "exists already", "leave out the +")
    if key := _full_key(text):
        outer = next((e for e in _chain(error) if isinstance(e, OmegaConfBaseException)), error)
        wrong = str(outer).strip().splitlines()[0].rstrip(".")
        return BadInput(key, _value_on_command_line(key), wrong, "give a value of that type; see --help")
    if m := re.search(r"LexerNoViableAltException: (.*)|mismatched input|no viable alternative|extraneous input", text):
        return BadInput(
            "command line",
            " ".join(sys.argv[1:]),
            flat.split(" See ")[0],
            "quote the override, such as 'strategy=glob(*)'",
        )
    return BadInput("command line", " ".join(sys.argv[1:]), flat[:300], "see --help")


def _chain(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain


def _full_key(text: str) -> str | None:
    match = re.search(r"full_key: (\S+)", text)
    return match.group(1) if match else None


def _value_on_command_line(key: str) -> str:
    for argument in sys.argv[1:]:
        name, _, value = argument.partition("=")
        if name.lstrip("+~") == key:
            return value
    return "?"


def _near(key: str) -> str:
    """What the key may have been meant to be."""
    import difflib

    known = _known_keys()
    close = (
        difflib.get_close_matches(key, known, n=3, cutoff=0.5)
        or [k for k in known if k.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]][:3]
    )
    return f"did you mean {' or '.join(close)}" if close else "see --help for what may be set"


def _known_keys() -> list[str]:
    """Every key of the typed config, dotted."""
    import dataclasses
    import typing

    from sweep import schema

    def keys(cls: Any, prefix: str) -> list[str]:
        found = []
        for name, hint in typing.get_type_hints(cls).items():
            found += keys(hint, f"{prefix}{name}.") if dataclasses.is_dataclass(hint) else [f"{prefix}{name}"]
        return found

    return keys(schema.Config, "")
