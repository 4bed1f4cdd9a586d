"""``python -m modelswap_operator``."""

import sys

from modelswap_operator.runtime.main import main

if __name__ == "__main__":
    sys.exit(main())
