"""Calls about access, of both clients, against a broker that asks nobody for a credential."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

import danube
import danube.sync
from danube.errors import NotFound, NotSupported
from tests.broker_process import BrokerProcess


def test_the_blocking_client_has_all_of_them(shared_broker: Callable[..., BrokerProcess]) -> None:
    with danube.sync.connect(shared_broker(2).address) as client:
        admin = client.admin
        admin.put_role("calls-role", ["Produce", "Lookup"])
        roles = {role["name"]: role for role in admin.roles()}
        assert roles["calls-role"]["permissions"] == ["Produce", "Lookup"] and roles["admin"]["system"]
        assert [role["name"] for role in admin.roles(prefix="calls-")] == ["calls-role"]
        admin.put_binding("calls", "user:anna", ["calls-role"], "topic", "/default/calls")
        [binding] = admin.bindings("topic", "/default/calls")
        assert (binding["principal_name"], binding["role_names"]) == ("anna", ["calls-role"])
        assert binding in admin.bindings() and binding in admin.bindings("topic")
        admin.delete_binding("calls", "topic", "/default/calls")
        assert admin.bindings("topic", "/default/calls") == []
        admin.delete_role("calls-role")
        with pytest.raises(NotFound):
            admin.delete_role("calls-role")

        made = admin.create_api_key("user:anna", ttl_s=60, name="calls-key", description="for a test")
        assert made["key"].startswith("dnb_calls-key_")
        [shown] = admin.api_keys(prefix="calls-")
        assert shown == {name: value for name, value in made.items() if name != "key"}
        admin.delete_api_key("calls-key")
        assert admin.api_keys(prefix="calls-") == []

        revoked = admin.revoke("principal", "user:calls", ttl_s=60, reason="left")
        assert revoked in admin.revocations()
        admin.delete_revocation("principal", "user:calls")
        assert revoked not in admin.revocations()

        answer = admin.can("produce", "/default/calls", principal="user:anna")
        assert answer["allowed"] and "auth.mode" in answer["reason"]
        with pytest.raises(NotSupported):
            admin.issue_token("user:anna")


def test_the_asyncio_client_has_them_too(shared_broker: Callable[..., BrokerProcess]) -> None:
    async def run() -> None:
        async with danube.connect(shared_broker(2).address) as client:
            made = await client.admin.create_api_key("service_account:calls", name="async-key")
            assert made["expires_us"] == 0
            [shown] = await client.admin.api_keys(prefix="async-", limit=1)
            assert shown["id"] == made["id"] == "async-key"
            await client.admin.delete_api_key("async-key")
            assert (await client.admin.can("View", scope="cluster"))["allowed"]

    asyncio.run(run())
