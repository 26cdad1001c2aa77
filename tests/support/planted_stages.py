"""Stages with a known cost, for pipelines whose slowest stage is known."""

import time

import tensorflow as tf

from tfopt.pipelines import Source


def quick(x):
    return x + 1


def nap(ms):
    """Sleeps, as a stage that waits for a disk or another machine does."""

    def sleep(x):
        time.sleep(ms / 1000)
        return x

    def napping(x):
        return tf.ensure_shape(tf.numpy_function(sleep, [x], x.dtype), x.shape)

    return napping


def work(size=128):
    """Computes."""

    def working(x):
        matrix = tf.fill((size, size), tf.cast(tf.reshape(x, [-1])[0], tf.float32))
        for _ in range(6):
            matrix = tf.tanh(tf.matmul(matrix, matrix))
        return x + tf.cast(tf.reduce_sum(matrix) * 0, x.dtype)

    return working


def numbers(read=None, decode=None, count=1_000_000):
    """A source of numbers; `read` is what it takes to read one."""

    def made():
        elements = tf.data.Dataset.range(count)
        return elements if read is None else elements.map(read)

    return Source(name="numbers", dataset=made, decode=decode)


def line(read=quick, decode=quick, transform=quick, augment=quick, finish=quick, calls=tf.data.AUTOTUNE):
    """A dataset of five stages and what stands between them."""
    dataset = tf.data.Dataset.range(1_000_000).map(read, name="read")
    dataset = dataset.map(decode, num_parallel_calls=calls, name="decode")
    dataset = dataset.map(transform, num_parallel_calls=tf.data.AUTOTUNE, name="transform").shuffle(16)
    dataset = dataset.map(augment, num_parallel_calls=tf.data.AUTOTUNE, name="augment").batch(8)
    return dataset.map(finish, name="finish").prefetch(2)
