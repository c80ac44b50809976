"""Reads testdata/run with TensorBoard and writes what it sees to testdata/seen.json.

    python3 -m venv /tmp/tb && /tmp/tb/bin/pip install tensorboard==2.21.0 setuptools
    /tmp/tb/bin/python internal/tfevents/testdata/read.py [--check]

It is not run by .ci/run, which has no TensorBoard; tfevents_test.go holds the files to their
digests in seen.json, so that a file that TensorBoard has not seen fails the test.
"""

import hashlib
import json
import pathlib
import sys

import tensorboard
from tensorboard.backend.event_processing import event_accumulator

here = pathlib.Path(__file__).parent


def seen():
    acc = event_accumulator.EventAccumulator(
        str(here / "run"), size_guidance={event_accumulator.TENSORS: 0, event_accumulator.SCALARS: 0})
    acc.Reload()
    return {
        "tensorboard": tensorboard.__version__,
        "sha256": {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted((here / "run").iterdir())},
        "scalars": {tag: [[e.step, e.value] for e in acc.Scalars(tag)] for tag in sorted(acc.Tags()["scalars"])},
    }


text = json.dumps(seen(), indent=1) + "\n"
path = here / "seen.json"
if "--check" in sys.argv:
    sys.exit(0 if path.read_text() == text else "seen.json is stale")
path.write_text(text)
