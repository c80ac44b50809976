"""The wheel: what it holds, and README's and docs/python.md's lines in a clean environment."""

from __future__ import annotations

import doctest
import os
import pathlib
import re
import subprocess
import sys
import zipfile

import pytest

from deepwell import _program

ROOT = pathlib.Path(__file__).parents[2]


def build(folder: pathlib.Path) -> pathlib.Path:
    """Builds the wheel around the installed program."""
    said = subprocess.run([sys.executable, ROOT / "python/backend.py", folder, _program.find()],
                          check=True, capture_output=True, text=True).stdout
    return pathlib.Path(said.strip())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def venv(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("clean")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    subprocess.run([sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "-q",
                    "--no-index", "--disable-pip-version-check", wheel], check=True)
    return folder


def clean(venv: pathlib.Path, *command: str) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("DEEPWELL_BINARY", "PYTHONPATH")}
    return subprocess.run([venv / "bin" / command[0], *command[1:]], env=env, cwd=venv, check=True,
                          capture_output=True, text=True).stdout


def test_same_input_same_bytes(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    again = build(tmp_path)
    assert again.name == wheel.name and again.read_bytes() == wheel.read_bytes()


def test_contents(wheel: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert archive.testzip() is None
        data = b"".join(archive.read(n) for n in names)
    assert "deepwell/py.typed" in names and any(n.endswith("licenses/LICENSE") for n in names)
    assert not [n for n in names if "test" in n or "__pycache__" in n]
    assert str(ROOT).encode() not in data


def test_installed(venv: pathlib.Path) -> None:
    version = clean(venv, "deepwell", "--version")
    said = clean(venv, "python", "-c", "import deepwell; print('deepwell', deepwell.__version__)")
    assert version == said
    loaded = clean(venv, "python", "-c", "import sys, deepwell; print('torch' in sys.modules)")
    assert loaded == "False\n"


def test_readme(venv: pathlib.Path) -> None:
    line = re.search(r"`(import deepwell [^`]*)`", (ROOT / "README.md").read_text("utf-8"))
    assert line is not None
    assert "predicted, not run" in clean(venv, "python", "-c", " ".join(line[1].split()))


class Checker(doctest.OutputChecker):
    """Compares output but for the time of a search."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        seconds = re.compile(r"in \d+\.\d s")
        return super().check_output(seconds.sub("in … s", want), seconds.sub("in … s", got),
                                    optionflags)


def test_docs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs/python.md").read_text("utf-8").replace("```", "")
    test = doctest.DocTestParser().get_doctest(text, {}, "python.md", "docs/python.md", 0)
    assert len(test.examples) >= 8
    said: list[str] = []
    runner = doctest.DocTestRunner(Checker(), optionflags=doctest.REPORT_NDIFF)
    assert runner.run(test, out=said.append).failed == 0, "".join(said)
