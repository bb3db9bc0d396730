"""The seed of tests that try something else each day: `TEST_SEED` of the environment, or else the date.

Whatever such a test finds is found again with the seed that its failure names. No clock decides anything else.
"""

import os
from datetime import UTC, datetime

SEED = int(os.environ.get("TEST_SEED") or datetime.now(UTC).strftime("%Y%m%d"))
AGAIN = f"again with TEST_SEED={SEED}"
