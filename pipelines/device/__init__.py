"""Examples kept on the device, batches made there, and copies to it ahead of use."""
