"""Builds what frugal.torch has in C++, for the Python that runs this and the torch that it imports.

    python build.py FOLDER [COMPILER]          (CXX and CXXFLAGS as elsewhere)

The file goes to FOLDER, and its name says for which torch and which Python it is: frugal.torch loads no other. The
build needs Python's headers; torch's are in its package. If something is missing, or does not compile, there is no
file, one line says why, and frugal.torch does all in Python.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig

HERE = pathlib.Path(__file__).resolve().parent
FLAGS = ["-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-missing-field-initializers"]


def build(folder: pathlib.Path, compiler: str) -> str:
    """Returns what is to be said."""
    headers = sysconfig.get_path("include")
    if not os.path.exists(os.path.join(headers, "Python.h")):
        return "none: Python's headers are not there"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "none: this Python has no lock of its own"
    try:
        import torch
    except ImportError as error:
        return f"none: {error}"
    home = pathlib.Path(torch.__file__).parent
    name = f"_direct.torch-{torch.__version__}{sysconfig.get_config_var('EXT_SUFFIX')}"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("_direct.*"):
        old.unlink()
    # Python's and torch's come after our own, and are not warned of.
    includes = [f"-I{HERE.parents[2] / 'include'}"]
    for path in (home / "include", home / "include" / "torch" / "csrc" / "api" / "include", headers):
        includes += ["-isystem", str(path)]
    more = os.environ.get("CXXFLAGS", "").split()
    flags = [*FLAGS, *more, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", *includes]
    cache = [found] if (found := shutil.which("ccache")) else []
    compiled, made = folder / "_direct.o", folder / "_direct.new"
    libraries = [f"-L{home / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10"]
    commands = [
        [*cache, compiler, *flags, "-c", str(HERE / "module.cpp"), "-o", str(compiled)],
        [compiler, *more, "-shared", str(compiled), "-o", str(made), *libraries],
    ]
    for command in commands:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        print(done.stdout, end="")
        if done.returncode:
            return f"none: {compiler} failed"
    compiled.unlink()
    made.rename(folder / name)
    return name


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    compiler = sys.argv[2] if len(sys.argv) == 3 else os.environ.get("CXX", "c++")
    print("frugal.torch in C++:", build(pathlib.Path(sys.argv[1]), compiler))


if __name__ == "__main__":
    main()
