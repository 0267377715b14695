"""``python -m gemma_npu_compile.cli``."""

import sys

from gemma_npu_compile.cli import main

if __name__ == "__main__":
    sys.exit(main())
