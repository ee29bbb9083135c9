"""Settings that every test shares."""

import os

from hypothesis import HealthCheck, settings

# Locally every run draws new examples. In CI they follow from the test alone, so that a failure
# comes from the change under test. pytest-randomly prints its seed; --randomly-seed=N repeats it.
settings.register_profile("dev", deadline=None)
settings.register_profile(
    "ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "dev")
