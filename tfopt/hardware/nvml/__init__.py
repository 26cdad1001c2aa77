"""The only door to NVML, NVIDIA's management library: every question to the driver goes through `driver.door()`."""
