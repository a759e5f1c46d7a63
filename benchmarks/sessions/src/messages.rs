//! Messages over QUIC, one after the other: `messages receive ADDRESS`, `messages send ADDRESS`.
//!
//! Jobs and answers are those of `lab/jobs.py`. A message is a stream, which the receiver acknowledges with
//! one byte. Each cold message has its own connection.

use std::io::BufRead;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use quinn::{Connection, Endpoint};

use crate::quic::{client, run, server};

/// Time limit of a message; after that it is given up and the job ends.
const TIME_MAX: Duration = Duration::from_secs(20);

/// Acknowledges messages until the process is killed.
pub fn receive(address: SocketAddr, mtu: u16) -> Result<()> {
    run(async move {
        let endpoint = server(address, mtu)?;
        println!("{}", endpoint.local_addr()?);
        while let Some(incoming) = endpoint.accept().await {
            tokio::spawn(async move {
                let connection = incoming.await?;
                while let Ok((mut answer, mut message)) = connection.accept_bi().await {
                    while message.read_chunk(usize::MAX, false).await?.is_some() {}
                    answer.write_all(&[1]).await?;
                    answer.finish()?;
                }
                anyhow::Ok(())
            });
        }
        Ok(())
    })
}

/// Sends a message and waits until it is acknowledged.
pub async fn exchange(connection: &Connection, message: &[u8]) -> Result<()> {
    let (mut stream, mut answer) = connection.open_bi().await?;
    stream.write_all(message).await?;
    stream.finish()?;
    answer.read_to_end(1).await?;
    Ok(())
}

/// Returns the completion time of a message, on its own connection or on an existing one.
async fn timed(
    endpoint: &Endpoint,
    address: SocketAddr,
    standing: Option<&Connection>,
    message: &[u8],
) -> Result<f64> {
    let started = Instant::now();
    if let Some(connection) = standing {
        exchange(connection, message).await?;
        return Ok(started.elapsed().as_secs_f64());
    }
    let connection = endpoint.connect(address, "peer")?.await?;
    exchange(&connection, message).await?;
    let elapsed = started.elapsed().as_secs_f64();
    connection.close(0_u32.into(), b"done");
    Ok(elapsed)
}

/// Returns completion times and the number of messages given up.
async fn job(endpoint: &Endpoint, address: SocketAddr, line: &str) -> Result<(Vec<f64>, u32)> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [bytes, count, seconds, temperature, warm_up] = words[..] else {
        anyhow::bail!("a job: {line}")
    };
    let message = vec![0; bytes.parse()?];
    let count: usize = count.parse()?;
    let mut times = Vec::with_capacity(count);
    let is_cold = temperature == "cold";
    let Ok(standing) = endpoint.connect(address, "peer")?.await else { return Ok((times, 1)) };
    let one = async || {
        let connection = (!is_cold).then_some(&standing);
        tokio::time::timeout(TIME_MAX, timed(endpoint, address, connection, &message)).await
    };
    for _ in 0..warm_up.parse()? {
        let Ok(Ok(_)) = one().await else { return Ok((times, 1)) };
    }
    let end = Instant::now() + Duration::try_from_secs_f64(seconds.parse()?)?;
    while times.len() < count && Instant::now() < end {
        let Ok(Ok(seconds)) = one().await else { return Ok((times, 1)) };
        times.push(seconds);
    }
    standing.close(0_u32.into(), b"done");
    Ok((times, 0))
}

/// Runs the jobs on standard input, with BBR or with CUBIC.
pub fn send(address: SocketAddr, mtu: u16, with_bbr: bool) -> Result<()> {
    run(async move {
        let endpoint = client(address, mtu, with_bbr)?;
        for line in std::io::stdin().lock().lines() {
            let (times, unfinished) = job(&endpoint, address, &line.context("a job")?).await?;
            println!(r#"{{"times": {times:?}, "unfinished": {unfinished}}}"#);
        }
        Ok(())
    })
}
