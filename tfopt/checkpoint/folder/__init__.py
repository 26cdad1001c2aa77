"""The folder of a training's checkpoints: how they are written, kept, checked and read. Arrays and JSON only.

FOLDER/00000007-step-1200.json   a manifest: what checkpoint 7, of step 1200, holds, and where; people can read it
FOLDER/blobs/HASH.safetensors    arrays, shared by all checkpoints that hold the same
FOLDER/lock                      locked by the training that saves there; the system unlocks it when that dies
FOLDER/.*, FOLDER/blobs/.*       files being written, or whose writer died

The order of checkpoints is that of their numbers, not of step or time: a training may go back, and clocks jump.
"""
