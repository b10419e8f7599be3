"""The channel of ``danube-admin`` and ``danube-cli``, as their flags say; errors worth another try."""

from __future__ import annotations

from typing import Final

import grpc

from danube.cli.upstream.endpoint import Endpoint
from danube.errors import DanubeError
from danube.load.links.grpc_client import OPTIONS, GrpcChannel

RETRIED: Final = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"})


def status_of(error: DanubeError) -> str:
    """Name of the status behind an error that came from a call; empty for any other."""
    return str(error.facts.get("status", ""))


def open_channel(endpoint: Endpoint) -> GrpcChannel:
    metadata = [("authorization", f"Bearer {endpoint.token}")] if endpoint.token else []
    if not endpoint.tls:
        return GrpcChannel(grpc.insecure_channel(endpoint.target, OPTIONS), metadata)
    named = (("grpc.ssl_target_name_override", endpoint.domain),) if endpoint.domain else ()
    credentials = grpc.ssl_channel_credentials(
        root_certificates=endpoint.authority_certificate or None,
        private_key=endpoint.private_key or None,
        certificate_chain=endpoint.certificate or None,
    )
    return GrpcChannel(grpc.secure_channel(endpoint.target, credentials, (*OPTIONS, *named)), metadata)
