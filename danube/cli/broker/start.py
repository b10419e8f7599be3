"""``danube start``: read the configuration, run the broker, tell how to reach it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from danube.cli.broker.here import config_file_option, data_dir_option, store_flags
from danube.cli.terminal.arguments import Decorator
from danube.cli.terminal.output import json_line, line, note
from danube.cli.terminal.services import Services

if TYPE_CHECKING:
    from danube.config.loading import BrokerConfig, Loaded, Started


def _setting(flag: str, key: str, metavar: str | None, text: str) -> Decorator:
    """An option for a setting, which the command gets under its key: with ``__``, as in the environment."""
    return click.option(flag, key.replace(".", "__"), metavar=metavar, help=text)


@click.command(short_help="Start a broker on this host.")
@_setting("--workers", "workers", "auto|N", "Worker processes; auto: by cores and memory.")
@data_dir_option("Where logs and metadata live.")
@_setting("--host", "server.host", None, "Address to listen on; loopback by default.")
@_setting(
    "--native-port", "server.native_port", "PORT", "Port of the native protocol; 0 takes a free one.  [6660]"
)
@_setting("--grpc-port", "grpc.port", "PORT", "Port of the Danube gRPC API; 0 takes a free one.  [6650]")
@_setting("--admin-port", "admin.port", "PORT", "Port of the gRPC administration API.  [50051]")
@_setting(
    "--metrics-port", "metrics.port", "PORT",
    "Port of Prometheus metrics, usually 9040; 0 takes a free one.  [off]",
)  # fmt: skip
@_setting(
    "--storage", "storage.url", "URL",
    "Object store for sealed segments: s3://bucket/prefix, file:///directory.",
)  # fmt: skip
@_setting(
    "--s3-endpoint", "storage.endpoint", "URL",
    "Endpoint of an S3 server other than Amazon's: http://host:port.",
)  # fmt: skip
@config_file_option
@_setting("--log-level", "log.level", "LEVEL", "debug, info, warning or error.")
@_setting("--log-format", "log.format", "FORMAT", "text or json.")
@_setting(
    "--raft-addr", "cluster.raft_addr", "HOST:PORT",
    "Address of this broker for other members.  [127.0.0.1:7650]",
)  # fmt: skip
@_setting(
    "--seed-nodes", "cluster.seed_nodes", "A:P,B:P", "The first members of a cluster; the same on each."
)
@_setting("--join", "cluster.join", "A:P,...", "Members of a cluster that this broker joins.")
@_setting(
    "--metadata", "cluster.metadata", "URL",
    "etcd of a cluster, instead of --seed-nodes: etcd://host:2379,host:2379/prefix.",
)  # fmt: skip
@click.option("--secure", is_flag=True, help="Ask everybody for a credential; make keys the first time.")
@click.option("--insecure", is_flag=True, help="Others may reach a broker that asks nobody who they are.")
@click.option("--detach", is_flag=True, help="Return when the broker serves, and keep it running.")
@click.option("--output-bytes-max", type=int, default=0, hidden=True)
@click.pass_obj
def start(
    services: Services, /, file: Path | None, secure: bool, insecure: bool, detach: bool,
    output_bytes_max: int, **given: Any,
) -> int:  # fmt: skip
    """Start a broker and run it until SIGTERM or Ctrl-C.

    \b
    danube start                                 embedded defaults, loopback, port 6660 (gRPC: 6650)
    danube start --workers 2 --data-dir ./data
    danube start --config danube.yml --log-format json
    danube start --storage s3://bucket/prefix --s3-endpoint http://127.0.0.1:9000

    Keys of the object store come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or files that
    storage.access_key_file and storage.secret_key_file name; never from flags, which every process sees.

    --secure makes keys, certificates and a token that makes the administrator the first time, in the folder
    `security` of the data directory; every client is asked for a token, and every port speaks TLS.

    With an address that other hosts reach (--host, --raft-addr) the start is refused, exit code 11: nobody is
    asked who they are.  --insecure says that this is meant, for a network that only trusted hosts are in.
    """
    from danube.cli.broker.secured import refuse_forgotten
    from danube.config import exposure
    from danube.config.loading import load

    flags = {name.replace("__", "."): text for name, text in given.items()}
    if (url := flags["storage.url"]) is not None:
        flags |= store_flags(url, flags["storage.endpoint"])
    if insecure:
        flags["server.insecure"] = "true"
    loaded = load(file, services.environ, flags)
    if secure:
        loaded = _secured(services, loaded.config, file, flags)
    refuse_forgotten(loaded.config)
    exposure.refuse(loaded.config)
    if detach:
        from danube.cli.broker.detached import start_detached

        announce(loaded.config, start_detached(loaded))
        return 0
    return run(services, loaded, output_bytes_max)


def _secured(
    services: Services, config: BrokerConfig, file: Path | None, flags: Mapping[str, object]
) -> Loaded:
    """The configuration of the folder ``security``, which is made the first time; flags go before."""
    from danube.cli.broker import secured
    from danube.config.loading import load
    from danube.errors import InvalidArgument

    if file is not None:
        raise InvalidArgument(
            "--secure brings a configuration of its own",
            hint="leave out --config, or write the keys auth and tls into that file",
        )
    first = not (config.data_dir / secured.FOLDER / secured.SIGNING_KEY).exists()
    folder = secured.prepare(config.data_dir)
    if first:
        note(f"keys, certificates and the first token, for a day, are in {folder}; make an administrator:")
        for text in secured.next_lines(folder, config.server.native_port):
            note(f"  {text}")
    return load(folder / secured.SETTINGS, services.environ, {**flags, "data_dir": config.data_dir})


def run(services: Services, loaded: Loaded, output_bytes_max: int = 0) -> int:
    """Run the broker in this process; returns its exit code."""
    from danube.host import telemetry

    config = loaded.config
    telemetry.bound_file(output_bytes_max)
    telemetry.configure(config.log.level, config.log.format, process="supervisor")

    def tell(news: str | Started) -> None:
        if isinstance(news, str):
            note(news)
        else:
            announce(config, news)

    return services.start_broker(config, tell, loaded.again)


def announce(config: BrokerConfig, started: Started) -> None:
    """The banner on standard output: for people, or one JSON object when the log is JSON."""
    from danube.cli.broker.surroundings import warnings_about

    warnings = list(dict.fromkeys([*started.warnings, *warnings_about(config)]))
    if config.log.format == "json":
        json_line(
            {
                "event": "started",
                "addresses": started.addresses,
                "data_dir": str(started.data_dir),
                "workers": started.workers,
                "pid": started.pid,
                "warnings": warnings,
            }
        )
    else:
        line(banner(config, started, warnings))


def banner(config: BrokerConfig, started: Started, warnings: list[str]) -> str:
    """Return the banner: addresses, data directory, workers and the meaning of an acknowledgement."""
    from danube import __version__
    from danube.host.telemetry import escape

    default = config.topic_policy().durability
    native = started.addresses.get("native", "")
    lines = [f"Danube {__version__} serves (pid {started.pid})"]
    for name, address in started.addresses.items():
        scheme = _scheme(config, name)
        path = "/metrics" if name == "metrics" else ""
        lines.append(f"  {name:<10} {scheme}{address}{path}")
    lines += [
        f"  {'data':<10} {escape(str(started.data_dir))}",
        f"  {'workers':<10} {started.workers}",
        "  an acknowledgement means, by the topic's durability:",
    ]
    lost = f"a power cut may take the last {config.wal.sync_lag_max_ms} ms"
    meanings = {
        "memory": "accepted into memory; non-reliable topics, slow consumers lose the oldest first, counted",
        "written": f"in the log file; survives kill -9 of any or all processes; {lost}",
        "fsync": "on disk; survives a power cut",
    }
    for level, meaning in meanings.items():
        mark = " (default)" if level == default else ""
        lines.append(f"    {level:<8} {meaning}{mark}")
    lines += [f"  warning: {escape(warning)}" for warning in warnings]
    lines.append(f"  try:  danube produce hello -m hi{_address_flag(_scheme(config, 'native'), native)}")
    lines.append(f"  stop: danube stop --data-dir {_shell_word(str(started.data_dir))}")
    return "\n".join(lines)


def _scheme(config: BrokerConfig, door: str) -> str:
    if door == "native":
        return "danube+tls://" if config.tls.cert_file else "danube://"
    return f"{config.scheme_of(door)}://"


def _address_flag(scheme: str, native: str) -> str:
    default = scheme == "danube://" and native == "127.0.0.1:6660"
    return "" if default or not native else f" -s {scheme}{native}"


def _shell_word(text: str) -> str:
    import shlex

    return shlex.quote(text) if text.isprintable() else json.dumps(text)
