"""`python -m kdn` is `kdn`."""

import sys

from kdn.cli import main

sys.exit(main())
