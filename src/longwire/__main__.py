"""`python -m longwire`."""

from __future__ import annotations

import sys

from longwire.cli.main import main

sys.exit(main())
