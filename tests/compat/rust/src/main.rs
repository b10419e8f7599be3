//! The official Rust client, unchanged, against a broker: one line a scenario, `ok` or `FAIL` and why.
//!
//! Usage: `danube-compat URL`.  Where a scenario needs the broker restarted it prints `@restart` and
//! waits for a line on standard input.

mod scenarios;
mod schemas;
mod steps;

use std::time::Duration;

const SCENARIO_TIMEOUT: Duration = Duration::from_secs(60);

macro_rules! run {
    ($failed:ident, $url:expr, $($module:ident :: $name:ident),* $(,)?) => {
        $(
            let name = stringify!($name).replace('_', "-");
            let topic = format!("/default/rust-{name}");
            match tokio::time::timeout(SCENARIO_TIMEOUT, $module::$name($url, &topic)).await {
                Ok(Ok(())) => println!("ok {name}"),
                Ok(Err(error)) => {
                    $failed = true;
                    println!("FAIL {name}: {}", format!("{error}").replace('\n', " "));
                }
                Err(_) => {
                    $failed = true;
                    println!("FAIL {name}: not done within {} s", SCENARIO_TIMEOUT.as_secs());
                }
            }
        )*
    };
}

#[tokio::main]
async fn main() {
    let url = std::env::args().nth(1).expect("usage: danube-compat URL");
    let url = url.as_str();
    let mut failed = false;
    run!(
        failed,
        url,
        scenarios::exclusive,
        scenarios::shared,
        scenarios::failover,
        scenarios::key_shared,
        scenarios::key_filter,
        scenarios::partitioned,
        scenarios::non_reliable,
        scenarios::attributes_and_keys,
        scenarios::nack,
        scenarios::resume,
        schemas::schema_subject,
        schemas::schema_versions,
        schemas::schema_compatibility,
        schemas::schema_absent,
        scenarios::restart,
    );
    std::process::exit(i32::from(failed));
}
