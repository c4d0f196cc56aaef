"""Ways to store and load chunks, measured beside each other."""

import sys
from pathlib import Path

# A script has only its own directory; the servers are started as the tests start them.
sys.path.append(str(Path(__file__).parents[2] / "tests"))
