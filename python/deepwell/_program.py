"""Calls the Go program: one child process per call, which never outlives it."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, NamedTuple

# Seconds that an interrupted program has to end in good order; train saves a checkpoint.
GRACE = 60.0


class Error(Exception):
    """What the program says went wrong.

    code is stable (docs/errors.md); where, cause and fix may be empty. exit is the status of the
    command, such as 3 for what does not fit. result is what the call made all the same, if
    anything: a plan that does not fit has a prediction.
    """

    def __init__(self, code: str, what: str, where: str = "", cause: str = "", fix: str = "",
                 exit: int = 1) -> None:
        super().__init__(code, what, where, cause, fix, exit)
        self.code = code
        self.what = what
        self.where = where
        self.cause = cause
        self.fix = fix
        self.exit = exit
        self.result: object = None

    def __str__(self) -> str:
        lines = [f"{self.code} {self.what}".strip()]
        lines += [f"  {name:<6} {text}" for name, text in
                  (("where", self.where), ("cause", self.cause), ("fix", self.fix)) if text]
        return "\n".join(lines)


class Said(NamedTuple):
    """The text and the JSON object that a command gave, and its error, if it failed."""

    text: str
    data: Mapping[str, Any]
    error: Error | None


def find() -> str:
    """Gives the path of the program that pip installed with this package.

    The environment variable DEEPWELL_BINARY names another one.
    """
    if path := os.environ.get("DEEPWELL_BINARY"):
        return path
    folders = [sysconfig.get_path("scripts"),
               sysconfig.get_path("scripts", scheme=sysconfig.get_preferred_scheme("user")),
               str(pathlib.Path(__file__).parents[1] / "bin")]  # of pip install --target
    for folder in folders:
        path = os.path.join(folder, "deepwell")
        if os.access(path, os.X_OK):
            return path
    raise Error("", "there is no deepwell program beside this package", where=", ".join(folders),
                fix="pip install the wheel, or set DEEPWELL_BINARY to the program")


def run(args: Sequence[str], files: Mapping[str, str] | None = None,
        feed: Callable[[int], None] | None = None) -> Said:
    """Runs one command and waits for it.

    files has the text of files that the command reads; an argument {name} stands for its path. feed
    writes the command's standard input into a descriptor. Progress goes to sys.stderr, as the command
    line has it. An interrupted call interrupts the command.
    """
    with tempfile.TemporaryDirectory(prefix="deepwell-") as scratch:
        paths = {}
        for name, text in (files or {}).items():
            paths["{" + name + "}"] = path = os.path.join(scratch, name)
            pathlib.Path(path).write_text(text, "utf-8")
        answer = os.path.join(scratch, "answer.json")
        command = [find(), "--json-file", answer, *(paths.get(a, a) for a in args)]
        text, status = _wait(command, feed)
        data: dict[str, Any] = {}
        with contextlib.suppress(FileNotFoundError):
            data = json.loads(_plain(pathlib.Path(answer).read_text("utf-8"), scratch))
    failed = data.pop("error", None)
    error = None
    if failed is not None:
        error = Error(**{k: v for k, v in failed.items() if k in
                         ("code", "what", "where", "cause", "fix", "exit")})
    elif status != 0:
        error = Error("", f"deepwell {args[0]} ended with status {status}", exit=status)
    return Said(_plain(text, scratch), data, error)


def _plain(text: str, scratch: str) -> str:
    """Leaves only the names of files in a folder that is gone when somebody reads about them."""
    return text.replace(scratch + os.sep, "")


def _wait(command: Sequence[str], feed: Callable[[int], None] | None) -> tuple[str, int]:
    """Runs a command to its end, in its own process group: Ctrl-C is passed on once, not twice."""
    inherit = _is_descriptor(sys.stderr)
    # The kernel ends the program when this thread ends, which waits for it.
    env = dict(os.environ, DEEPWELL_PARENT=str(os.getpid()))
    with contextlib.ExitStack() as stack:
        stdin, pipe = subprocess.DEVNULL, -1
        if feed is not None:
            stdin, pipe = os.pipe()
            stack.callback(os.close, pipe)
        try:
            child = stack.enter_context(subprocess.Popen(
                command, stdin=stdin, stdout=subprocess.PIPE, stderr=None if inherit else subprocess.PIPE,
                process_group=0, env=env, encoding="utf-8", errors="replace"))
        finally:
            if feed is not None:
                os.close(stdin)
        assert child.stdout is not None
        said: list[str] = []
        pumps = [threading.Thread(target=lambda out: said.append(out.read()), args=(child.stdout,),
                                  daemon=True)]
        if child.stderr is not None:
            pumps.append(threading.Thread(target=_copy, args=(child.stderr, sys.stderr), daemon=True))
        for pump in pumps:
            pump.start()
        try:
            if feed is not None:
                feed(pipe)
            status = child.wait()
        except BaseException:
            _stop(child)
            raise
        finally:
            for pump in pumps:
                pump.join()
    return said[0], status


def _stop(child: subprocess.Popen[str]) -> None:
    """Ends a child: in good order, or at once if it takes too long or is interrupted again."""
    try:
        child.send_signal(signal.SIGINT)
        child.wait(GRACE)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    except BaseException:
        child.kill()
        child.wait()
        raise


def _is_descriptor(stream: object) -> bool:
    """Says whether a stream is the process's own standard error, which a child can have."""
    try:
        return bool(stream.fileno() == 2)  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return False  # as in notebooks


def _copy(source: IO[str], target: IO[str]) -> None:
    for line in source:
        target.write(line)
        target.flush()
