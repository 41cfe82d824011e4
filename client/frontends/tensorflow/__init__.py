"""The front end of TensorFlow: steps of `tf.function`s, and of Keras models on TensorFlow's backend."""

from shardwright.client.frontends.tensorflow.remote import RemoteTensor
from shardwright.client.frontends.tensorflow.step import TensorFlowStep, parallelize

__all__ = ["RemoteTensor", "TensorFlowStep", "parallelize"]
