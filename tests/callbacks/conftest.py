from fake_nvml import error_codes, fake_nvml

__all__ = ["error_codes", "fake_nvml"]
