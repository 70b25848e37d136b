"""``python -m moelight``: the program ``moelight``."""

import sys

from moelight.cli.main import main

sys.exit(main())
