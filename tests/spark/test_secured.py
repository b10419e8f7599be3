"""Spark beside a broker with TLS and tokens: every task shows its token, and no plan, error or log does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from danube import sync
from danube.client.blocking.client import Client
from danube.client.machine.tls import TlsOptions
from danube.errors import DanubeError
from tests.broker_process import BrokerProcess
from tests.certificates import Authority
from tests.e2e.authority_site import ENVIRONMENT, root, token

pytest.importorskip("pyspark")
from pyspark.errors import PySparkException

from danube.spark import read
from danube.spark.jobs.export import export
from danube.spark.jobs.replay import replay

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TOPIC = "/default/orders"
RECORDS = 1_000


class Secured:
    """The broker, its administrator, and what jobs say to be let in."""

    def __init__(self, place: Path) -> None:
        authority = Authority(place / "authority")
        served = authority.sign("server", "IP:127.0.0.1,DNS:localhost")
        environment = {
            **ENVIRONMENT,
            "DANUBE_TLS__CERT_FILE": served.cert_file,
            "DANUBE_TLS__KEY_FILE": served.key_file,
        }
        self.place = place
        self.ca = str(authority.cert)
        self.broker = BrokerProcess(place / "data", workers=1, environment=environment).start()
        self.url = self.broker.address.replace("danube://", "danube+tls://")
        self.admin: Client = sync.connect(self.url, token=root(), tls=TlsOptions(ca_file=self.ca)).open()
        for role in ("consumer", "producer"):
            self.admin.admin.put_binding(role, f"service_account:{role}", [role], "cluster")
            (place / role).write_text(token(role))

    def options(self, role: str, **more: str) -> dict[str, str]:
        """With the token in a file."""
        return {"broker": self.url, "tokenFile": str(self.place / role), "tlsCa": self.ca, **more}

    def stored(self, topic: str) -> int:
        return sum(part["log_end"] for part in self.admin.admin.topic_ends(topic))

    def close(self) -> None:
        self.admin.close()
        self.broker.kill()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    made = Secured(tmp_path_factory.mktemp("secured"))
    try:
        with made.admin.producer(TOPIC, partitions=2) as producer:
            producer.send_many([b"%d" % number for number in range(RECORDS)])
        yield made
    finally:
        made.close()


def reading(spark: Any, site: Secured, **more: str) -> Any:
    return spark.read.format("danube").options(**site.options("consumer", topic=TOPIC, **more)).load()


def test_tasks_read_with_the_role_consumer_alone(spark: Any, site: Secured) -> None:
    assert reading(spark, site).select("offset").count() == RECORDS
    bulk = read(spark, site.options("consumer", topic=TOPIC), ["payload"])
    assert bulk.distinct().count() == RECORDS
    assert site.admin.admin.list_subscriptions(TOPIC) == []


def test_a_stream_goes_into_a_topic_with_two_roles(spark: Any, site: Secured, checkpoint: str) -> None:
    topic = "/default/copies"
    options = site.options("consumer", topic=TOPIC, startingOffsets="earliest", maxRecordsPerTrigger="400")
    records = spark.readStream.format("danube").options(**options).load().select("payload", "key")
    query = (
        records.writeStream.format("danube")
        .options(**site.options("producer", topic=topic, checkpointLocation=checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    assert site.stored(topic) == RECORDS


def test_tasks_write_with_the_role_producer_alone(spark: Any, site: Secured) -> None:
    topic = "/default/written"
    rows = spark.range(0, 500, 1, 2).selectExpr("cast(id AS string) AS payload")
    for _ in range(2):  # the second time all of it is there, and is compared
        options = site.options("producer", topic=topic, jobId="once")
        rows.write.format("danube").mode("append").options(**options).save()
    assert site.stored(topic) == 500


def test_jobs_read_and_write_with_one_role_each(spark: Any, site: Secured, tmp_path: Path) -> None:
    reader = {f"source{name[0].upper()}{name[1:]}": text for name, text in site.options("consumer").items()}
    given = {
        **site.options("producer", to=site.url, toTopic="/default/replayed", topic=TOPIC),
        "storage": str(site.broker.data_dir), "sourceTokenFile": reader["sourceTokenFile"],
        "sourceTlsCa": site.ca, "state": str(tmp_path / "state"),
    }  # fmt: skip
    assert replay.run(given, spark).counts["records"] == RECORDS
    assert site.stored("/default/replayed") == RECORDS
    lake = tmp_path / "lake"
    given = site.options("consumer", topic=TOPIC, storage=str(site.broker.data_dir), target=str(lake))
    export.run(given, spark)
    assert spark.read.parquet(str(lake / "default.orders")).count() == RECORDS


def test_a_replay_into_a_topic_without_the_right_stores_nothing(
    spark: Any, site: Secured, tmp_path: Path
) -> None:
    """Whoever may read the source, and the disk that it lies on, may not write for that."""
    site.admin.admin.create_topic("/default/denied", partitions=2)
    given = {
        **site.options("consumer", to=site.url, toTopic="/default/denied", topic=TOPIC),
        "storage": str(site.broker.data_dir), "state": str(tmp_path / "state"),
    }  # fmt: skip
    with pytest.raises(DanubeError, match="service_account:consumer has no permission"):
        replay.run(given, spark)
    assert site.stored("/default/denied") == 0


def test_a_token_of_the_wrong_role_is_refused_in_words(spark: Any, site: Secured) -> None:
    rows = spark.range(1).selectExpr("'x' AS payload")
    with pytest.raises(PySparkException, match="service_account:consumer has no permission Produce"):
        rows.write.format("danube").mode("append").options(**site.options("consumer", topic=TOPIC)).save()


# -- nothing shows the token --------------------------------------------------------------------------


def test_a_token_among_the_options_is_shown_nowhere(
    spark: Any, site: Secured, checkpoint: str, capfd: pytest.CaptureFixture[str]
) -> None:
    secret = token("consumer")
    options = {"broker": site.url, "token": secret, "tlsCa": site.ca, "topic": TOPIC}
    frame = spark.read.format("danube").options(**options).load().where("offset > 10")
    told = [frame._jdf.queryExecution().toString(), read(spark, options)._jdf.queryExecution().toString()]
    frame.explain(mode="extended")
    frame.createOrReplaceTempView("secured")
    told += [row[0] for row in spark.sql("EXPLAIN EXTENDED SELECT count(*) FROM secured").collect()]
    assert frame.count() > 0
    for wrong in ({"topic": "/default/none"}, {"tlsCa": "/none"}, {"tokenFile": "/x"}, {"tokken": secret}):
        with pytest.raises(PySparkException) as raised:
            spark.read.format("danube").options(**{**options, **wrong}).load().count()
        told.append(str(raised.value))
    rows = spark.range(1).selectExpr("'x' AS payload")
    write = rows.write.format("danube").mode("append").options(**options)
    with pytest.raises(PySparkException, match="no permission Produce") as refused:
        write.save()
    told += [str(refused.value), str(refused.value.__cause__)]
    stream = spark.readStream.format("danube").options(**options, startingOffsets="earliest").load()
    query = stream.writeStream.format("noop").option("checkpointLocation", checkpoint)
    running = query.trigger(availableNow=True).start()
    assert running.awaitTermination(120)
    running.explain(extended=True)
    told += [str(running.lastProgress), running._jsq.toString()]
    told += [str(pair) for pair in spark.sparkContext.getConf().getAll()]
    told += [str(spark._jvm.java.lang.System.getProperties()), *capfd.readouterr()]
    told += [path.read_text("latin-1") for path in Path(checkpoint).rglob("*") if path.is_file()]
    assert [text for text in told if secret in text or secret.split(".")[2] in text] == []
    assert any("danube" in text for text in told)


def test_a_token_file_that_is_replaced_counts(spark: Any, site: Secured, tmp_path: Path) -> None:
    own = tmp_path / "token"
    own.write_text(token("consumer", ttl_s=60, age_s=3_600))
    with pytest.raises(PySparkException, match="oken"):
        reading(spark, site, tokenFile=str(own)).count()
    own.write_text(token("consumer"))
    assert reading(spark, site, tokenFile=str(own)).count() == RECORDS
