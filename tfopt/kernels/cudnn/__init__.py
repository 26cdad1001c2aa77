"""cuDNN's attention, called from programs that XLA compiles.

support.py   what rules it out: the machine, the step, data types, shapes
modules.py   the calls as StableHLO, for every form: causal, bias, lengths, window, groups of heads
calls.py     the operation, with its gradient
"""
