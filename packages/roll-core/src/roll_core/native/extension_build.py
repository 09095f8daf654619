"""Process that compiles one extension: `python -m roll_core.native.extension_build TASK`, with TASK as JSON."""

from __future__ import annotations

import json
import shutil
import sys
import warnings


def main(task: str) -> None:
    """Compile the extension. On failure, exit with the reason as the last output."""
    warnings.simplefilter("ignore")
    from torch.utils import cpp_extension

    compiler: str = cpp_extension.get_cxx_compiler()  # type: ignore[no-untyped-call]
    if shutil.which(compiler) is None:
        sys.exit(f"there is no C++ compiler {compiler}; install one (g++ or clang++), or set CXX")
    try:
        cpp_extension.load(**json.loads(task), is_python_module=False)
    except (RuntimeError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1])
