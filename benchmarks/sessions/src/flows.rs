//! Messages over QUIC at given times: `flows send ADDRESS CONNECTIONS`, to `messages receive`.
//!
//! Input and answers are those of `uno/lab/flow_peer.py`.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use quinn::Connection;
use rustix::time::{ClockId, clock_gettime};

use crate::messages::exchange;
use crate::quic::{client, run};

struct Plan {
    begin: f64,
    limit: Duration,
    /// Seconds after `begin` from which no message starts.
    last: f64,
    /// Seconds after `begin`, and bytes.
    messages: Vec<(f64, usize)>,
    /// As long as the longest message.
    bytes: Vec<u8>,
    next: AtomicUsize,
    /// Number, start and end of each message that was acknowledged.
    spans: Mutex<Vec<[f64; 3]>>,
}

/// Seconds on the clock that all processes of this machine share.
fn monotonic() -> f64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn parse(line: &str) -> Result<Plan> {
    let mut words = line.split_whitespace();
    let mut number = || -> Result<f64> { Ok(words.next().context("BEGIN SECONDS")?.parse()?) };
    let begin = number()?;
    let seconds = number()?;
    let message = |word: &str| -> Result<(f64, usize)> {
        let (at, bytes) = word.split_once(':').context("AT:BYTES")?;
        Ok((at.parse()?, bytes.parse()?))
    };
    let messages = words.map(message).collect::<Result<Vec<_>>>()?;
    let longest = messages.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0);
    Ok(Plan {
        begin,
        limit: Duration::try_from_secs_f64(seconds)?,
        last: messages.last().map_or(0.0, |(at, _)| *at) + seconds,
        messages,
        bytes: vec![0; longest],
        next: AtomicUsize::new(0),
        spans: Mutex::default(),
    })
}

/// Sends messages until none is left, or until one is given up.
async fn work(connection: Connection, plan: Arc<Plan>) {
    loop {
        let number = plan.next.fetch_add(1, Ordering::Relaxed);
        let Some(&(at, bytes)) = plan.messages.get(number) else { return };
        let wait = Duration::try_from_secs_f64(plan.begin + at - monotonic()).unwrap_or_default();
        tokio::time::sleep(wait).await;
        let started = monotonic() - plan.begin;
        if started > plan.last {
            return;
        }
        let sending = exchange(&connection, &plan.bytes[..bytes]);
        let Ok(Ok(())) = tokio::time::timeout(plan.limit, sending).await else { return };
        let span = [number as f64, started, monotonic() - plan.begin];
        plan.spans.lock().unwrap_or_else(PoisonError::into_inner).push(span);
    }
}

async fn send_all(connections: &[Connection], line: &str) -> Result<String> {
    let plan = Arc::new(parse(line)?);
    let workers: Vec<_> = connections
        .iter()
        .map(|connection| tokio::spawn(work(connection.clone(), plan.clone())))
        .collect();
    for worker in workers {
        worker.await?;
    }
    let spans = plan.spans.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(format!(r#"{{"spans": {spans:?}}}"#))
}

/// Connects, and sends what standard input says.
pub fn send(address: SocketAddr, count: usize, mtu: u16) -> Result<()> {
    run(async move {
        let mut connections = Vec::with_capacity(count);
        for _ in 0..count {
            // Each has a port of its own, and so a path of its own.
            let endpoint = client(address, mtu, false)?;
            connections.push(endpoint.connect(address, "peer")?.await?);
        }
        println!("ready");
        loop {
            let mut line = String::new();
            // Meanwhile the connections go on.
            let read = tokio::task::spawn_blocking(move || {
                std::io::stdin().read_line(&mut line).map(|count| (count > 0).then_some(line))
            });
            let Some(line) = read.await?? else { return Ok(()) };
            println!("{}", send_all(&connections, &line).await?);
        }
    })
}
