"""The front end of programs that are HLO already, from whatever framework: `Session.program`."""

from shardwright.client.frontends.hlo.function import HloFunction

__all__ = ["HloFunction"]
