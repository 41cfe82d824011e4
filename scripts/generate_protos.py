"""Generate `shardwright/proto` from `protos/`; with `--check`, only compare.

The generator's version is pinned in pyproject.toml (`grpcio-tools`): its output names
the oldest grpcio and protobuf that it runs with, and a newer one would differ.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "protos"


def generate(target: Path) -> None:
    """Write the Python modules and type stubs of every .proto file under `target`."""
    files = sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.proto"))
    include = Path(protoc.__file__).parent / "_proto"
    outputs = [f"--{kind}={target}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    if protoc.main(["protoc", f"-I{SOURCE}", f"-I{include}", *outputs, *files]):
        sys.exit("protoc failed")


def differences(expected: Path, actual: Path) -> list[str]:
    """Paths, relative to both roots, whose generated text differs or is there only once."""
    generated = {path.relative_to(expected) for path in expected.rglob("*_pb2*.py*")}
    present = {path.relative_to(actual) for path in (actual / "shardwright" / "proto").rglob("*_pb2*.py*")}
    present = {path for path in present if path.suffix in (".py", ".pyi")}
    changed = {path for path in generated & present if (expected / path).read_bytes() != (actual / path).read_bytes()}
    return sorted(str(path) for path in changed | (generated ^ present))


def main() -> int:
    if "--check" not in sys.argv[1:]:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as directory:
        generate(Path(directory))
        stale = differences(Path(directory), ROOT)
    if stale:
        print("out of date, run `make protos` and commit:", *stale, sep="\n  ", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
