from fake_nvml import fake_nvml

__all__ = ["fake_nvml"]
