"""Sources whose examples are files: images, images with masks, and files that users decode."""
