"""Every test runs on two CPU devices, so that sharding is exercised wherever a mesh is used."""

import os

# Read by JAX when its first device is touched, which is after this file.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
