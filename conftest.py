"""Hypothesis, for the tests of every package.

That a machine is busy is no failure. The examples are the same each time, so that what fails was
changed; ``make search`` looks for new ones.
"""

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "steady", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.register_profile(
    "search", settings.get_profile("steady"), derandomize=False, max_examples=1000, print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))
