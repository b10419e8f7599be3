"""The gate that records pass when their topic has a schema: the named schema, and the payloads.

``none`` checks nothing.  ``enforce`` refuses a batch whose schema id is missing, unknown or of another
subject, or whose version does not exist.  If the topic validates payloads, it also refuses a batch with a
payload that does not fit its schema version (the latest, if the batch names none). ``warn`` makes the same
checks, counts failures, logs once a second, and refuses nothing.  On a compacted topic a tombstone (a key
with an empty payload) fits every schema, and a batch of tombstones need not name one.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

from danube.broker.operations.schemas import definition_of
from danube.core.batch.columns import BatchView
from danube.core.metadata.schemas import SchemaVersion, Subject
from danube.errors import DanubeError, PayloadInvalid
from danube.host import telemetry
from danube.limits import SCHEMA_VALIDATORS_MAX
from danube.schema import kinds
from danube.schema.model import SchemaType

if TYPE_CHECKING:
    from danube.broker.traffic import Traffic
    from danube.cluster.log.local_log import LocalLog
    from danube.core.batch.format import BatchHeader
    from danube.core.metadata.commands import TopicSchema

_log = telemetry.events("schema")
_FOUND_CHARACTERS_MAX: Final = 500  # of what a validator says


class _Problem(NamedTuple):
    """Fault of a batch, and the number of its records that have it."""

    error: PayloadInvalid
    record_count: int


class SchemaGate:
    """The gate of one worker.  Validators are built once for each version; the least used go first."""

    def __init__(self, metadata: LocalLog, counters: Traffic) -> None:
        self._metadata = metadata
        self._counters = counters
        self._validators: OrderedDict[tuple[int, int], kinds.Validator] = OrderedDict()

    def check(
        self, partition: str, schema: TopicSchema, compacts: bool, batch: memoryview, header: BatchHeader
    ) -> None:
        """Raise PayloadInvalid for a refused batch; count refused records and warnings.

        ``compacts``: of the topic's policy.
        """
        if schema.validation == "none":
            return
        enforced = schema.validation == "enforce"
        problem = self._problem(schema, compacts, BatchView(batch, header), enforced)
        if problem is None:
            return
        if enforced:
            self._counters.add("schema_rejected", header.record_count)
            raise problem.error
        self._counters.add("schema_warnings", problem.record_count)
        _log.limited(
            "records break their topic's schema",
            source=partition,
            subject=schema.subject,
            records=problem.record_count,
            example=str(problem.error),
        )

    def _problem(
        self, schema: TopicSchema, compacts: bool, view: BatchView, first_only: bool
    ) -> _Problem | None:
        count = view.record_count
        if compacts and view.removes_keys_only():
            return None
        schema_id, number = view.schema_id, view.schema_version or 0
        if schema_id is None:
            why = f"the topic keeps to subject {schema.subject!r}"
            error = _invalid(
                "schema_missing", "the records name no schema", why, "send them with a schema id"
            )
            return _Problem(error, count)
        found = self._find(schema.subject, schema_id, number)
        if found is None:
            return _Problem(self._unfound(schema.subject, schema_id, number), count)
        if not schema.validate_payload:
            return None
        return self._look_at_payloads(*found, compacts, view, first_only)

    def _find(self, subject: str, schema_id: int, number: int) -> tuple[Subject, SchemaVersion] | None:
        known = self._metadata.state.registry.find(subject)
        if known is None or known.schema_id != schema_id:
            return None
        version = known.find(number) if number else known.latest
        return None if version is None else (known, version)

    def _unfound(self, subject: str, schema_id: int, number: int) -> PayloadInvalid:
        known = self._metadata.state.registry.find(subject)
        if known is None or known.schema_id != schema_id:  # of whom it is may not be the sender's to know
            what = f"schema id {schema_id} is not that of subject {subject!r}"
            hint = "register the schema for the topic's subject, and send the id that this gives"
            return _invalid("schema_unknown", what, "the topic keeps to this subject", hint)
        what = f"subject {subject!r} has no version{f' {number}' if number else ''}"
        return _invalid(
            "schema_version_unknown", what, "it was deleted or never registered", "send another version"
        )

    def _look_at_payloads(
        self, subject: Subject, version: SchemaVersion, compacts: bool, view: BatchView, first_only: bool
    ) -> _Problem | None:
        if version.schema_type == SchemaType.BYTES:
            return None
        try:
            validator = self._validator(subject, version)
        except DanubeError as error:
            what = f"version {version.number} of subject {subject.subject!r} cannot be used"
            return _Problem(_invalid("schema_unusable", what, str(error), error.hint), view.record_count)
        first: PayloadInvalid | None = None
        invalid_count = 0
        for index, payload in enumerate(view.payloads()):
            wrong = validator(payload)
            if wrong is None or (compacts and not payload and view.removes_key(index)):
                continue
            invalid_count += 1
            if first is None:
                of = f"subject {subject.subject!r} version {version.number}"
                what = f"record {index} does not keep to {version.schema_type} {of}"
                hint = "send what the schema describes, or register a version that allows it"
                first = _invalid("payload_invalid", what, wrong[:_FOUND_CHARACTERS_MAX], hint, index)
                if first_only:
                    break
        return None if first is None else _Problem(first, invalid_count)

    def _validator(self, subject: Subject, version: SchemaVersion) -> kinds.Validator:
        """The check of payloads for one version.  Neither ids nor version numbers are ever used again."""
        key = subject.schema_id, version.number
        validator = self._validators.get(key)
        if validator is None:
            validator = self._validators[key] = kinds.validator(definition_of(version))
            if len(self._validators) > SCHEMA_VALIDATORS_MAX:
                self._validators.popitem(last=False)
        else:
            self._validators.move_to_end(key)
        return validator


def _invalid(rule: str, what: str, why: str, hint: str, index: int = -1) -> PayloadInvalid:
    """The refusal of a batch; ``rule`` is a stable word, ``index`` the record's place in it."""
    place = {"index": index} if index >= 0 else {}
    return PayloadInvalid(what, why=f"{rule}: {why}", hint=hint, rule=rule, **place)
