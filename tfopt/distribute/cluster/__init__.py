"""Which workers train together and which of them this process is: from arguments, TF_CONFIG or a scheduler.

Nothing here loads TensorFlow.
"""
