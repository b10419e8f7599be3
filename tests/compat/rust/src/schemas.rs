//! The schema registry, and producers that name a schema.

use danube_client::{CompatibilityMode, SchemaType, SubType};

use crate::steps::{connect, ensure, read, text, Outcome};

const FIRST: &str = r#"{"type":"object","properties":{"id":{"type":"integer"}},"required":["id"]}"#;
const SECOND: &str = r#"{"type":"object","properties":{"id":{"type":"integer"},"note":{"type":"string"}},"required":["id"]}"#;
const WORSE: &str = r#"{"type":"object","properties":{"id":{"type":"string"}},"required":["id"]}"#;
const AVRO: &str = r#"{"type":"record","name":"Point","fields":[{"name":"x","type":"int"}]}"#;

pub async fn schema_subject(url: &str, topic: &str) -> Outcome {
    let client = connect(url).await?;
    let registry = client.schema();
    let subject = topic.trim_start_matches('/').replace('/', "-");
    let id = registry
        .register_schema(&subject)
        .with_type(SchemaType::JsonSchema)
        .with_schema_data(FIRST)
        .with_description("orders")
        .execute()
        .await?;
    let again = registry
        .register_schema(&subject)
        .with_type(SchemaType::JsonSchema)
        .with_schema_data(FIRST)
        .execute()
        .await?;
    ensure(again == id, "the same definition got another id")?;
    let latest = registry.get_latest_schema(&subject).await?;
    ensure(
        latest.schema_id == id && latest.version == 1,
        format!("latest is {latest:?}"),
    )?;
    let mut producer = client
        .new_producer()
        .with_topic(topic)
        .with_name("p")
        .with_reliable_dispatch()
        .with_schema_subject(&subject)
        .build()?;
    producer.create().await?;
    let mut reader = read(&client, topic, "c", "s", SubType::Exclusive, &[]).await?;
    producer.send(br#"{"id":1}"#.to_vec(), None).await?;
    let message = reader.next().await?;
    ensure(
        message.schema_id == Some(id),
        format!("the message's schema id is {:?}", message.schema_id),
    )?;
    ensure(
        message.schema_version == Some(1),
        format!("its version is {:?}", message.schema_version),
    )?;
    ensure(text(&message) == r#"{"id":1}"#, "the payload changed")?;
    let by_id = registry.get_schema_by_id(id).await?;
    ensure(
        by_id.subject == subject,
        format!("schema {id} is of {}", by_id.subject),
    )?;
    reader.close().await;
    Ok(())
}

pub async fn schema_versions(url: &str, topic: &str) -> Outcome {
    let client = connect(url).await?;
    let registry = client.schema();
    let subject = topic.trim_start_matches('/').replace('/', "-");
    for definition in [FIRST, SECOND] {
        registry
            .register_schema(&subject)
            .with_type(SchemaType::JsonSchema)
            .with_schema_data(definition)
            .execute()
            .await?;
    }
    let versions = registry.list_versions(&subject).await?;
    ensure(versions == [1, 2], format!("versions are {versions:?}"))?;
    let mut pinned = client
        .new_producer()
        .with_topic(topic)
        .with_name("pinned")
        .with_reliable_dispatch()
        .with_schema_version(&subject, 1)
        .build()?;
    pinned.create().await?;
    let mut newer = client
        .new_producer()
        .with_topic(topic)
        .with_name("newer")
        .with_reliable_dispatch()
        .with_schema_min_version(&subject, 2)
        .build()?;
    newer.create().await?;
    let mut reader = read(&client, topic, "c", "s", SubType::Exclusive, &[]).await?;
    pinned.send(br#"{"id":1}"#.to_vec(), None).await?;
    newer.send(br#"{"id":2}"#.to_vec(), None).await?;
    let first = reader.next().await?;
    reader.consumer.ack(&first).await?;
    let second = reader.next().await?;
    ensure(
        (first.schema_version, second.schema_version) == (Some(1), Some(2)),
        format!(
            "versions came as {:?} and {:?}",
            first.schema_version, second.schema_version
        ),
    )?;
    reader.close().await;
    Ok(())
}

pub async fn schema_compatibility(url: &str, topic: &str) -> Outcome {
    let client = connect(url).await?;
    let registry = client.schema();
    let subject = format!("{}-rules", topic.trim_start_matches('/').replace('/', "-"));
    let register = |definition: &'static str| {
        registry
            .register_schema(&subject)
            .with_type(SchemaType::JsonSchema)
            .with_schema_data(definition)
            .execute()
    };
    register(FIRST).await?;
    let json = SchemaType::JsonSchema;
    let fine = registry
        .check_compatibility(&subject, SECOND.into(), json, None)
        .await?;
    ensure(
        fine.is_compatible,
        format!("an optional property is refused: {:?}", fine.errors),
    )?;
    let worse = registry
        .check_compatibility(&subject, WORSE.into(), json, None)
        .await?;
    ensure(
        !worse.is_compatible && !worse.errors.is_empty(),
        "a changed type is taken",
    )?;
    ensure(
        register(WORSE).await.is_err(),
        "an incompatible version was registered",
    )?;
    registry
        .set_compatibility_mode(&subject, CompatibilityMode::None)
        .await?;
    register(WORSE).await?;
    let avro = format!("{subject}-avro");
    registry
        .register_schema(&avro)
        .with_type(SchemaType::Avro)
        .with_schema_data(AVRO)
        .execute()
        .await?;
    let unusable = registry
        .register_schema(format!("{subject}-broken"))
        .with_type(SchemaType::Avro)
        .with_schema_data("{")
        .execute()
        .await;
    ensure(
        unusable.is_err(),
        "a definition that does not parse was registered",
    )
}

pub async fn schema_absent(url: &str, topic: &str) -> Outcome {
    let client = connect(url).await?;
    let absent = client
        .schema()
        .get_latest_schema("there-is-no-such-subject")
        .await;
    ensure(absent.is_err(), "a subject that does not exist was found")?;
    let mut producer = client
        .new_producer()
        .with_topic(topic)
        .with_name("p")
        .with_schema_subject("there-is-no-such-subject")
        .build()?;
    ensure(
        producer.create().await.is_err(),
        "a producer of an absent subject was created",
    )
}
