from fake_nvml import error_codes, fake_nvml
from saving import disk_that_syncs_at_once, fresh_warnings

__all__ = ["disk_that_syncs_at_once", "error_codes", "fake_nvml", "fresh_warnings"]
