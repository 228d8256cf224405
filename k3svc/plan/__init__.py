"""How large and how fast a deployment must be: cache and hand-off sizes, P:D ratio, bottleneck, from first principles.

An estimate, good to a factor: roofline times (work over peak times an efficiency), not a simulation.
"""
