"""Models with a known verdict for `tfopt.precision.check`: healthy ones and ones with a planted fault."""
