"""Generates client/windrow/v1 from the .proto files; with --check only tells whether it is up to date.

The generated code does not import buf.validate, which would put a top-level package `buf` beside every user's
own. So the files are compiled twice, and between the two the dependency on validate.proto is taken out. The
rules stay where they were, as option bytes: no generated code reads them, and protovalidate brings its own
copy of what they mean.
"""

import filecmp
import subprocess
import sys
import tempfile
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

PROTO = Path(__file__).resolve().parent
CLIENT = PROTO.parent / "client"
PACKAGE = "windrow/v1"
RULES = "buf/validate/validate.proto"


def protoc(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *arguments], check=True, cwd=PROTO)


def without_rules(file: FileDescriptorProto) -> FileDescriptorProto:
    """The file with no dependency on validate.proto; public and weak ones are named by index, and move."""
    if RULES not in file.dependency:
        return file
    gone = list(file.dependency).index(RULES)
    del file.dependency[gone]
    for indexes in (file.public_dependency, file.weak_dependency):
        indexes[:] = [index - (index > gone) for index in indexes if index != gone]
    return file


def generate(into: Path) -> None:
    sources = sorted(str(path.relative_to(PROTO)) for path in (PROTO / PACKAGE).glob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        compiled = Path(folder, "compiled")
        protoc(
            f"-I{PROTO}",
            "--include_imports",
            "--include_source_info",
            f"--descriptor_set_out={compiled}",
            *sources,
        )
        everything = FileDescriptorSet.FromString(compiled.read_bytes())
        stripped = FileDescriptorSet(file=[without_rules(file) for file in everything.file if file.name != RULES])
        compiled.write_bytes(stripped.SerializeToString())
        plugins = Path(sys.executable).parent
        protoc(
            f"--descriptor_set_in={compiled}",
            f"--plugin={plugins / 'protoc-gen-mypy'}",
            f"--python_out={into}",
            f"--mypy_out=quiet:{into}",
            *sources,
        )
        protoc(
            f"--descriptor_set_in={compiled}",
            f"--plugin={plugins / 'protoc-gen-mypy_grpc'}",
            f"--grpc_python_out={into}",
            f"--mypy_grpc_out=quiet:{into}",
            *(file.name for file in stripped.file if file.service and file.name in sources),
        )


def main() -> int:
    target = CLIENT / PACKAGE
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder, PACKAGE)
        fresh.parent.mkdir()
        generate(Path(folder))
        fresh.joinpath("__init__.py").write_text('"""Generated from proto/windrow/v1 by ./run gen; never edited."""\n')
        names = {path.name for path in (*fresh.iterdir(), *target.glob("*.py*"))}
        stale = [name for name in sorted(names) if not same(fresh / name, target / name)]
        if "--check" in sys.argv[1:]:
            for name in stale:
                print(f"client/{PACKAGE}/{name} is not what the .proto files say; ./run gen")
            return 1 if stale else 0
        target.mkdir(parents=True, exist_ok=True)
        for name in stale:
            print(f"client/{PACKAGE}/{name}")
            if (fresh / name).exists():
                target.joinpath(name).write_bytes(fresh.joinpath(name).read_bytes())
            else:
                target.joinpath(name).unlink()
    return 0


def same(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and filecmp.cmp(one, other, shallow=False)


if __name__ == "__main__":
    sys.exit(main())
