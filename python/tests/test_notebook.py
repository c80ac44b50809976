"""README's lines for a module of PyTorch, as a notebook in a clean environment with the wheel."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

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

# The user's own loop, in as many steps.
LOOP = """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
for batch in loader:
    loss = compiled(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"{loss.item():.1f}")
"""

# What was learned by heart is what is said.
GENERATE = """
said = model.generate(row[None, :4], max_new_tokens=20, do_sample=False)
print(torch.equal(said[0], row), torch.equal(before, model.lm_head.weight))
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


def lines(pattern: str, count: int) -> str:
    """README's lines that begin with some words."""
    text = (ROOT / "README.md").read_text("utf-8")
    block = re.search(rf"```python\n({pattern}.*?)```", text, re.DOTALL)
    assert block is not None and block[1].count("\n") == count
    return block[1]


def execute(folder: pathlib.Path, kernel: str, *cells: str) -> list[Any]:
    """Runs cells as a notebook, and gives each one's text and last value."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    nbclient.NotebookClient(notebook, timeout=300, kernel_name=kernel,
                            resources={"metadata": {"path": str(folder)}}).execute()
    return [("".join(o.get("text", "") for o in c.outputs if o.output_type == "stream"),
             [o.data for o in c.outputs if o.output_type == "execute_result"]) for c in notebook.cells]


def test_three_lines(kernel: str, tmp_path: pathlib.Path) -> None:
    _, (text, values), (said, _) = execute(tmp_path, kernel, SETUP, lines("import deepwell\n", 3), GENERATE)
    assert re.search(r"step +60/60 +loss", text)  # progress, as on the command line
    assert "step 60 of 60" in values[0]["text/html"]
    assert said == "True False\n" and len(list(tmp_path.glob("runs/*/events.jsonl"))) == 1


def test_the_backend_by_its_name(kernel: str, tmp_path: pathlib.Path) -> None:
    cells = execute(tmp_path, kernel, SETUP, lines("compiled = ", 1), LOOP, GENERATE,
                    "import deepwell\nprint(deepwell.regions())")
    assert cells[2][0] == "0.0\n" and cells[3][0] == "True False\n"
    assert "1 graphs, 0 of them recompiled" in cells[4][0] and "0 left eager" in cells[4][0]


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
