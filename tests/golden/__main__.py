"""`python -m tests.golden`: writes the golden files anew. Look at `git diff tests/golden` before you commit them."""

from tests.golden.files import write
from tests.golden.source import COLLECTORS

for name, collect in COLLECTORS.items():
    write(name, collect())
