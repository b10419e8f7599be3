"""Commands that ask a broker through the client: the address and the form of the output are alike for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cached_property, update_wrapper
from typing import Any

import click

from danube.cli.terminal.addressing import Address, address_option, explaining, suggest_topic
from danube.cli.terminal.arguments import together
from danube.cli.terminal.confirming import confirm
from danube.cli.terminal.output import output_option, plain, show
from danube.cli.terminal.services import Services
from danube.errors import DanubeError, TopicNotFound
from danube.limits import PAGE_ENTRIES_MAX


class Broker:
    """The broker of one command, connected when it is first asked; ``output`` is the form that is wanted."""

    def __init__(self, services: Services, address: Address, output: str, stack: ExitStack) -> None:
        self._services = services
        self._address = address
        self._stack = stack
        self.output = output

    @cached_property
    def client(self) -> Any:
        return self._stack.enter_context(self._services.connect(self._address.url))

    @property
    def admin(self) -> Any:
        return self.client.admin

    def confirm(self, name: str, lost: str, yes: bool) -> None:
        """Ask for the name of what will be lost; raise InvalidArgument without a terminal."""
        confirm(self._services, name, lost, yes)

    def suggest(self, error: TopicNotFound) -> None:
        """Add a did-you-mean, from the first topics that the broker has."""
        try:
            found = self.admin.list_topics(limit=PAGE_ENTRIES_MAX)
            suggest_topic(error, [plain(one)["topic"] for one in found])
        except DanubeError:
            pass  # the first error is the one to tell


def broker_command(
    group: click.Group,
    name: str,
    short_help: str,
    *parameters: Callable[[Any], Any],
    columns: Sequence[str] = (),
    forms: Sequence[str] = ("table", "json"),
) -> Callable[[Callable[..., Any]], click.Command]:
    """Add a function to ``group`` that gets a Broker and its own parameters, named here or below this line.

    What it returns is shown; an int is the exit code and None shows nothing.
    """

    def decorate(work: Callable[..., Any]) -> click.Command:
        def run(services: Services, /, service_addr: Address, output: str, **given: Any) -> int | None:
            with explaining(service_addr), ExitStack() as stack:
                broker = Broker(services, service_addr, output, stack)
                try:
                    found = work(broker, **given)
                except TopicNotFound as error:
                    broker.suggest(error)
                    raise
            if isinstance(found, int):
                return found
            if found is not None:
                show(found, output, columns)
            return None

        given = together(address_option(), *parameters, output_option(*forms, default=forms[0]))
        command = group.command(name, short_help=short_help)(given(click.pass_obj(update_wrapper(run, work))))
        command.params.sort(key=lambda one: one.name == "output")  # behind the command's own
        return command

    return decorate
