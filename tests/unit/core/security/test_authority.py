"""The authority: default deny, grants only, three scopes, implications, delegation, and what is kept."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from danube.core.metadata.commands import (
    AccessCommand,
    Binding,
    DeleteBinding,
    DeleteRole,
    PutBinding,
    PutRole,
    Role,
)
from danube.core.metadata.machine import Metadata
from danube.core.metadata.roles import BUILT_IN_ROLES, PERMISSIONS, Access
from danube.core.security import authority as authority_module
from danube.core.security.authority import (
    CLUSTER,
    EVERYBODY,
    IMPLIED,
    SOMEWHERE,
    Authority,
    Resource,
    namespace_of,
    namespace_resource,
    somewhere_in,
    subject_resource,
    super_admins_of,
    topic_resource,
)
from danube.core.security.principals import ANONYMOUS, INTERNAL, Identity, Principal
from danube.errors import InvalidArgument, NotAllowed, NotAuthenticated

ANNA = Identity(Principal("user", "anna"), "token")
APP = Identity(Principal("service_account", "app"), "token")
ORDERS = topic_resource("/default/orders")


class Site:
    """A metadata machine with an authority over its access."""

    def __init__(self, *super_admins: str) -> None:
        self.machine = Metadata()
        self.authority = Authority(lambda: self.machine.access, super_admins_of(super_admins))

    def put(self, command: AccessCommand) -> None:
        if self.machine.check(command):
            self.machine.apply(self.machine.version + 1, command)

    def bind(self, identity: Identity, roles: str, scope: str, resource: str = "", name: str = "b") -> None:
        kind, who = identity.principal
        self.put(PutBinding(binding=Binding(name, kind, who, tuple(roles.split()), scope, resource)))

    def allowed(self, identity: Identity, permission: str, resource: Resource) -> bool:
        return self.authority.decide(identity, permission, resource).allowed


@pytest.fixture
def site() -> Site:
    return Site()


def test_nothing_is_allowed_by_default(site: Site) -> None:
    for permission in PERMISSIONS:
        for resource in (CLUSTER, SOMEWHERE, ORDERS, namespace_resource("default")):
            for identity in (ANNA, ANONYMOUS):
                assert not site.allowed(identity, permission, resource)


def test_a_role_on_a_topic_holds_there_and_nowhere_else(site: Site) -> None:
    site.bind(APP, "producer", "topic", "/default/orders")
    assert site.allowed(APP, "Produce", ORDERS) and site.allowed(APP, "Lookup", ORDERS)
    assert not site.allowed(APP, "Consume", ORDERS)
    assert not site.allowed(APP, "Produce", topic_resource("/default/orders2"))
    assert not site.allowed(APP, "Produce", namespace_resource("default"))
    assert not site.allowed(APP, "Lookup", CLUSTER)
    assert not site.allowed(Identity(Principal("user", "app"), "token"), "Produce", ORDERS), "another kind"


def test_a_partition_is_judged_as_its_topic(site: Site) -> None:
    site.bind(APP, "consumer", "topic", "/default/orders")
    assert topic_resource("/default/orders-part-7") == ORDERS
    assert site.allowed(APP, "Consume", topic_resource("/default/orders-part-7"))
    with pytest.raises(InvalidArgument) as caught:
        site.bind(APP, "consumer", "topic", "/default/orders-part-7")
    assert caught.value.hint == "bind it on /default/orders"


def test_a_namespace_gives_rights_on_its_topics_alone(site: Site) -> None:
    site.bind(APP, "producer", "namespace", "a")
    assert site.allowed(APP, "Produce", topic_resource("/a/t"))
    assert site.allowed(APP, "Produce", namespace_resource("/a")), "with a slash, as guides write it"
    for other in ("/ab/t", "/a-/t", "/A/t", "/b/a", "a/t", "/a/b/c", "/a/../t", "a"):
        assert not site.allowed(APP, "Produce", topic_resource(other)), other


def test_the_cluster_gives_rights_everywhere(site: Site) -> None:
    site.bind(APP, "viewer", "cluster")
    for resource in (CLUSTER, SOMEWHERE, ORDERS, namespace_resource("x"), subject_resource("value")):
        assert site.allowed(APP, "View", resource)
        assert not site.allowed(APP, "ManageTopic", resource)


def test_subjects_stand_beside_topics(site: Site) -> None:
    site.bind(APP, "namespace-admin", "topic", "orders-value")
    site.bind(ANNA, "namespace-admin", "namespace", "default")
    assert site.allowed(APP, "ManageSchema", subject_resource("orders-value"))
    assert not site.allowed(ANNA, "ManageSchema", subject_resource("orders-value"))
    assert site.allowed(ANNA, "ManageSchema", subject_resource("/default/orders"))
    assert namespace_of(subject_resource("orders-value")) == namespace_of(CLUSTER) == ""


@pytest.mark.parametrize("permission", PERMISSIONS)
def test_what_a_permission_brings_along(site: Site, permission: str) -> None:
    site.put(PutRole(role=Role("one", (permission,))))
    site.bind(APP, "one", "topic", "/default/orders")
    held = {name for name in PERMISSIONS if site.allowed(APP, name, ORDERS)}
    manages = permission.startswith("Manage")
    expected = {permission} | ({"View"} if manages else set())
    if manages or permission in ("Produce", "Consume", "View"):
        expected.add("Lookup")
    assert held == expected == {permission, *IMPLIED.get(permission, ())}


def test_the_admin_holds_everything_and_a_missing_role_nothing(site: Site) -> None:
    site.bind(ANNA, "admin", "cluster")
    assert all(site.allowed(ANNA, permission, ORDERS) for permission in PERMISSIONS)
    site.bind(APP, "ghost", "cluster")
    assert not any(site.allowed(APP, permission, ORDERS) for permission in PERMISSIONS)
    site.put(PutRole(role=Role("ghost", ("Consume",))))
    assert site.allowed(APP, "Consume", ORDERS), "the role was made meanwhile"


def test_changes_are_seen_at_once(site: Site) -> None:
    before = site.authority.version
    site.bind(APP, "producer", "cluster")
    assert site.authority.version != before
    assert site.allowed(APP, "Produce", ORDERS)
    site.put(PutRole(role=Role("producer", ("Lookup",))))
    assert not site.allowed(APP, "Produce", ORDERS), "a stored role takes the built-in one's place"
    site.put(DeleteRole(name="producer"))
    assert site.allowed(APP, "Produce", ORDERS)
    site.put(DeleteBinding(scope="cluster", resource_name="", id="b"))
    assert not site.allowed(APP, "Produce", ORDERS)
    site.bind(APP, "producer", "cluster")
    site.bind(ANNA, "producer", "cluster")  # the same binding, given to another
    assert site.allowed(ANNA, "Produce", ORDERS) and not site.allowed(APP, "Produce", ORDERS)
    site.machine = Metadata.restore(site.machine.snapshot())
    assert site.allowed(ANNA, "Produce", ORDERS) and not site.allowed(APP, "Produce", ORDERS)


def test_super_admins_need_no_role() -> None:
    site = Site("user:anna", "app")
    assert site.allowed(ANNA, "ManageCluster", CLUSTER)
    assert not site.allowed(Identity(Principal("service_account", "anna"), "token"), "Lookup", ORDERS)
    for kind in ("user", "service_account"):  # a bare name is both
        assert site.allowed(Identity(Principal(kind, "app"), "token"), "ManageCluster", CLUSTER)
    for text in ("broker_internal:1", "x:y", ""):
        with pytest.raises(Exception, match="principal"):
            super_admins_of([text])


def test_the_broker_may_do_all_and_no_binding_makes_one_anonymous(site: Site) -> None:
    assert site.allowed(INTERNAL, "ManageCluster", CLUSTER)
    kind, name = "anonymous", "anonymous"
    site.put(PutBinding(binding=Binding("a", kind, name, ("admin",), "cluster")))
    assert not site.allowed(Identity(Principal(kind, name), "none"), "Lookup", ORDERS)


def test_refusals_say_what_is_missing_and_not_what_exists(site: Site) -> None:
    with pytest.raises(NotAllowed) as caught:
        site.authority.demand(APP, "Produce", ORDERS)
    told = caught.value
    assert str(told) == (
        "service_account:app has no permission Produce on topic /default/orders: "
        "no role that is bound to it gives that there"
    )
    assert "danube security can" in told.hint
    with pytest.raises(NotAllowed, match="on anything"):
        site.authority.demand(APP, "Lookup", SOMEWHERE)
    with pytest.raises(NotAllowed, match="on cluster:"):
        site.authority.demand(APP, "Lookup", CLUSTER)
    with pytest.raises(NotAuthenticated, match="no credential"):
        site.authority.demand(ANONYMOUS, "Lookup", ORDERS)
    site.bind(APP, "producer", "topic", "/default/orders")
    site.authority.demand(APP, "Produce", ORDERS)
    with pytest.raises(NotAllowed, match="/default/other"):
        site.authority.demand(APP, "Produce", ORDERS, topic_resource("/default/other"))


def test_a_decision_names_binding_role_and_scope(site: Site) -> None:
    site.bind(APP, "viewer producer", "namespace", "default", name="team")
    decision = site.authority.decide(APP, "Produce", ORDERS)
    assert decision.binding is not None
    assert (decision.binding.id, decision.binding.scope, decision.role) == ("team", "namespace", "producer")
    assert decision.reason == "role producer, bound to it on namespace default by binding team"
    assert "super_admins" in Site("anna").authority.decide(ANNA, "View", CLUSTER).reason
    assert "auth.mode" in EVERYBODY.decide(ANONYMOUS, "ManageCluster", CLUSTER).reason


def test_lists_show_what_may_be_looked_up(site: Site) -> None:
    site.bind(APP, "producer", "topic", "/default/orders")
    site.bind(APP, "viewer", "namespace", "b", name="c")
    seen = site.authority.sees_topic(APP)
    names = ["/default/orders", "/default/other", "/b/x", "/bb/x"]
    assert [name for name in names if seen(name)] == ["/default/orders", "/b/x"]
    for name in names:
        assert site.authority.visible(APP, topic_resource(name)) == seen(name)
    assert all(site.authority.sees_topic(INTERNAL)(name) for name in names)
    assert not any(site.authority.sees_topic(ANONYMOUS)(name) for name in names)
    assert site.allowed(APP, "Lookup", SOMEWHERE) and not site.allowed(APP, "ManageTopic", SOMEWHERE)
    for namespace, some in (("default", True), ("/b", True), ("bb", False)):
        assert site.allowed(APP, "Lookup", somewhere_in(namespace)) == some
    assert not site.allowed(APP, "View", somewhere_in("default"))
    assert site.authority.topics_held(APP) == ["/default/orders"]
    site.bind(APP, "viewer", "cluster")
    assert site.allowed(APP, "Lookup", somewhere_in("bb"))
    with pytest.raises(NotAllowed, match="on anything in namespace bb"):
        site.authority.demand(ANNA, "Lookup", somewhere_in("bb"))


def test_groups_have_rights_and_lend_them(site: Site) -> None:
    in_group = ANNA._replace(groups=("readers", "writers"))
    site.bind(Identity(Principal("group", "writers"), ""), "producer", "topic", "/default/orders", "team")
    assert site.allowed(in_group, "Produce", ORDERS) and not site.allowed(ANNA, "Produce", ORDERS)
    assert not site.allowed(ANNA._replace(groups=("writer",)), "Produce", ORDERS)
    assert not site.allowed(Identity(Principal("user", "writers"), "token"), "Produce", ORDERS)
    assert not site.allowed(Identity(Principal("group", "writers"), "token"), "Produce", ORDERS), (
        "no principal"
    )
    decision = site.authority.decide(in_group, "Produce", ORDERS)
    who = "group:writers, which it is in,"
    assert decision.reason == f"role producer, bound to {who} on topic /default/orders by binding team"
    assert site.authority.sees_topic(in_group)("/default/orders")
    assert not site.authority.sees_topic(ANNA)("/default/orders")
    assert site.authority.topic_spans(in_group) == [("/default/orders", "/default/orders\0")]
    assert not site.authority.topic_spans(ANNA)
    assert site.authority.topics_held(in_group) == ["/default/orders"] and not site.authority.topics_held(
        ANNA
    )
    site.bind(ANNA, "producer", "topic", "/default/orders", "own")
    assert site.authority.decide(in_group, "Produce", ORDERS).reason.endswith("by binding own")
    for name in ("team", "own"):
        site.put(DeleteBinding(scope="topic", resource_name="/default/orders", id=name))
    assert not site.allowed(in_group, "Produce", ORDERS)


def test_a_group_s_name_is_no_administrator_s() -> None:
    site = Site("root")
    assert not site.allowed(ANNA._replace(groups=("root",)), "View", CLUSTER)


# -- delegation ---------------------------------------------------------------------------------------


def binding_for(roles: str, scope: str, resource: str, kind: str = "user") -> Binding:
    return Binding("new", kind, "bob", tuple(roles.split()), scope, resource)


@pytest.mark.parametrize(
    ("binding", "allowed"),
    [
        (binding_for("producer consumer", "namespace", "team"), True),
        (binding_for("namespace-admin", "topic", "/team/t"), True),
        (binding_for("viewer", "topic", "/team/t"), True),
        (binding_for("admin", "namespace", "team"), False),  # it holds no ManageCluster
        (binding_for("producer admin", "topic", "/team/t"), False),
        (binding_for("ghost", "namespace", "team"), False),  # it may be made later, with anything
        (binding_for("producer", "cluster", ""), False),
        (binding_for("producer", "namespace", "team2"), False),
        (binding_for("producer", "topic", "/team2/t"), False),
        (binding_for("producer", "topic", "team"), False),  # a subject
        (binding_for("producer", "namespace", "team", "broker_internal"), False),
        (binding_for("producer", "namespace", "team", "group"), True),
        (binding_for("admin", "namespace", "team", "group"), False),
    ],
)
def test_a_namespace_admin_gives_away_what_it_holds(site: Site, binding: Binding, allowed: bool) -> None:
    assert not site.authority.may_bind(ANNA, binding).allowed
    site.bind(ANNA, "namespace-admin", "namespace", "team")
    decision = site.authority.may_bind(ANNA, binding)
    assert decision.allowed == allowed, decision.reason
    site.bind(APP, "admin", "cluster", name="root")
    assert site.authority.may_bind(APP, binding).allowed


def test_a_topic_alone_gives_no_right_to_bind(site: Site) -> None:
    site.bind(ANNA, "namespace-admin", "topic", "/team/t")
    assert not site.authority.may_bind(ANNA, binding_for("producer", "topic", "/team/t")).allowed


# -- against a plain reading of the rules -------------------------------------------------------------

CALM = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
NAMES = st.sampled_from(["a", "ab", "b"])
TOPICS = st.builds(lambda namespace, topic: f"/{namespace}/{topic}", NAMES, st.sampled_from(["t", "tt", "a"]))
PLACES = st.one_of(
    st.just(("cluster", "")),
    NAMES.map(lambda name: ("namespace", name)),
    TOPICS.map(lambda name: ("topic", name)),
    st.just(("topic", "subject")),
)
IDENTITIES = st.sampled_from([ANNA, APP])
ROLE_NAMES = st.sampled_from([*BUILT_IN_ROLES, "r1", "r2"])
PERMISSION = st.sampled_from(PERMISSIONS)
COMMANDS = st.one_of(
    st.builds(
        lambda name, permissions: PutRole(role=Role(name, tuple(sorted(permissions)))),
        ROLE_NAMES,
        st.frozensets(PERMISSION, max_size=4),
    ),
    st.builds(
        lambda name, identity, roles, place: PutBinding(
            binding=Binding(name, *identity.principal, tuple(sorted(roles)), *place)
        ),
        st.sampled_from(["x", "y"]),
        IDENTITIES,
        st.frozensets(ROLE_NAMES, min_size=1, max_size=3),
        PLACES,
    ),
    st.builds(
        lambda name, place: DeleteBinding(scope=place[0], resource_name=place[1], id=name),
        st.sampled_from(["x", "y"]),
        PLACES,
    ),
    ROLE_NAMES.map(lambda name: DeleteRole(name=name)),
)
QUESTIONS = st.lists(
    st.tuples(IDENTITIES, PERMISSION, PLACES.map(lambda place: Resource(*place))), max_size=6
)


def plainly(access: Access, identity: Identity, permission: str, resource: Resource) -> bool:
    """The rules read one by one, without anything that is kept."""
    for binding in access.bindings():
        if (binding.principal_type, binding.principal_name) != identity.principal:
            continue
        covers = (
            binding.scope == "cluster"
            or (binding.scope, binding.resource_name) == resource
            or (binding.scope == "namespace" and resource.name.startswith(f"/{binding.resource_name}/"))
        )
        for role in filter(None, map(access.find_role, binding.role_names)):
            if covers and any(permission in (one, *IMPLIED.get(one, ())) for one in role.permissions):
                return True
    return False


@CALM
@given(st.lists(st.tuples(COMMANDS, QUESTIONS), max_size=12))
def test_decisions_equal_a_plain_reading_after_every_change(
    course: list[tuple[AccessCommand, list[tuple[Identity, str, Resource]]]],
) -> None:
    site = Site()
    for command, questions in course:
        try:
            site.put(command)
        except Exception:
            pass  # nothing to delete: nothing changes
        for question in questions:
            assert site.allowed(*question) == plainly(site.machine.access, *question)


@CALM
@given(st.lists(COMMANDS, max_size=8), IDENTITIES, PERMISSION, PLACES, PLACES, ROLE_NAMES)
def test_a_further_binding_takes_nothing_away(
    commands: list[AccessCommand],
    identity: Identity,
    permission: str,
    asked: tuple[str, str],
    place: tuple[str, str],
    role: str,
) -> None:
    site = Site()
    for command in commands:
        if not isinstance(command, DeleteBinding | DeleteRole):
            site.put(command)
    before = site.allowed(identity, permission, Resource(*asked))
    site.bind(identity, role, *place, name="further")
    assert site.allowed(identity, permission, Resource(*asked)) >= before


@CALM
@given(st.lists(COMMANDS, max_size=8), IDENTITIES, PLACES, st.frozensets(ROLE_NAMES, min_size=1, max_size=3))
def test_nobody_gains_a_permission_by_binding(
    commands: list[AccessCommand], identity: Identity, place: tuple[str, str], roles: frozenset[str]
) -> None:
    site = Site()
    for command in commands:
        if not isinstance(command, DeleteBinding | DeleteRole):
            site.put(command)
    everywhere = [CLUSTER, *(Resource("namespace", name) for name in ("a", "ab", "b")),
                  *(Resource("topic", f"/{name}/t") for name in ("a", "ab", "b"))]  # fmt: skip

    def held() -> set[tuple[str, Resource]]:
        return {(one, at) for one in PERMISSIONS for at in everywhere if site.allowed(identity, one, at)}

    before = held()
    binding = Binding("self", *identity.principal, tuple(sorted(roles)), *place)
    manages_cluster = site.allowed(identity, "ManageCluster", CLUSTER)
    if site.authority.may_bind(identity, binding).allowed and not manages_cluster:
        site.put(PutBinding(binding=binding))
        assert held() == before


@given(st.text("ab0/-part.\n ü", max_size=30), st.integers(0, 99_999))
def test_names_of_partitions_never_differ_from_their_topics(text: str, partition: int) -> None:
    name = f"/default/{text}"
    assert topic_resource(f"{name}-part-{partition}").name in (name, f"{name}-part-{partition}")
    if "\n" not in text:
        assert topic_resource(f"{name}-part-{partition}").name == name


def test_what_is_kept_is_bounded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authority_module, "DECISIONS_KEPT_MAX", 3)
    monkeypatch.setattr(authority_module, "PRINCIPALS_KEPT_MAX", 2)
    site.bind(APP, "producer", "cluster")
    for number in range(10):
        somebody = Identity(Principal("user", f"u{number}"), "token")
        assert not site.allowed(somebody, "Produce", topic_resource(f"/default/t{number}"))
        assert site.allowed(APP, "Produce", topic_resource(f"/default/t{number}"))
        assert len(site.authority._decisions) <= 3 and len(site.authority._held) <= 2
