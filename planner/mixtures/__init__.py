"""Mixtures of experts by ragged products: rows that go to the devices of their experts, and come back."""

from shardwright.planner.mixtures.blocks import Blocks
from shardwright.planner.mixtures.choose import describe_choice, list_blocks
from shardwright.planner.mixtures.recognise import Mixture, find_all_mixtures
from shardwright.planner.mixtures.write import block_mixtures

__all__ = ["Blocks", "Mixture", "block_mixtures", "describe_choice", "find_all_mixtures", "list_blocks"]
