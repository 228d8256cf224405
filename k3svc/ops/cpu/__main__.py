"""Builds the library of the cpu backend in place: `python -m k3svc.ops.cpu [compiler]`.

With --default it builds nothing and says which backend is the default here, and why.
"""

import sys
from collections.abc import Sequence

from k3svc.config import default_device
from k3svc.ops.cpu.build import BuildError, build, find_compiler
from k3svc.ops.cpu.library import BUILD_COMMAND, LIBRARY_PATH


def main(arguments: Sequence[str]) -> None:
    """Raises SystemExit with a message when the library cannot be built."""
    if list(arguments) == ["--default"]:
        sys.stdout.write(f"default backend: {default_device()} ({_reason()})\n")
        return
    try:
        build(LIBRARY_PATH, compiler=next(iter(arguments), None))
    except BuildError as error:
        sys.exit(str(error))


def _reason() -> str:
    if LIBRARY_PATH.exists():
        return "its kernels are built"
    try:
        find_compiler()
    except BuildError as error:
        return f"{error}, then run `{BUILD_COMMAND}`, and cpu is"
    return f"the kernels of cpu could not be built, `{BUILD_COMMAND}` says why"


if __name__ == "__main__":
    main(sys.argv[1:])
