"""A plan's layouts in the user's own process group: parameters as DTensors, modules that gather them as they run."""

from shardwright.client.frontends.torch.sharding.module import ShardedModule, shard_module

__all__ = ["ShardedModule", "shard_module"]
