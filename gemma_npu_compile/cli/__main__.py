"""``python -m gemma_npu_compile.cli``."""

import sys

from gemma_npu_compile.cli import main

sys.exit(main())
