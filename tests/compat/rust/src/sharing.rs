//! Work that the consumers of one subscription share: each takes a task, does it, acknowledges it, takes the next.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::Duration;

use danube_client::SubType;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::steps::{
    connect, ensure, numbered, read, reliable, send, text, Outcome, Reader, Step, QUIET,
};

const TASK: Duration = Duration::from_millis(50);

/// Two workers, the second 2 s late: it gets its share of what is left, and no task is done twice.
pub async fn shared_work(url: &str, topic: &str) -> Outcome {
    let shares = work(url, topic, 200, &[Duration::ZERO, Duration::from_secs(2)]).await?;
    ensure(
        shares.iter().all(|share| (70..=130).contains(share)),
        format!("200 tasks were shared {shares:?}, and 65:35 is the most"),
    )
}

/// Three workers from the start and 900 tasks: more than a client would hold, and none is done twice.
pub async fn shared_work_of_many(url: &str, topic: &str) -> Outcome {
    let shares = work(url, topic, 900, &[Duration::ZERO; 3]).await?;
    ensure(
        shares.iter().all(|share| *share > 0),
        format!("900 tasks were shared {shares:?}"),
    )
}

/// Have tasks done by a worker for each delay; how many each did, when every task was done exactly once.
async fn work(url: &str, topic: &str, count: usize, delays: &[Duration]) -> Step<Vec<usize>> {
    let client = connect(url).await?;
    let producer = reliable(&client, topic, "p").await?;
    // The subscription is there before the tasks are.
    let early = read(&client, topic, "early", "s", SubType::Shared, &[]).await?;
    early.close().await;
    send(&producer, 0..count).await?;
    let finished = Arc::new(AtomicUsize::new(0));
    let mut workers = JoinSet::new();
    for (number, delay) in delays.iter().copied().enumerate() {
        let (url, topic, finished) = (url.to_string(), topic.to_string(), finished.clone());
        workers.spawn(async move {
            sleep(delay).await;
            let client = connect(&url).await?;
            let name = format!("worker-{number}");
            let reader = read(&client, &topic, &name, "s", SubType::Shared, &[]).await?;
            worker(reader, &finished, count).await
        });
    }
    let mut shares = Vec::new();
    let mut done = Vec::new();
    while let Some(one) = workers.join_next().await {
        let one = one??;
        shares.push(one.len());
        done.extend(one);
    }
    println!("# {topic}: {count} tasks of {TASK:?}, shared {shares:?}");
    let times = done.len();
    done.sort();
    done.dedup();
    let mut wanted = numbered(0..count);
    wanted.sort();
    ensure(
        done == wanted && times == count,
        format!("of {count} tasks {} were done, {times} times", done.len()),
    )?;
    Ok(shares)
}

/// Do tasks until all of them are done, then count what still comes.
async fn worker(mut reader: Reader, finished: &AtomicUsize, count: usize) -> Step<Vec<String>> {
    let mut done = Vec::new();
    while finished.load(Ordering::SeqCst) < count {
        let Ok(message) = timeout(QUIET, reader.messages.recv()).await else {
            continue;
        };
        let message = message.ok_or("the stream of messages ended")?;
        sleep(TASK).await;
        reader.consumer.ack(&message).await?;
        done.push(text(&message));
        finished.fetch_add(1, Ordering::SeqCst);
    }
    done.extend(reader.drain().await?.iter().map(text));
    reader.close().await;
    Ok(done)
}
