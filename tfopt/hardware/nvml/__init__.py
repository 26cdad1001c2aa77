"""NVML, NVIDIA's management library. Every call to the driver goes through `driver.door()`."""
