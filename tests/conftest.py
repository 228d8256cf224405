"""Properties are tested on the same examples everywhere, however slow the machine."""

import importlib.util

# The tests of tests/npu run without it as well.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "same everywhere", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("same everywhere")
