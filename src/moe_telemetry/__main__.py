"""`python -m moe_telemetry`."""

import sys

from .cli import main

sys.exit(main())
