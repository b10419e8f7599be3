//! Subscriptions, partitions, redelivery and restarts.

use std::collections::{BTreeSet, HashMap};
use std::io::BufRead;
use std::time::Duration;

use danube_client::{DanubeClient, Producer, SubType};

use crate::steps::{
    connect, ensure, numbered, read, reliable, send, text, texts, Outcome, Reader, Step,
};

pub async fn exclusive(url: &str, topic: &str) -> Outcome {
    let client = connect(url).await?;
    let producer = reliable(&client, topic, "p").await?;
    let mut reader = read(&client, topic, "c", "s", SubType::Exclusive, &[]).await?;
    let second = read(&client, topic, "other", "s", SubType::Exclusive, &[]).await;
    ensure(second.is_err(), "a second exclusive consumer was let in")?;
    send(&producer, 0..20).await?;
    let found = reader.take(20).await?;
    ensure(found == numbered(0..20), format!("out of order: {found:?}"))?;
    reader.close().await;
    Ok(())
}

pub async fn shared(url: &str, topic: &str) -> Outcome {
    let client = connect(url).await?;
    let producer = reliable(&client, topic, "p").await?;
    let mut first = read(&client, topic, "c1", "s", SubType::Shared, &[]).await?;
    let mut second = read(&client, topic, "c2", "s", SubType::Shared, &[]).await?;
    send(&producer, 0..40).await?;
    let (mut one, mut two) = (Vec::new(), Vec::new());
    for _ in 0..20 {
        one.extend(first.drain().await?);
        two.extend(second.drain().await?);
        if one.len() + two.len() >= 40 {
            break;
        }
    }
    let (one, two) = (texts(&one), texts(&two));
    let all: BTreeSet<String> = one.union(&two).cloned().collect();
    ensure(
        all.len() == 40,
        format!("{} of 40 messages came", all.len()),
    )?;
    ensure(
        !one.is_empty() && !two.is_empty(),
        "one of two consumers got nothing",
    )?;
    ensure(one.is_disjoint(&two), "both consumers got the same message")?;
    first.close().await;
    second.close().await;
    Ok(())
}

pub async fn failover(url: &str, topic: &str) -> Outcome {
    let client = connect(url).await?;
    let other = connect(url).await?;
    let producer = reliable(&client, topic, "p").await?;
    let mut active = read(&client, topic, "c1", "s", SubType::FailOver, &[]).await?;
    let mut standby = read(&other, topic, "c2", "s", SubType::FailOver, &[]).await?;
    send(&producer, 0..10).await?;
    ensure(
        active.take(10).await? == numbered(0..10),
        "the active consumer lacks messages",
    )?;
    ensure(
        standby.drain().await?.is_empty(),
        "the standby got messages",
    )?;
    active.close().await;
    drop(client);
    let client = connect(url).await?;
    let producer = reliable(&client, topic, "p2").await?;
    send(&producer, 10..20).await?;
    ensure(
        standby.take(10).await? == numbered(10..20),
        "the standby did not take over",
    )?;
    standby.close().await;
    Ok(())
}

pub async fn key_shared(url: &str, topic: &str) -> Outcome {
    let client = connect(url).await?;
    let producer = reliable(&client, topic, "p").await?;
    let mut first = read(&client, topic, "c1", "s", SubType::KeyShared, &[]).await?;
    let mut second = read(&client, topic, "c2", "s", SubType::KeyShared, &[]).await?;
    for number in 0..60 {
        let key = format!("key{}", number % 12);
        producer
            .send_with_key(format!("{number}").into_bytes(), None, &key)
            .await?;
    }
    let mut owners: HashMap<String, usize> = HashMap::new();
    let mut last: HashMap<String, u64> = HashMap::new();
    let mut seen = 0;
    for _ in 0..20 {
        for (owner, reader) in [&mut first, &mut second].into_iter().enumerate() {
            for message in reader.drain().await? {
                let key = message.routing_key.clone().unwrap_or_default();
                ensure(
                    *owners.entry(key.clone()).or_insert(owner) == owner,
                    "a key changed its consumer",
                )?;
                let number: u64 = text(&message).parse()?;
                let before = last.insert(key, number);
                ensure(
                    before.is_none_or(|one| one < number),
                    "a key's messages are out of order",
                )?;
                seen += 1;
            }
        }
        if seen >= 60 {
            break;
        }
    }
    ensure(seen == 60, format!("{seen} of 60 messages came"))?;
    ensure(
        owners.values().collect::<BTreeSet<_>>().len() == 2,
        "one consumer has all keys",
    )?;
    first.close().await;
    second.close().await;
    Ok(())
}

pub async fn key_filter(url: &str, topic: &str) -> Outcome {
    let client = connect(url).await?;
    let producer = reliable(&client, topic, "p").await?;
    let mut eu = read(&client, topic, "c1", "s", SubType::KeyShared, &["eu-*"]).await?;
    let mut us = read(&client, topic, "c2", "s", SubType::KeyShared, &["us-1"]).await?;
    for key in ["eu-1", "us-1", "eu-2", "us-1"] {
        producer
            .send_with_key(key.as_bytes().to_vec(), None, key)
            .await?;
    }
    ensure(
        eu.take(2).await? == ["eu-1", "eu-2"],
        "the filter eu-* did not hold",
    )?;
    ensure(
        us.take(2).await? == ["us-1", "us-1"],
        "the filter us-1 did not hold",
    )?;
    eu.close().await;
    us.close().await;
    Ok(())
}

pub async fn partitioned(url: &str, topic: &str) -> Outcome {
    let client = connect(url).await?;
    let mut producer = client
        .new_producer()
        .with_topic(topic)
        .with_name("p")
        .with_partitions(3)
        .with_reliable_dispatch()
        .build()?;
    producer.create().await?;
    let mut reader = read(&client, topic, "c", "s", SubType::Exclusive, &[]).await?;
    send(&producer, 0..30).await?;
    let mut partitions: HashMap<String, usize> = HashMap::new();
    let mut found = BTreeSet::new();
    for _ in 0..30 {
        let message = reader.next().await?;
        reader.consumer.ack(&message).await?;
        *partitions
            .entry(message.msg_id.topic_name.clone())
            .or_default() += 1;
        found.insert(text(&message));
    }
    ensure(
        found.len() == 30,
        format!("{} of 30 messages came", found.len()),
    )?;
    ensure(
        partitions.len() == 3,
        format!("messages came from {partitions:?}"),
    )?;
    ensure(
        partitions.contains_key(&format!("{topic}-part-0")),
        format!("{partitions:?}"),
    )?;
    reader.close().await;
    Ok(())
}

pub async fn non_reliable(url: &str, topic: &str) -> Outcome {
    let client = connect(url).await?;
    let mut producer = client
        .new_producer()
        .with_topic(topic)
        .with_name("p")
        .build()?;
    producer.create().await?;
    let mut reader = read(&client, topic, "c", "s", SubType::Exclusive, &[]).await?;
    // The stream must be open before a message that is not kept can be seen.
    let mut first = String::new();
    for number in 0..50 {
        producer
            .send(format!("warm{number}").into_bytes(), None)
            .await?;
        if let Ok(Some(message)) =
            tokio::time::timeout(Duration::from_millis(200), reader.messages.recv()).await
        {
            first = text(&message);
            break;
        }
    }
    ensure(
        first.starts_with("warm"),
        "no message of a non-reliable topic came",
    )?;
    reader.drain().await?;
    send(&producer, 0..20).await?;
    ensure(
        reader.take(20).await? == numbered(0..20),
        "messages are missing",
    )?;
    reader.close().await;
    Ok(())
}

pub async fn attributes_and_keys(url: &str, topic: &str) -> Outcome {
    let client = connect(url).await?;
    let producer = reliable(&client, topic, "the-producer").await?;
    let mut reader = read(&client, topic, "c", "s", SubType::Exclusive, &[]).await?;
    let attributes = HashMap::from([
        ("a".to_string(), "1".to_string()),
        ("b".to_string(), "é".to_string()),
    ]);
    producer
        .send_with_key(b"\x00\xff".to_vec(), Some(attributes.clone()), "k")
        .await?;
    producer.send(Vec::new(), None).await?;
    let first = reader.next().await?;
    ensure(first.payload.as_ref() == b"\x00\xff", "the payload changed")?;
    ensure(
        first.attributes == attributes,
        format!("attributes are {:?}", first.attributes),
    )?;
    ensure(
        first.routing_key.as_deref() == Some("k"),
        format!("the key is {:?}", first.routing_key),
    )?;
    ensure(
        first.producer_name == "the-producer",
        format!("the producer is {}", first.producer_name),
    )?;
    ensure(
        first.msg_id.topic_name == topic,
        format!("the topic is {}", first.msg_id.topic_name),
    )?;
    ensure(first.schema_id.is_none(), "a schema id came from nowhere")?;
    reader.consumer.ack(&first).await?;
    let second = reader.next().await?;
    ensure(
        second.payload.is_empty() && second.routing_key.is_none(),
        "the empty message is not empty",
    )?;
    ensure(
        second.msg_id.topic_offset == first.msg_id.topic_offset + 1,
        "offsets have a gap",
    )?;
    reader.close().await;
    Ok(())
}

pub async fn nack(url: &str, topic: &str) -> Outcome {
    let client = connect(url).await?;
    let producer = reliable(&client, topic, "p").await?;
    let mut reader = read(&client, topic, "c", "s", SubType::Exclusive, &[]).await?;
    send(&producer, 0..1).await?;
    let first = reader.next().await?;
    reader
        .consumer
        .nack(&first, Some(0), Some("try again".to_string()))
        .await?;
    let again = reader.next().await?;
    ensure(
        text(&again) == "m0",
        format!("{} came after the nack", text(&again)),
    )?;
    ensure(
        again.msg_id.topic_offset == first.msg_id.topic_offset,
        "it came with another offset",
    )?;
    reader.consumer.ack(&again).await?;
    ensure(
        reader.drain().await?.is_empty(),
        "it came again after its ack",
    )?;
    reader.close().await;
    Ok(())
}

pub async fn resume(url: &str, topic: &str) -> Outcome {
    let client = connect(url).await?;
    let producer = reliable(&client, topic, "p").await?;
    let mut reader = read(&client, topic, "c", "s", SubType::Exclusive, &[]).await?;
    send(&producer, 0..10).await?;
    ensure(
        reader.take(4).await? == numbered(0..4),
        "the first messages are wrong",
    )?;
    reader.close().await;
    let later = connect(url).await?;
    let mut reader = read(&later, topic, "c", "s", SubType::Exclusive, &[]).await?;
    let found = reader.take(6).await?;
    ensure(found == numbered(4..10), format!("went on with {found:?}"))?;
    reader.close().await;
    Ok(())
}

pub async fn restart(url: &str, topic: &str) -> Outcome {
    let client = connect(url).await?;
    let producer = reliable(&client, topic, "p").await?;
    let mut reader = before(&client, &producer, topic).await?;
    ask_for("@restart").await?;
    send(&producer, 15..20).await?;
    after(&mut reader).await?;
    reader.close().await;
    Ok(())
}

/// After SIGKILL this client's consumer ends: its next call meets the dying connection, which it takes
/// for a fault that cannot be mended.  The application subscribes anew and misses nothing.
pub async fn kill(url: &str, topic: &str) -> Outcome {
    let client = connect(url).await?;
    let producer = reliable(&client, topic, "p").await?;
    let reader = before(&client, &producer, topic).await?;
    ask_for("@kill").await?;
    send(&producer, 15..20).await?;
    reader.close().await;
    let mut reader = read(&client, topic, "c", "s", SubType::Exclusive, &[]).await?;
    after(&mut reader).await?;
    reader.close().await;
    Ok(())
}

/// Ten messages acknowledged and five more sent.
async fn before(client: &DanubeClient, producer: &Producer, topic: &str) -> Step<Reader> {
    let mut reader = read(client, topic, "c", "s", SubType::Exclusive, &[]).await?;
    send(producer, 0..10).await?;
    ensure(
        reader.take(10).await? == numbered(0..10),
        "messages are missing before the restart",
    )?;
    send(producer, 10..15).await?;
    Ok(reader)
}

/// All that was sent later comes: what was delivered before and not acknowledged perhaps twice.
async fn after(reader: &mut Reader) -> Outcome {
    let mut found = BTreeSet::new();
    while found.len() < 10 {
        let message = reader.next().await?;
        reader.consumer.ack(&message).await.ok();
        if numbered(10..20).contains(&text(&message)) {
            found.insert(text(&message));
        }
    }
    Ok(())
}

/// Have the runner do something to the broker, and wait until it is done.
async fn ask_for(word: &str) -> Outcome {
    println!("{word}");
    tokio::task::spawn_blocking(|| std::io::stdin().lock().read_line(&mut String::new())).await??;
    Ok(())
}
