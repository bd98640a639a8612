"""`python -m gateway`, the same as `sameway`."""

import sys

from gateway.cli import main

sys.exit(main())
