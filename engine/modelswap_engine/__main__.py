"""``python -m modelswap_engine`` is the command ``modelswap``."""

from modelswap_engine.cli.main import main

if __name__ == "__main__":
    main()
