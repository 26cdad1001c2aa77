"""The only door to what Keras and TensorFlow keep private. Nothing else imports `keras.src` or `tensorflow.python`.

What stands here has no public form. A release that moves or changes one of these names is answered in this folder.
"""
