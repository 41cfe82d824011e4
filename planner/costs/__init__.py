"""Seconds of computing and of moves on one mesh, from `shardwright.cost`, with every answer remembered."""
