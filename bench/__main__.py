"""`python -m bench NAME [ARGS]`: hands ARGS to the bench of that name."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def main(argv: list[str]) -> int:
    """Returns the bench's exit status; 2 for a name that there is not."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_"))
    if not argv or argv[0] not in names:
        print(f"usage: ./run bench NAME [ARGS]; NAME: {' | '.join(names)}; each takes --help", file=sys.stderr)
        return 2
    status: int = importlib.import_module(f"bench.{argv[0]}").main(argv[1:])
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
