"""A module of PyTorch trained in five ways, in turns: eager, torch.compile, optimize, fit, and
deepwell train of the same model's configuration with data from files.

    python bench/fit/main.py -deepwell BINARY

The module is a GPT-2 of 60M parameters, in f32, with AdamW. All take turns of a few steps; whoever
has no turn is stopped (SIGSTOP) or not called. Ratios are medians over turns, of wall clock and of
processor time, since the machine is shared. The last lines are the cost of passing batches from
Python.
"""

import argparse
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))

parser = argparse.ArgumentParser()
parser.add_argument("-deepwell", required=True, help="the program")
parser.add_argument("-turns", type=int, default=5)
parser.add_argument("-steps", type=int, default=2, help="steps of a turn")
parser.add_argument("-sides", default="eager,compile,optimize,fit,configuration", help="who takes part")
parser.add_argument("-layers", type=int, default=8)
parser.add_argument("-width", type=int, default=768)
parser.add_argument("-batch", type=int, default=4)
parser.add_argument("-seq", type=int, default=256)
o = parser.parse_args()
os.environ["DEEPWELL_BINARY"] = o.deepwell

import torch  # noqa: E402
import transformers  # noqa: E402

import deepwell  # noqa: E402
from deepwell import _batches  # noqa: E402

VOCAB = 8192
torch.set_num_threads(os.cpu_count())
torch.manual_seed(0)


def model():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=o.width, n_layer=o.layers, n_head=o.width // 64, n_positions=1024,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    return transformers.GPT2LMHeadModel(config).train()


def adamw(m):
    return torch.optim.AdamW(m.parameters(), lr=3e-4, weight_decay=0.0, fused=True)


def batches():
    generator = torch.Generator().manual_seed(1)
    while True:
        ids = torch.randint(0, VOCAB, (o.batch, o.seq), generator=generator)
        yield {"input_ids": ids, "labels": ids}


def children():
    """Processes that this one has started and that run."""
    return {int(pid) for f in pathlib.Path("/proc/self/task").glob("*/children") for pid in f.read_text().split()}


def used(*pids):
    """Seconds of processor time that processes have taken."""
    ticks = 0
    for pid in pids:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


class Loop:
    """The user's own loop, with a module that may have been compiled."""

    def __init__(self, wrap):
        before = children()
        self.plain = model()
        self.module, self.optimizer, self.batches = wrap(self.plain), adamw(self.plain), batches()
        self.losses = []
        self.pids = [os.getpid()]
        self.turn(1)
        self.pids += children() - before  # the engine's, of optimize

    def turn(self, steps):
        begin, cpu = time.perf_counter(), used(*self.pids)
        for _ in range(steps):
            loss = self.module(**next(self.batches)).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.losses.append(loss.item())
        return (time.perf_counter() - begin) / steps, (used(*self.pids) - cpu) / steps

    def close(self):
        pass


class Run:
    """A run of deepwell train that is stopped while others have their turn."""

    def __init__(self, folder, begin):
        self.folder, self.pid = folder, 0
        self.thread = threading.Thread(target=begin, daemon=True)
        self.thread.start()
        self.wait(1)
        self.pid = int((folder / ".lock").read_text().split()[0])
        os.kill(self.pid, signal.SIGSTOP)

    def count(self):
        try:
            return (self.folder / "events.jsonl").read_text().count('"kind":"step"')
        except FileNotFoundError:
            return 0

    def wait(self, count):
        while self.count() < count:
            if not self.thread.is_alive():
                sys.exit(f"the run in {self.folder} has ended")
            time.sleep(0.01)
        return time.perf_counter(), used(self.pid) if self.pid else 0

    def turn(self, steps):
        os.kill(self.pid, signal.SIGCONT)
        first = self.count() + 1  # the step that was stopped in the middle
        begin = self.wait(first)
        end = self.wait(first + steps)
        os.kill(self.pid, signal.SIGSTOP)
        return tuple((b - a) / steps for a, b in zip(begin, end))

    @property
    def losses(self):
        lines = map(json.loads, (self.folder / "events.jsonl").read_text().splitlines())
        return [e["loss"] for e in lines if e["kind"] == "step"]

    def close(self):
        os.kill(self.pid, signal.SIGCONT)
        os.kill(self.pid, signal.SIGINT)
        self.thread.join(120)


def fit(folder):
    module = model()
    trainer = deepwell.Trainer.from_engine(module, optimizer=adamw(module), dataloader=batches(),
                                           run=folder, settings={"save.every": 0})

    def begin():
        try:
            trainer.fit(10**6)
        except deepwell.Error as e:
            if e.exit != 130:
                raise

    return Run(folder, begin)


def configuration(folder, work):
    """The same model and weights by its config.json, with text from a file."""
    model().save_pretrained(work / "model")
    words = ["".join(random.Random(i).choices("abcdefghijklmnopqrstuvwxyz", k=5)) for i in range(4000)]
    text = " ".join(random.Random(0).choices(words, k=400_000))
    (work / "text.txt").write_text(text)
    tool = [o.deepwell, "data", "tokenizer", work / "text.txt", "--vocab", "4096", "-o",
            work / "tokenizer.json"]
    subprocess.run(tool, check=True, capture_output=True)
    folder.mkdir()
    (folder / "run.toml").write_text(
        f'model = "{work}/model"\nout = "."\nsteps = 1000000\nbatch = {o.batch}\nseq = {o.seq}\n'
        'precision = "f32"\noptimizer.lr = [3e-4, 3e-4]\noptimizer.schedule = "constant"\n'
        'optimizer.warmup = 0\noptimizer.weight_decay = 0.0\noptimizer.betas = [0.9, 0.999]\n'
        f'optimizer.max_grad_norm = 0.0\nsave.every = 0\ndata.sources = ["{work}/text.txt"]\n'
        f'data.tokenizer = "{work}/tokenizer.json"\n')
    command = [o.deepwell, "train", folder / "run.toml", "--device", "cpu"]
    return Run(folder, lambda: subprocess.run(command, capture_output=True))


def passing():
    """Seconds of Python to make bytes of a batch and write them into a pipe that is read at once."""
    reader, writer = os.pipe()
    threading.Thread(target=lambda: all(iter(lambda: os.read(reader, 1 << 20), b"")), daemon=True).start()
    list_of = [b for b, _ in zip(batches(), range(200))]
    feed = _batches.Feed(_batches.Shape(o.batch, o.seq, 1, True), iter(list_of), len(list_of),
                         time.perf_counter)
    begin = time.perf_counter()
    feed(writer)
    took = (time.perf_counter() - begin) / len(list_of)
    os.close(writer)
    return took


def main():
    work = pathlib.Path(tempfile.mkdtemp(prefix="bench-fit-"))
    example = next(batches())
    makers = {"eager": lambda: Loop(lambda m: m), "compile": lambda: Loop(torch.compile),
              "optimize": lambda: Loop(lambda m: deepwell.optimize(m, example)),
              "fit": lambda: fit(work / "fit"),
              "configuration": lambda: configuration(work / "configuration", work)}
    sides = {name: makers[name]() for name in o.sides.split(",")}
    parameters = sum(p.numel() for p in model().parameters())
    print(f"GPT-2 of {parameters / 1e6:.0f}M parameters, f32, batch {o.batch} of {o.seq} tokens; "
          f"{o.turns} turns of {o.steps} steps; torch {torch.__version__}; "
          f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    times = {name: [] for name in sides}
    for turn in range(o.turns):
        order = list(sides)
        random.Random(turn).shuffle(order)
        for name in order:
            times[name].append(sides[name].turn(o.steps))
    print(f"{'':16}{'s/step median':>14}{'best':>8}{'tok/s':>8}{'cpu s':>8}{'wall of fit':>13}{'cpu of fit':>12}")
    for name, list_of in times.items():
        wall, cpu = zip(*list_of)
        ratio = [statistics.median(a[k] / b[k] for a, b in zip(list_of, times["fit"])) for k in (0, 1)]
        middle = statistics.median(wall)
        print(f"{name:16}{middle:14.3f}{min(wall):8.3f}{o.batch * o.seq / middle:8.0f}"
              f"{statistics.median(cpu):8.2f}{ratio[0]:12.2f}x{ratio[1]:11.2f}x")
    step, took = statistics.median(wall for wall, _ in times["fit"]), passing()
    print("first losses: " + ", ".join(f"{name} {side.losses[0]:.5f} {side.losses[1]:.5f}"
                                        for name, side in sides.items() if name != "configuration"))
    print(f"passing a batch from Python takes {1e6 * took:.0f} µs, {100 * took / step:.3f} % of a step")
    print(f"load {os.getloadavg()[0]:.1f} at the end")
    for side in sides.values():
        side.close()


main()
