"""Builds the library of the cpu backend in place: `python -m k3svc.ops.cpu [compiler]`."""

import sys

from k3svc.ops.cpu.build import BuildError, build
from k3svc.ops.cpu.library import LIBRARY_PATH

try:
    build(LIBRARY_PATH, compiler=next(iter(sys.argv[1:]), None))
except BuildError as error:
    sys.exit(str(error))
