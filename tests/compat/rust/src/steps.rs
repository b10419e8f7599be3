//! What scenarios are made of.

use std::collections::BTreeSet;
use std::error::Error;
use std::time::Duration;

use danube_client::{Consumer, DanubeClient, Producer, SubType};
use danube_core::message::StreamMessage;
use tokio::sync::mpsc::Receiver;

pub type Outcome = Result<(), Box<dyn Error + Send + Sync>>;
pub type Step<T> = Result<T, Box<dyn Error + Send + Sync>>;

pub const RECEIVE_TIMEOUT: Duration = Duration::from_secs(15);
pub const QUIET: Duration = Duration::from_millis(700);

/// Fails with a sentence unless the condition holds.
pub fn ensure(condition: bool, what: impl Into<String>) -> Outcome {
    if condition {
        Ok(())
    } else {
        Err(what.into().into())
    }
}

pub async fn connect(url: &str) -> Step<DanubeClient> {
    Ok(DanubeClient::builder().service_url(url).build().await?)
}

/// A producer of a reliable topic, created.
pub async fn reliable(client: &DanubeClient, topic: &str, name: &str) -> Step<Producer> {
    let mut producer = client
        .new_producer()
        .with_topic(topic)
        .with_name(name)
        .with_reliable_dispatch()
        .build()?;
    producer.create().await?;
    Ok(producer)
}

/// A consumer with its stream of messages.
pub struct Reader {
    pub consumer: Consumer,
    pub messages: Receiver<StreamMessage>,
}

pub async fn read(
    client: &DanubeClient,
    topic: &str,
    name: &str,
    subscription: &str,
    kind: SubType,
    filters: &[&str],
) -> Step<Reader> {
    let mut consumer = client
        .new_consumer()
        .with_topic(topic)
        .with_consumer_name(name)
        .with_subscription(subscription)
        .with_subscription_type(kind)
        .with_key_filters(filters.iter().map(|one| one.to_string()).collect())
        .build()?;
    consumer.subscribe().await?;
    let messages = consumer.receive().await?;
    Ok(Reader { consumer, messages })
}

impl Reader {
    /// The next message, not acknowledged.
    pub async fn next(&mut self) -> Step<StreamMessage> {
        match tokio::time::timeout(RECEIVE_TIMEOUT, self.messages.recv()).await {
            Ok(Some(message)) => Ok(message),
            Ok(None) => Err("the stream of messages ended".into()),
            Err(_) => Err(format!("no message within {} s", RECEIVE_TIMEOUT.as_secs()).into()),
        }
    }

    /// The payloads of the next messages as text, each acknowledged.
    pub async fn take(&mut self, count: usize) -> Step<Vec<String>> {
        let mut found = Vec::new();
        while found.len() < count {
            let message = self.next().await?;
            self.consumer.ack(&message).await?;
            found.push(text(&message));
        }
        Ok(found)
    }

    /// Everything that comes until nothing has come for a moment, each acknowledged.
    pub async fn drain(&mut self) -> Step<Vec<StreamMessage>> {
        let mut found = Vec::new();
        while let Ok(Some(message)) = tokio::time::timeout(QUIET, self.messages.recv()).await {
            self.consumer.ack(&message).await?;
            found.push(message);
        }
        Ok(found)
    }

    pub async fn close(mut self) {
        self.consumer.close().await;
    }
}

pub fn text(message: &StreamMessage) -> String {
    String::from_utf8_lossy(&message.payload).into_owned()
}

pub fn texts(messages: &[StreamMessage]) -> BTreeSet<String> {
    messages.iter().map(text).collect()
}

pub fn numbered(range: std::ops::Range<usize>) -> Vec<String> {
    range.map(|number| format!("m{number}")).collect()
}

pub async fn send(producer: &Producer, range: std::ops::Range<usize>) -> Outcome {
    for payload in numbered(range) {
        producer.send(payload.into_bytes(), None).await?;
    }
    Ok(())
}
