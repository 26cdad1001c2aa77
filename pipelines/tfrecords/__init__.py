"""TFRecord files: their framing, the index beside them, how they are written, verified, and read around damage."""
