//! Tokens and certificates over TLS: each allows its holder's part and no more, and a false one is refused.

use std::env;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

use danube_client::{DanubeClient, DanubeClientBuilder, SubType};

use crate::steps::{ensure, numbered, read, reliable, send, Outcome, Reader, Step};

/// Names the file of the authorities to trust; where it is set, these scenarios run in place of the others.
pub const CERTIFICATES: &str = "SCENARIO_CERTIFICATES";
const PRODUCER: &str = "SCENARIO_PRODUCER";
const CONSUMER: &str = "SCENARIO_CONSUMER";
const HOLDERS: &str = "SCENARIO_HOLDERS";
const DENIED: i32 = 7;
const UNAUTHENTICATED: i32 = 16;

async fn connect(url: &str, token: &str) -> Step<DanubeClient> {
    let trusting = DanubeClient::builder()
        .service_url(url)
        .with_tls(env::var(CERTIFICATES)?)?;
    Ok(trusting.with_token(token).build().await?)
}

/// A client that shows the certificate of a service account.
fn certified(url: &str, holder: &str) -> Step<DanubeClientBuilder> {
    let place = format!("{}/{holder}", env::var(HOLDERS)?);
    let (certificate, key) = (format!("{place}.pem"), format!("{place}.key"));
    let builder = DanubeClient::builder().service_url(url);
    Ok(builder.with_mtls(env::var(CERTIFICATES)?, certificate, key)?)
}

/// A producer's token publishes, a consumer's receives and acknowledges; each is refused the other's.
pub async fn token_roles(url: &str, topic: &str) -> Outcome {
    let writes = connect(url, &env::var(PRODUCER)?).await?;
    let reads = connect(url, &env::var(CONSUMER)?).await?;
    each_its_part(&writes, &reads, topic).await
}

/// A certificate does what its holder's token does; beside a token of another it is refused.
pub async fn token_certificates(url: &str, topic: &str) -> Outcome {
    let writes = certified(url, "story-writes")?.build().await?;
    let reads = certified(url, "story-reads")?.build().await?;
    each_its_part(&writes, &reads, topic).await?;
    let both = certified(url, "story-writes")?.with_token(env::var(CONSUMER)?);
    no_producer(&both.build().await?, topic, UNAUTHENTICATED).await?;
    let own = certified(url, "story-writes")?.with_token(env::var(PRODUCER)?);
    let producer = reliable(&own.build().await?, topic, "own").await?;
    send(&producer, 0..1).await
}

async fn each_its_part(writes: &DanubeClient, reads: &DanubeClient, topic: &str) -> Outcome {
    let producer = reliable(writes, topic, "p").await?;
    let mut reader = read(reads, topic, "c", "s", SubType::Exclusive, &[]).await?;
    send(&producer, 0..20).await?;
    let found = reader.take(20).await?;
    ensure(found == numbered(0..20), format!("out of order: {found:?}"))?;
    ensure(reader.drain().await?.is_empty(), "a message came twice")?;
    reader.close().await;
    no_producer(reads, topic, DENIED).await?;
    no_consumer(writes, topic, DENIED).await?;
    no_producer(writes, &format!("{topic}-x"), DENIED).await
}

/// A token that was changed, and none that is a token, are refused.
pub async fn token_refused(url: &str, topic: &str) -> Outcome {
    let good = env::var(PRODUCER)?;
    let (kept, last) = good.split_at(good.len() - 10);
    let other = if last.starts_with('A') { 'B' } else { 'A' };
    for token in [format!("{kept}{other}{}", &last[1..]), "no-token".into()] {
        let client = connect(url, &token).await?;
        no_producer(&client, topic, UNAUTHENTICATED).await?;
        no_consumer(&client, topic, UNAUTHENTICATED).await?;
    }
    Ok(())
}

/// A token that is asked for with each call is taken as one that is given once.
pub async fn token_supplied(url: &str, topic: &str) -> Outcome {
    let (token, asked) = (env::var(PRODUCER)?, Arc::new(AtomicUsize::new(0)));
    let count = asked.clone();
    let trusting = DanubeClient::builder()
        .service_url(url)
        .with_tls(env::var(CERTIFICATES)?)?;
    let supplied = trusting.with_token_supplier(move || {
        count.fetch_add(1, Ordering::SeqCst);
        token.clone()
    });
    let producer = reliable(&supplied.build().await?, topic, "p").await?;
    send(&producer, 0..10).await?;
    ensure(asked.load(Ordering::SeqCst) > 10, "it was not asked for each call")
}

async fn no_producer(client: &DanubeClient, topic: &str, code: i32) -> Outcome {
    refused(reliable(client, topic, "refused").await.err(), "a producer", code)
}

async fn no_consumer(client: &DanubeClient, topic: &str, code: i32) -> Outcome {
    let answer: Step<Reader> = read(client, topic, "refused", "r", SubType::Shared, &[]).await;
    refused(answer.err(), "a consumer", code)
}

fn refused(
    error: Option<Box<dyn std::error::Error + Send + Sync>>,
    what: &str,
    code: i32,
) -> Outcome {
    let error = error.ok_or(format!("{what} was let in"))?;
    let status = error
        .downcast_ref::<danube_client::errors::DanubeError>()
        .and_then(|one| one.extract_status());
    let found = status.map_or(-1, |one| one.code() as i32);
    ensure(found == code, format!("{what}: {found} and not {code}: {error}"))
}
