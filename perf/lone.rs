//! The row that users feel: the official Rust client, unchanged, one message after another, nothing pipelined.
//!
//! `danube-lone URL TOPIC reliable|non-reliable SIZE COUNT WARM` publishes a message, waits for its
//! acknowledgement, receives it and acknowledges it, WARM + COUNT times.  Prints one line of JSON about the last
//! COUNT: messages/s, and microseconds of a whole round and of its publish.  Built with tests/compat/rust.

use std::error::Error;
use std::time::{Duration, Instant};

use danube_client::{DanubeClient, SubType};

const RECEIVE_TIMEOUT: Duration = Duration::from_secs(15);

fn percentile(times: &[u128], percent: usize) -> f64 {
    times[(times.len() * percent / 100).min(times.len() - 1)] as f64 / 1000.0
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let words: Vec<String> = std::env::args().collect();
    let [_, url, topic, level, size, count, warm] = &words[..] else {
        return Err("usage: danube-lone URL TOPIC reliable|non-reliable SIZE COUNT WARM".into());
    };
    let (count, warm): (usize, usize) = (count.parse()?, warm.parse()?);
    let payload = vec![b'x'; size.parse()?];
    let client = DanubeClient::builder().service_url(url).build().await?;
    let builder = client.new_producer().with_topic(topic).with_name("lone");
    let builder = if level == "reliable" { builder.with_reliable_dispatch() } else { builder };
    let mut producer = builder.build()?;
    producer.create().await?;
    let mut consumer = client
        .new_consumer()
        .with_topic(topic)
        .with_consumer_name("lone")
        .with_subscription("lone")
        .with_subscription_type(SubType::Exclusive)
        .build()?;
    consumer.subscribe().await?;
    let mut messages = consumer.receive().await?;

    let (mut rounds, mut publishes) = (Vec::new(), Vec::new());
    let mut started = Instant::now();
    for number in 0..warm + count {
        if number == warm {
            started = Instant::now();
        }
        let began = Instant::now();
        producer.send(payload.clone(), None).await?;
        let published = began.elapsed();
        let message = tokio::time::timeout(RECEIVE_TIMEOUT, messages.recv()).await?;
        consumer.ack(&message.ok_or("the stream of messages ended")?).await?;
        if number >= warm {
            rounds.push(began.elapsed().as_nanos());
            publishes.push(published.as_nanos());
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    rounds.sort_unstable();
    publishes.sort_unstable();
    println!(
        "{{\"records\": {count}, \"seconds\": {seconds:.6}, \"rate\": {:.1}, \"p50_us\": {:.1}, \"p99_us\": {:.1}, \
         \"publish_p50_us\": {:.1}, \"publish_p99_us\": {:.1}}}",
        count as f64 / seconds,
        percentile(&rounds, 50),
        percentile(&rounds, 99),
        percentile(&publishes, 50),
        percentile(&publishes, 99),
    );
    consumer.close().await;
    Ok(())
}
