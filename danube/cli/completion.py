"""``danube completion``: the script that makes a shell complete commands and options."""

from __future__ import annotations

import click

from danube.cli.terminal.output import write


@click.command(short_help="Print the completion script of a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    \b
    eval "$(danube completion bash)"    # in ~/.bashrc
    eval "$(danube completion zsh)"     # in ~/.zshrc
    danube completion fish > ~/.config/fish/completions/danube.fish
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    if found is None:
        raise click.UsageError(f"no completion for {shell}")
    script = found(context.find_root().command, {}, "danube", "_DANUBE_COMPLETE").source()
    write(script.encode() + b"\n")
