"""README's lines for a module of PyTorch, as a notebook in a clean environment with the wheel."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import nbclient
import nbformat
import pytest

from test_wheel import ROOT, venv, wheel  # noqa: F401 (fixtures)

SETUP = """
import torch, transformers
torch.manual_seed(0)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=None))
row = torch.randperm(64)[:24]
loader = [{"input_ids": row.expand(4, -1), "labels": row.expand(4, -1)}] * 60
before = model.lm_head.weight.detach().clone()
"""

# What was learned by heart is what is said.
GENERATE = """
said = model.generate(row[None, :4], max_new_tokens=20, do_sample=False)
print(torch.equal(said[0], row), torch.equal(before, model.lm_head.weight), len(__import__("os").listdir("runs")))
"""


def sites(*modules: str) -> list[str]:
    """Gives the folders that modules are installed in."""
    found = []
    for name in modules:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None, name
        found.append(str(pathlib.Path(spec.origin).parents[1]))
    return sorted(set(found))


@pytest.fixture
def kernel(venv: pathlib.Path, tmp_path: pathlib.Path,  # noqa: F811
           monkeypatch: pytest.MonkeyPatch) -> str:
    """A kernel of the clean environment. torch, of 3 GB, and Jupyter's kernel are lent to it."""
    library = next((venv / "lib").glob("python3*/site-packages"))
    (library / "lent.pth").write_text("\n".join(sites("torch", "ipykernel")) + "\n")
    folder = tmp_path / "kernels/clean"
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(json.dumps({
        "argv": [str(venv / "bin/python"), "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "clean", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.delenv("DEEPWELL_BINARY", raising=False)
    return "clean"


def lines() -> str:
    """README's three lines."""
    text = (ROOT / "README.md").read_text("utf-8")
    block = re.search(r"```python\n(import deepwell\n.*?)```", text, re.DOTALL)
    assert block is not None and block[1].count("\n") == 3
    return block[1]


def test_three_lines(kernel: str, tmp_path: pathlib.Path) -> None:
    cells = [nbformat.v4.new_code_cell(c) for c in (SETUP, lines(), GENERATE)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name=kernel,
                            resources={"metadata": {"path": str(tmp_path)}}).execute()
    streams = ["".join(o.get("text", "") for o in c.outputs if o.output_type == "stream") for c in cells]
    assert re.search(r"step +60/60 +loss", streams[1])  # progress, as on the command line
    shown = [o for o in cells[1].outputs if o.output_type == "execute_result"]
    assert "step 60 of 60" in shown[0].data["text/html"]
    assert streams[2] == "True False 1\n"


def test_uv(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:  # noqa: F811
    uv = pathlib.Path(sys.executable).with_name("uv")
    env = {k: v for k, v in os.environ.items() if k not in ("DEEPWELL_BINARY", "PYTHONPATH", "VIRTUAL_ENV")}
    env["UV_CACHE_DIR"] = str(tmp_path / "cache")
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, tmp_path / "venv"], check=True, env=env)
    subprocess.run([uv, "pip", "install", "-q", "--no-index", "--python", tmp_path / "venv/bin/python",
                    wheel], check=True, env=env)
    said = subprocess.run([tmp_path / "venv/bin/python", "-c", "import deepwell; print(deepwell.probe())"],
                          check=True, env=env, capture_output=True, text=True).stdout
    assert said.startswith("host ")
