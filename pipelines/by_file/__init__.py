"""Sources of which each example is a file, or two: images, images with masks, and files as they are."""
