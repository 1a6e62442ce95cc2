"""Generates clients/python/windrow/v1 and router/keda from the .proto files, and the names in service_config.json. With
--check, only reports whether they are up to date.

The generated code must not import buf.validate, because then every user would have to install a top-level package
`buf`. So the files are compiled twice, and the dependency on validate.proto is removed after the first time. The rules
stay in the descriptors as option bytes. No generated code reads these bytes, and protovalidate has its own copy of
validate.proto.
"""

import filecmp
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

PROTO = Path(__file__).resolve().parent
PACKAGE = "windrow/v1"
# For each folder of .proto files, the folder for the generated code.
TARGETS = {PACKAGE: PROTO.parent / "clients" / "python" / PACKAGE, "router/keda": PROTO.parent / "router" / "keda"}
RULES = "buf/validate/validate.proto"
CONFIG = PROTO / PACKAGE / "service_config.json"


def protoc(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *arguments], check=True, cwd=PROTO)


def without_rules(file: FileDescriptorProto) -> FileDescriptorProto:
    """Removes the dependency on validate.proto. Public and weak dependencies are indexes into the list of dependencies,
    so they are adjusted."""
    if RULES not in file.dependency:
        return file
    removed = list(file.dependency).index(RULES)
    del file.dependency[removed]
    for indexes in (file.public_dependency, file.weak_dependency):
        indexes[:] = [index - (index > removed) for index in indexes if index != removed]
    return file


def service_config(files: Sequence[FileDescriptorProto]) -> str:
    """Returns service_config.json with the names of all calls that have the option `repeatable`. Everything else in the
    file stays as it is. `files`: each file comes after the files that it imports."""
    # Use the definition of the option in these files, because the generated code may be older than the files.
    pool = DescriptorPool()
    for file in files:
        pool.AddSerializedFile(file.SerializeToString())
    options: Any = GetMessageClass(pool.FindMessageTypeByName("google.protobuf.MethodOptions"))
    repeatable = pool.FindExtensionByName(f"{PACKAGE.replace('/', '.')}.repeatable")
    config = json.loads(CONFIG.read_text())
    config["methodConfig"][0]["name"] = [
        {"service": f"{file.package}.{service.name}", "method": method.name}
        for file in files
        for service in file.service
        for method in service.method
        if options.FromString(method.options.SerializeToString()).Extensions[repeatable]
    ]
    # Put each name on one line.
    return re.sub(r'\{\s+("service": .*?,)\s+("method": .*?)\s+\}', r"{ \1 \2 }", json.dumps(config, indent=2)) + "\n"


def generate(into: Path) -> str:
    """Writes the Python code into a folder, and returns service_config.json."""
    sources = sorted(str(path.relative_to(PROTO)) for folder in TARGETS for path in (PROTO / folder).glob("*.proto"))
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
    return service_config(stripped.file)


def main() -> int:
    with tempfile.TemporaryDirectory() as into:
        config = generate(Path(into))
        stale: list[tuple[Path, Path]] = []
        for folder, target in TARGETS.items():
            fresh = Path(into, folder)
            fresh.joinpath("__init__.py").write_text(
                f'"""Generated from proto/{folder} by ./run gen; never edited."""\n'
            )
            names = {path.name for path in (*fresh.iterdir(), *target.glob("*.py*"))}
            stale += [(fresh / name, target / name) for name in sorted(names) if not same(fresh / name, target / name)]
        if "--check" in sys.argv[1:]:
            for _, path in stale:
                print(f"{path.relative_to(PROTO.parent)} does not match the .proto files: run ./run gen")
            if config != CONFIG.read_text():
                print(f"proto/{PACKAGE}/{CONFIG.name} does not match the .proto files: run ./run gen")
                return 1
            return 1 if stale else 0
        CONFIG.write_text(config)
        for fresh, path in stale:
            print(path.relative_to(PROTO.parent))
            if fresh.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(fresh.read_bytes())
            else:
                path.unlink()
    return 0


def same(fresh: Path, existing: Path) -> bool:
    return fresh.exists() and existing.exists() and filecmp.cmp(fresh, existing, shallow=False)


if __name__ == "__main__":
    sys.exit(main())
