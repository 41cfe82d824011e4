"""PyTorch front end: a step of a module, its backward pass and its optimizer become one program."""

from shardwright.client.frontends.torch.buckets import Bucket
from shardwright.client.frontends.torch.remote import RemoteTensor
from shardwright.client.frontends.torch.step import TorchStep, parallelize

__all__ = ["Bucket", "RemoteTensor", "TorchStep", "parallelize"]
