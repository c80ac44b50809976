"""No call leaves a process behind, however it ends."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

# A shell's background jobs ignore interrupts, and so would all that tests start there.
HEAR = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"

# Compiling takes seconds, in a child of the program.
LONG = f"{HEAR}; import deepwell as dw; dw.compile('llama3.1-8b', hw='1xb200')"


def descendants(pid: int) -> set[int]:
    parents: dict[int, int] = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            rest = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if rest[0] != "Z":
            parents[int(stat.parent.name)] = int(rest[1])
    found = {pid}
    while more := {p for p, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(what: str, condition: object, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, what
        time.sleep(0.05)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_call_that_ends_early_ends_its_children(how: signal.Signals,
                                                      tmp_path: pathlib.Path) -> None:
    env = dict(os.environ, DEEPWELL_CACHE=str(tmp_path))  # where nothing is compiled yet
    caller = subprocess.Popen([sys.executable, "-c", LONG], stderr=subprocess.PIPE, text=True,
                              start_new_session=True, env=env)
    try:
        wait_for("a child that compiles", lambda: len(descendants(caller.pid)) >= 2)
        children = descendants(caller.pid)
        os.kill(caller.pid, how)  # to the caller only
        error = caller.communicate(timeout=60)[1]
        wait_for("the end of all children", lambda: not any(map(alive, children)))
    finally:
        caller.kill()
    assert how == signal.SIGKILL or "KeyboardInterrupt" in error, error
    assert "without a save" not in error, error  # it was asked once
