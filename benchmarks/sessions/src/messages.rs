//! Messages over QUIC, one after the other: `messages receive ADDRESS`, `messages send ADDRESS`.
//!
//! Jobs and answers are those of `lab/jobs.py`. A message is a stream; the receiver answers with a
//! byte when it has all of it. Cold messages have a connection of their own.

use std::io::BufRead;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use quinn::{Connection, Endpoint};

use crate::quic::{client, run, server};

/// Messages that open a connection and are not counted.
const WARM_UP: u32 = 10;

/// Answers until the process is ended.
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

async fn exchange(connection: &Connection, message: &[u8]) -> Result<()> {
    let (mut stream, mut answer) = connection.open_bi().await?;
    stream.write_all(message).await?;
    stream.finish()?;
    answer.read_to_end(1).await?;
    Ok(())
}

async fn job(endpoint: &Endpoint, address: SocketAddr, line: &str) -> Result<Vec<f64>> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [bytes, count, seconds, temperature] = words[..] else { anyhow::bail!("a job: {line}") };
    let message = vec![0; bytes.parse()?];
    let count: usize = count.parse()?;
    let end = Instant::now() + Duration::try_from_secs_f64(seconds.parse()?)?;
    let mut times = Vec::with_capacity(count);
    let connection = endpoint.connect(address, "peer")?.await?;
    for _ in 0..WARM_UP {
        exchange(&connection, &message).await?;
    }
    while times.len() < count && Instant::now() < end {
        let started = Instant::now();
        if temperature == "cold" {
            let connection = endpoint.connect(address, "peer")?.await?;
            exchange(&connection, &message).await?;
            times.push(started.elapsed().as_secs_f64());
            connection.close(0_u32.into(), b"done");
        } else {
            exchange(&connection, &message).await?;
            times.push(started.elapsed().as_secs_f64());
        }
    }
    connection.close(0_u32.into(), b"done");
    Ok(times)
}

/// Does what the input says.
pub fn send(address: SocketAddr, mtu: u16) -> Result<()> {
    run(async move {
        let endpoint = client(address, mtu)?;
        for line in std::io::stdin().lock().lines() {
            let times = job(&endpoint, address, &line.context("a job")?).await?;
            println!("{times:?}");
        }
        Ok(())
    })
}
