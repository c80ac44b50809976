"""Builds the wheel: the Python package and the Go program beside it.

pip, uv and build call this as pyproject.toml's backend; it needs Go, and no network beyond Go's
modules. `python3 backend.py FOLDER [BINARY]` builds the wheel without them. The same sources give
the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent

# The program loads engines with the C library's dlopen and binds to no version of its symbols. It is
# only built for x86-64, as the engines are.
TAG = "py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64"

# Times in the archive; zip has none before 1980.
EPOCH = (1980, 1, 1, 0, 0, 0)


def build_program(path: pathlib.Path) -> None:
    """Builds the Go program, with no path or revision of this clone in it."""
    env = dict(os.environ, CGO_ENABLED="0", GOOS="linux", GOARCH="amd64", GOAMD64="v1", GOFLAGS="")
    subprocess.run(["go", "build", "-buildvcs=false", "-trimpath", "-ldflags=-s -w -buildid=",
                    "-o", str(path), "./cmd/deepwell"], cwd=HERE.parent, env=env, check=True)


def version_of(program: pathlib.Path) -> str:
    """Asks the program for its version, which is the package's."""
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    name, version = said.split()
    assert name == "deepwell", said
    return version


def metadata(version: str) -> str:
    project = tomllib.loads((HERE / "pyproject.toml").read_text("utf-8"))["project"]
    return (f"Metadata-Version: 2.4\nName: {project['name']}\nVersion: {version}\n"
            f"Summary: {project['description']}\nLicense-Expression: {project['license']}\n"
            "License-File: LICENSE\nLicense-File: NOTICE\n"
            f"Requires-Python: {project['requires-python']}\n")


def contents(program: pathlib.Path, version: str) -> dict[str, bytes]:
    """Gives the wheel's files but RECORD, by name."""
    info = f"deepwell-{version}.dist-info"
    files = {f"deepwell/{f.relative_to(HERE / 'deepwell').as_posix()}": f.read_bytes()
             for f in (HERE / "deepwell").rglob("*") if f.suffix == ".py" or f.name == "py.typed"}
    files[f"deepwell-{version}.data/scripts/deepwell"] = program.read_bytes()
    files[f"{info}/METADATA"] = metadata(version).encode()
    tags = "".join(f"Tag: py3-none-{t}\n" for t in TAG.split("-")[2].split("."))
    files[f"{info}/WHEEL"] = ("Wheel-Version: 1.0\nGenerator: deepwell\nRoot-Is-Purelib: false\n"
                              + tags).encode()
    files[f"{info}/entry_points.txt"] = b"[torch_dynamo_backends]\ndeepwell = deepwell._backend:backend\n"
    for name in ("LICENSE", "NOTICE"):
        files[f"{info}/licenses/{name}"] = (HERE.parent / name).read_bytes()
    return files


def write(path: pathlib.Path, files: dict[str, bytes], version: str) -> None:
    """Writes the archive, whose last file lists the digests of all others."""
    record = f"deepwell-{version}.dist-info/RECORD"
    rows = []
    for name in sorted(files):
        digest = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(files[name])}\n")
    rows.append(f"{record},,\n")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in [*sorted(files.items()), (record, "".join(rows).encode())]:
            entry = zipfile.ZipInfo(name, EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3  # Unix, whose modes follow
            entry.external_attr = (0o100755 if "/scripts/" in name else 0o100644) << 16
            archive.writestr(entry, data)


def build_wheel(wheel_directory: str, config_settings: dict[str, Any] | None = None,
                metadata_directory: str | None = None, program: str | None = None) -> str:
    """Builds the wheel and gives its name; program is a built binary to use, if there is one."""
    with tempfile.TemporaryDirectory() as scratch:
        binary = pathlib.Path(program or os.path.join(scratch, "deepwell"))
        if program is None:
            build_program(binary)
        version = version_of(binary)
        name = f"deepwell-{version}-{TAG}.whl"
        os.makedirs(wheel_directory, exist_ok=True)
        write(pathlib.Path(wheel_directory, name), contents(binary, version), version)
    return name


def build_sdist(sdist_directory: str, config_settings: dict[str, Any] | None = None) -> str:
    raise NotImplementedError("the sources are the Git repository; build a wheel from a clone")


if __name__ == "__main__":
    built = sys.argv[2] if len(sys.argv) > 2 else None
    print(os.path.join(sys.argv[1], build_wheel(sys.argv[1], program=built)))
