"""`python -m tests.golden`: writes the golden files anew.

Look at `git diff tests/golden` before you commit them.
"""

from tests.golden import live, source
from tests.golden.files import write

for name, collect in {**source.COLLECTORS, **live.COLLECTORS}.items():
    write(name, collect())
