"""A command line whose errors say what was probably meant."""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from shardwright.spelling import did_you_mean

_CHOICE = re.compile(r"argument (?P<what>.+): invalid choice: '?(?P<value>[^']*?)'? \(choose from (?P<choices>.*)\)")
_UNRECOGNIZED = "unrecognized arguments: "
_VALUE = re.compile(r"argument (?P<what>.+): invalid _?(?P<type>\w+) value: (?P<value>.*)")

#: What functions that read a value take, by their names.
_WORDS = {
    "count": "a whole number from 1",
    "float": "a number",
    "int": "a whole number",
    "interval": "a number of seconds from 0.1 to 3600",
    "seconds": "a number of seconds above 0",
    "silence": "a number of seconds from 5",
}


class CommandParser(argparse.ArgumentParser):
    """Names unknown options, commands and choices before what is missing, with the nearest ones; exit code 2."""

    _words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        command = self._chosen_command()
        if command is not None and message.startswith(_UNRECOGNIZED):
            command.error(message)
        unknown = self._unknown_option(message)
        remedy = ""
        if unknown:
            message, remedy = f"unknown option {unknown}", did_you_mean(unknown, self._options())
        elif match := _CHOICE.match(message):
            choices = re.findall(r"[^\s,']+", match["choices"])
            message = f"{match['what']}: {match['value']!r} is not one of {', '.join(choices)}"
            remedy = did_you_mean(match["value"], choices)
        elif match := _VALUE.match(message):
            message = f"{match['what']}: {match['value']} is not {_WORDS.get(match['type'], 'what it takes')}"
        lines = [f"error: {message}", *([f"  remedy: {remedy}"] if remedy else []), f"usage: {self.prog} --help", ""]
        self.exit(2, "\n".join(lines))

    def _options(self) -> list[str]:
        return [option for option in self._option_string_actions if option.startswith("--")]

    def _unknown_option(self, message: str) -> str:
        """The first option that there is not, also where the message speaks of what is missing; empty: none."""
        if message.startswith(_UNRECOGNIZED):
            words = message.removeprefix(_UNRECOGNIZED).split()
            return next((word.partition("=")[0] for word in words if word.startswith("--")), "")
        if any(action.nargs == argparse.REMAINDER for action in self._actions):
            return ""  # its words may be a command's
        own = self._words
        if self._subparsers is not None:  # behind the first word without dashes they are a subcommand's
            own = list(itertools.takewhile(lambda word: word.startswith("-"), own))
        options = [word.partition("=")[0] for word in own if word.startswith("--") and word != "--"]
        known = self._option_string_actions
        return next((option for option in options if not any(name.startswith(option) for name in known)), "")

    def _chosen_command(self) -> CommandParser | None:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                chosen = next((word for word in self._words if word in action.choices), None)
                return action.choices[chosen] if chosen is not None else None
        return None
