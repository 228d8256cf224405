"""Builds the C++ library of the cpu backend with the package. Everything else about it stands in pyproject.toml."""

import os
import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KERNELS = runpy.run_path(str(Path(__file__).parent / "k3svc/ops/cpu/build.py"))


class BuildKernels(build_ext):
    """Compiles the library; without a compiler the package is built without it, and its backend says so when chosen."""

    def get_ext_filename(self, fullname: str) -> str:
        """A plain shared library has no suffix of an interpreter."""
        return "/".join([*fullname.split(".")[:-1], KERNELS["LIBRARY"]])

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """None: it is no Python module."""
        assert ext.name
        return []

    def build_extension(self, ext: Extension) -> None:
        """Calls the compiler that CXX names, or the first there is."""
        try:
            KERNELS["build"](Path(self.get_ext_fullpath(ext.name)), compiler=os.environ.get("CXX"))
        except KERNELS["BuildError"] as error:
            self.warn(f"the cpu backend is left out, and model.device defaults to reference: {error}")


setup(
    ext_modules=[Extension("k3svc.ops.cpu.kernels", sources=[], optional=True)],
    cmdclass={"build_ext": BuildKernels},
    package_data={"k3svc.ops.cpu": ["csrc/*"]},
    # An editable install is a path in a .pth file. Otherwise it is an import hook, which is asked after a folder named
    # k3svc without code in it, such as the checkout itself as seen by a program that lies beside it.
    options={"editable_wheel": {"mode": "compat"}},
)
