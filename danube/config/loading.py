"""Configuration: one frozen dataclass per subsystem, and a loader that says where each value came from.

Sources, a later one wins: built-in default < YAML file < environment < command-line flags.  Each
source gives text; each setting has one parser, so ``native_port: 6660``, ``DANUBE_SERVER__NATIVE_PORT``
and ``--native-port`` accept the same words.  Durations take a unit (``250ms 5s 1h 7d``), sizes may
(``64KiB 10MB``, a bare number is bytes).  Unknown keys and impossible values are refused, all of
them at once, with file and line.  ``docs/danube.yml`` lists every key.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from danube import limits
from danube.config import auth as auth_section
from danube.config.audit import AuditConfig
from danube.config.auth import AuthConfig
from danube.config.problems import Contradiction, Given, Problem, suggestion
from danube.config.sections import (
    AdminConfig,
    BalanceConfig,
    ClusterConfig,
    GrpcConfig,
    LimitsConfig,
    LogConfig,
    MetricsConfig,
    SchemaConfig,
    Secret,
    ServerConfig,
    Setting,
    StorageConfig,
    SubscriptionsConfig,
    TlsConfig,
    TopicsConfig,
    WalConfig,
    declare,
    parse_directory,
    parse_workers,
    show_plain,
)
from danube.core.partition.policy import Durability, TopicPolicy
from danube.errors import ConfigInvalid, InvalidArgument
from danube.host import local_socket
from danube.host.capacity import workers_wanted
from danube.host.files import user_directory
from danube.host.local_socket import loopback, loopback_address

ENVIRONMENT_PREFIX: Final = "DANUBE_"


def default_data_dir(environ: Mapping[str, str]) -> Path:
    """Return ``$XDG_DATA_HOME/danube``, else ``~/.local/share/danube``; ConfigInvalid without a home."""
    base = user_directory("XDG_DATA_HOME", ".local/share", environ)
    if base is None:
        raise ConfigInvalid(
            "there is no data directory",
            why=f"none was given, HOME is not set, and the system knows no home of user {os.getuid()}",
            hint="give --data-dir, or set DANUBE_DATA_DIR",
        )
    return base / "danube"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig:
    """Configuration of a broker.  ``workers`` 0 means as many as suit this host."""

    workers: int = declare(
        0, "workers", parse_workers, show=lambda n: str(n) if n else "auto", least=0, most=limits.WORKERS_MAX
    )
    data_dir: Path = field(
        default_factory=lambda: default_data_dir(os.environ),
        metadata={"setting": Setting("data_dir", parse_directory)},
    )
    server: ServerConfig = field(default_factory=ServerConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    grpc: GrpcConfig = field(default_factory=GrpcConfig)
    admin: AdminConfig = field(default_factory=AdminConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
    schema: SchemaConfig = field(default_factory=SchemaConfig)
    log: LogConfig = field(default_factory=LogConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    wal: WalConfig = field(default_factory=WalConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    topics: TopicsConfig = field(default_factory=TopicsConfig)
    subscriptions: SubscriptionsConfig = field(default_factory=SubscriptionsConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)

    @property
    def worker_count(self) -> int:
        """Number of workers to start: as configured, else as many as suit this host."""
        return self.workers or int(workers_wanted().value)

    @property
    def has_certificates(self) -> bool:
        """Whether any port speaks TLS, to clients or to other members."""
        return bool(self.tls.cert_file or self.grpc.cert_file or self.cluster.cert_file)

    @property
    def serves_tls(self) -> bool:
        """Whether a port of clients speaks TLS, so that handshakes of theirs take places."""
        return bool(self.tls.cert_file or self.grpc.cert_file)

    def scheme_of(self, door: str) -> str:
        """Return how clients dial a port: https or http; ``door`` is grpc, admin or metrics."""
        alone = {"grpc": bool(self.grpc.cert_file), "admin": self.admin.tls}.get(door, False)
        return "https" if self.tls.cert_file or alone else "http"

    @property
    def audit_directory(self) -> Path:
        """Where audit files lie, whether any are written or not."""
        return Path(self.audit.directory) if self.audit.directory else self.data_dir / "audit"

    @property
    def asks_clients(self) -> bool:
        """Whether a client must prove something to get in."""
        return self.auth.asks or self.tls.client_certificates == "required"

    @property
    def only_this_host(self) -> bool:
        """Whether only processes of this host reach the ports for clients."""
        return loopback(self.server.host)

    @property
    def reflects(self) -> bool:
        """Whether the gRPC ports describe themselves.  "auto": where only this host reaches them."""
        if self.grpc.reflection == "auto":
            return self.only_this_host
        return self.grpc.reflection == "on"

    @property
    def local_socket(self) -> bool:
        """The configured choice.  "auto": on if its buffers may be as large as those of loopback."""
        if self.server.local_socket == "auto":
            return local_socket.has_room()
        return self.server.local_socket == "on"

    def topic_policy(self, *, reliable: bool | None = None, durability: str = "") -> TopicPolicy:
        """Policy of a topic that is made with these two choices; None and "" take the defaults."""
        if reliable is None:
            reliable = durability != "memory" if durability else self.topics.reliable
        level = durability or (self.topics.durability if reliable else Durability.MEMORY.label)
        return TopicPolicy(
            reliable=reliable,
            durability=level,
            retention_ms=self.topics.retention_ms,
            retention_bytes=self.topics.retention_bytes,
            max_record_bytes=self.topics.max_record_bytes,
            max_unacked=self.subscriptions.max_unacked,
            failure=self.subscriptions.failure_policy(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """Facts of a broker that serves, from which the banner is made."""

    addresses: dict[str, str]  # "native" -> "127.0.0.1:6660"
    data_dir: Path
    workers: int
    pid: int
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checked configuration and, by key (``server.native_port``), where its value came from."""

    config: BrokerConfig
    origins: dict[str, str]
    again: Callable[[], BrokerConfig]  # reads the same sources once more
    file: Path | None = None


def _entries() -> Iterator[tuple[str, str, str, Setting]]:
    """Yield each key, the section ("" at the top) and the field that hold it, and its setting."""
    for item in fields(BrokerConfig):
        if "setting" in item.metadata:
            setting: Setting = item.metadata["setting"]
            yield setting.key, "", item.name, setting
        else:
            for inner in fields(item.default_factory):  # type: ignore[arg-type]  # the section's class
                setting = inner.metadata["setting"]
                yield f"{item.name}.{setting.key}", item.name, inner.name, setting


_ENTRIES: Final = tuple(_entries())


def settings() -> dict[str, Setting]:
    """Every setting by its key, ``section.name`` or a bare name at the top."""
    return {key: setting for key, _, _, setting in _ENTRIES}


def values(config: BrokerConfig, *, secrets_shown: bool = False) -> dict[str, str]:
    """Every value as the text that would set it, by key; secrets only when ``secrets_shown``."""
    shown: dict[str, str] = {}
    for key, section, name, setting in _ENTRIES:
        value = getattr(getattr(config, section) if section else config, name)
        bare = secrets_shown and isinstance(value, Secret)
        shown[key] = value.reveal() if bare else setting.show(value)
    return shown


def load(
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Loaded:
    """Read all sources and check the result; ConfigInvalid names every problem in ``facts["problems"]``.

    ``flags`` is keyed by setting (``server.host``); a value of None was not given.
    """
    environ = os.environ if environ is None else environ
    known = settings()
    problems: list[Problem] = []
    given = [
        *_from_file(file, known, problems),
        *_from_environment(environ, known, problems),
        *_from_flags(flags or {}, known),
    ]
    parsed: dict[str, Any] = {}
    origins = dict.fromkeys(known, "default")
    for key, text, origin in given:
        try:
            parsed[key] = known[key].read(text)
            origins[key] = origin
        except ValueError as error:
            shown = "its value" if known[key].private else repr(text[:80])
            problems.append(Problem(origin, f"{key}: {shown} {error}"))
    if not problems:
        if "data_dir" not in parsed:
            parsed["data_dir"] = default_data_dir(environ)
        config = _build(parsed)
        problems += _contradictions(config, origins)
        if not problems:
            return Loaded(config, origins, partial(_load_again, file, environ, flags), file)
    raise _invalid(problems)


def _load_again(
    file: Path | None, environ: Mapping[str, str], flags: Mapping[str, object] | None
) -> BrokerConfig:
    """Load what a running broker was started with; a pipe could be read only once."""
    if file is not None and not file.is_file():
        raise ConfigInvalid(
            f"configuration file {file} cannot be read again",
            why="it is gone, or was never a regular file",
            hint="start the broker with a file that stays",
        )
    return load(file, environ, flags).config


def _invalid(problems: list[Problem]) -> ConfigInvalid:
    first = problems[0]
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return ConfigInvalid(
        f"{first.origin}: {first.what}{more}",
        why="the configuration is not valid, so nothing was started",
        hint=first.hint or "`danube config check` lists every problem",
        problems=problems,
    )


def _build(parsed: Mapping[str, Any]) -> BrokerConfig:
    given: dict[str, dict[str, Any]] = {}
    for key, section, name, _ in _ENTRIES:
        if key in parsed:
            given.setdefault(section, {})[name] = parsed[key]
    config = BrokerConfig(**given.pop("", {}))
    sections = {section: replace(getattr(config, section), **chosen) for section, chosen in given.items()}
    return replace(config, **sections)


def _contradictions(config: BrokerConfig, origins: Mapping[str, str]) -> list[Problem]:
    """Values that are each allowed and cannot hold together."""
    found = [
        *_subscription_contradictions(config.subscriptions),
        *_storage_contradictions(config.storage),
        *_cluster_contradictions(config),
        *_tls_contradictions(config),
        *auth_section.contradictions(
            config.auth, config.tls, loopback=config.only_this_host, clustered=config.cluster.enabled
        ),
    ]
    problems = [Problem(origins[key], what, hint) for key, what, hint in found]
    for reliable in (True, False):
        try:
            config.topic_policy(reliable=reliable).check()
        except InvalidArgument as error:
            if not problems:
                problems.append(Problem("topics", str(error), error.hint))
    return problems


def _subscription_contradictions(subscriptions: SubscriptionsConfig) -> Iterator[Contradiction]:
    if subscriptions.base_redelivery_delay_ms > subscriptions.max_redelivery_delay_ms:
        key = "subscriptions.base_redelivery_delay"
        yield key, f"{key} is above max_redelivery_delay", ""
    if subscriptions.poison == "dead_letter" and not subscriptions.dead_letter_topic:
        what = "subscriptions.poison is dead_letter and there is no dead_letter_topic"
        hint = "set subscriptions.dead_letter_topic, for example /default/dead-letters"
        yield "subscriptions.poison", what, hint


def _tls_contradictions(config: BrokerConfig) -> Iterator[Contradiction]:
    tls, grpc, cluster = config.tls, config.grpc, config.cluster
    for section, cert_file, key_file in (
        ("grpc", grpc.cert_file, grpc.key_file),
        ("tls", tls.cert_file, tls.key_file),
    ):
        if bool(cert_file) != bool(key_file):
            missing = f"{section}.key_file" if cert_file else f"{section}.cert_file"
            yield missing, f"{missing} is missing", "TLS needs a certificate and its key"
    if config.admin.tls and not (grpc.cert_file or tls.cert_file):
        hint = "set tls.cert_file and key_file, or grpc.cert_file and key_file"
        yield "admin.tls", "admin.tls is on without a certificate", hint
    asked = tls.client_certificates != "off"
    if asked and not tls.cert_file:
        what = f"tls.client_certificates is {tls.client_certificates} without TLS"
        yield "tls.client_certificates", what, "set tls.cert_file and key_file"
    if asked and not tls.ca_file:
        what = f"tls.client_certificates is {tls.client_certificates} and there is no tls.ca_file"
        yield "tls.ca_file", what, "set it to the authorities that sign clients"
    if tls.crl_file and not asked:
        what = "tls.crl_file is given, and no client certificates are asked for"
        yield "tls.crl_file", what, "set tls.client_certificates and tls.ca_file, or neither"
    if tls.cert_file and cluster.enabled and not cluster.cert_file:
        what = "tls.cert_file is given in a cluster without cluster.cert_file"
        hint = "brokers speak TLS to each other: set cluster.cert_file, key_file and ca_file"
        yield "tls.cert_file", what, hint


def _storage_contradictions(storage: StorageConfig) -> Iterator[Contradiction]:
    scheme = storage.url.partition("://")[0]
    mode = storage.mode
    if mode == "local" and scheme:
        wanted = "shared_fs" if scheme == "file" else "object_store"
        what = "storage.url names a store and storage.mode is local"
        yield "storage.url", what, f"set storage.mode to {wanted}"
    elif mode != "local" and not scheme:
        hint = "set storage.url, for example s3://bucket/prefix or file:///directory"
        yield "storage.mode", f"storage.mode is {mode} and there is no storage.url", hint
    elif mode != "local" and (mode == "shared_fs") != (scheme == "file"):
        hint = "shared_fs takes file:///directory, object_store takes s3://, gs:// or az://"
        yield "storage.url", f"storage.mode {mode} does not go with {scheme}://", hint
    if storage.merge_below_bytes > storage.merge_to_bytes:
        yield "storage.merge_below", "storage.merge_below is above storage.merge_to", ""


def _cluster_contradictions(config: BrokerConfig) -> Iterator[Contradiction]:
    cluster = config.cluster
    if cluster.enabled and config.storage.restore != "never":
        hint = "restore into a broker that is alone"
        yield "storage.restore", "a member of a cluster restores nothing by itself", hint
    files = {"cert_file": cluster.cert_file, "key_file": cluster.key_file, "ca_file": cluster.ca_file}
    missing = [name for name, path in files.items() if not path]
    if missing and len(missing) < len(files):
        hint = "TLS between members needs a certificate, its key and the authority of all members"
        yield f"cluster.{missing[0]}", f"cluster.{missing[0]} is missing", hint
    hosts = cluster.metadata.partition("://")[2].partition("/")[0]
    others = [one for one in f"{cluster.seed_nodes},{cluster.join},{hosts}".split(",") if one]
    if loopback_address(cluster.raft_addr) and not all(map(loopback_address, others)):
        hint = "set it to this host's address or name, as the others know it"
        what = f"cluster.raft_addr {cluster.raft_addr} cannot be reached from other hosts"
        yield "cluster.raft_addr", what, hint
    if cluster.enabled and not cluster.raft_addr:
        hint = "set it to host:port, where the other members reach this one"
        yield "cluster.raft_addr", "cluster.raft_addr is empty", hint
    yield from _etcd_contradictions(cluster)


def _etcd_contradictions(cluster: ClusterConfig) -> Iterator[Contradiction]:
    if cluster.metadata and (cluster.seed_nodes or cluster.join):
        given = "seed_nodes" if cluster.seed_nodes else "join"
        what = f"cluster.metadata and cluster.{given} are both given"
        hint = "with etcd brokers find each other there; leave seed_nodes and join out"
        yield f"cluster.{given}", what, hint
    if cluster.etcd_password and cluster.etcd_password_file:
        what = "cluster.etcd_password and cluster.etcd_password_file are both given"
        yield "cluster.etcd_password", what, "give one of them"
    if bool(cluster.etcd_user) != bool(cluster.etcd_password or cluster.etcd_password_file):
        what = "cluster.etcd_user goes with a password"
        hint = "set cluster.etcd_user and cluster.etcd_password_file, or neither"
        yield "cluster.etcd_user", what, hint
    if bool(cluster.etcd_cert_file) != bool(cluster.etcd_key_file):
        missing = "key_file" if cluster.etcd_cert_file else "cert_file"
        hint = "a client certificate needs its key"
        yield f"cluster.etcd_{missing}", f"cluster.etcd_{missing} is missing", hint
    for name in ("ca_file", "cert_file"):
        if getattr(cluster, f"etcd_{name}") and not cluster.metadata.startswith("etcds://"):
            what = f"cluster.etcd_{name} is given, and cluster.metadata speaks no TLS"
            hint = "write cluster.metadata as etcds://host:2379"
            yield f"cluster.etcd_{name}", what, hint


def _from_environment(
    environ: Mapping[str, str], known: Mapping[str, Setting], problems: list[Problem]
) -> Iterator[Given]:
    """``DANUBE_SERVER__HOST``; other names that begin with DANUBE_ belong to other tools.

    A near miss of a key without a section (``DANUBE_DATADIR``) is refused rather than ignored.
    """
    key_by_name = {environment_name(key): key for key in known}
    top = [name for name in key_by_name if "__" not in name]
    for name, text in environ.items():
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        if name in key_by_name:
            yield key_by_name[name], text, f"environment {name}"
        elif "__" in name:
            hint = suggestion(name, list(key_by_name)) or "docs/danube.yml lists every key"
            problems.append(Problem(f"environment {name}", "names no setting", hint))
        elif hint := suggestion(name, top, cutoff=0.9):
            problems.append(Problem(f"environment {name}", "names no setting", hint))


def environment_name(key: str) -> str:
    """The environment variable that sets a key: ``server.host`` is ``DANUBE_SERVER__HOST``."""
    return ENVIRONMENT_PREFIX + key.replace(".", "__").upper()


_FLAGS: Final = {
    "storage.url": "--storage",
    "storage.mode": "--storage",
    "storage.endpoint": "--s3-endpoint",
}


def flag_name(key: str) -> str:
    """The flag of ``danube start`` that sets a key, where there is one: ``log.level`` is ``--log-level``."""
    if key in _FLAGS:
        return _FLAGS[key]
    section, _, name = key.rpartition(".")
    named = f"{section}-{name}" if section in ("log", "grpc", "admin", "metrics") else name
    return "--" + named.replace("_", "-")


def _from_flags(flags: Mapping[str, object], known: Mapping[str, Setting]) -> Iterator[Given]:
    for key, value in flags.items():
        if value is not None:
            if key not in known:
                raise KeyError(key)  # the command line's own table is wrong: a bug, not a user's mistake
            yield key, show_plain(value), f"flag {flag_name(key)}"


def _from_file(path: Path | None, known: Mapping[str, Setting], problems: list[Problem]) -> Iterator[Given]:
    if path is not None:
        from danube.config import file as config_file

        yield from config_file.read(path, known, problems)
