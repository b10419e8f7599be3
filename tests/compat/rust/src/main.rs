//! The official Rust client, unchanged, against a broker: one line a scenario, `ok` or `FAIL` and why.
//!
//! Usage: `danube-compat URL [SCENARIO...]`.  A scenario that needs the broker restarted prints `@restart`, or
//! `@kill` for SIGKILL to all of it, and waits for a line on standard input.  With DANUBE_COMPAT_TRACE the client's warnings go to standard error.
//! With SCENARIO_CERTIFICATES and credentials in the environment the scenarios of tokens run, and no others.

mod scenarios;
mod schemas;
mod sharing;
mod steps;
mod tokens;

use std::time::Duration;

const SCENARIO_TIMEOUT: Duration = Duration::from_secs(60);

macro_rules! run {
    ($failed:ident, $wanted:expr, $url:expr, $($module:ident :: $name:ident),* $(,)?) => {
        $(
            let name = stringify!($name).replace('_', "-");
            let topic = format!("/default/rust-{name}");
            let chosen = $wanted.is_empty() || $wanted.contains(&name);
            if chosen { match tokio::time::timeout(SCENARIO_TIMEOUT, $module::$name($url, &topic)).await {
                Ok(Ok(())) => println!("ok {name}"),
                Ok(Err(error)) => {
                    $failed = true;
                    println!("FAIL {name}: {}", format!("{error}").replace('\n', " "));
                }
                Err(_) => {
                    $failed = true;
                    println!("FAIL {name}: not done within {} s", SCENARIO_TIMEOUT.as_secs());
                }
            } }
        )*
    };
}

#[tokio::main]
async fn main() {
    if std::env::var_os("DANUBE_COMPAT_TRACE").is_some() {
        tracing_subscriber::fmt()
            .with_max_level(tracing::Level::WARN)
            .with_writer(std::io::stderr)
            .init();
    }
    let mut words = std::env::args().skip(1);
    let url = words
        .next()
        .expect("usage: danube-compat URL [SCENARIO...]");
    let wanted: Vec<String> = words.collect();
    let url = url.as_str();
    let mut failed = false;
    if std::env::var_os(tokens::CERTIFICATES).is_some() {
        run!(
            failed,
            wanted,
            url,
            tokens::token_roles,
            tokens::token_certificates,
            tokens::token_refused,
            tokens::token_supplied,
        );
        std::process::exit(i32::from(failed));
    }
    run!(
        failed,
        wanted,
        url,
        scenarios::exclusive,
        scenarios::shared,
        sharing::shared_work,
        sharing::shared_work_of_many,
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
        scenarios::kill,
    );
    std::process::exit(i32::from(failed));
}
