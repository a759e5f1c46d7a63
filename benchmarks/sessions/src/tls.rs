//! TLS 1.3 over TCP: rustls on blocking sockets, records of 16 KiB.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;

use anyhow::{Result, bail};
use rustls::{ClientConfig, ClientConnection, ServerConfig, ServerConnection, StreamOwned};

use crate::{AnyCertificate, BLOCK_BYTES, Meter, certificate, provider};

/// Accepts one connection, reads `bytes` from it and answers with one byte.
pub fn receive(address: SocketAddr, bytes: u64) -> Result<()> {
    let (chain, key) = certificate()?;
    let config = ServerConfig::builder_with_provider(Arc::new(provider()))
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(vec![chain], key.into())?;
    let listener = TcpListener::bind(address)?;
    println!("{}", listener.local_addr()?);
    let (socket, _) = listener.accept()?;
    let mut stream = StreamOwned::new(ServerConnection::new(Arc::new(config))?, socket);
    let mut block = vec![0; BLOCK_BYTES];
    let mut received = stream.read(&mut block)? as u64;
    let meter = Meter::start();
    while received < bytes {
        match stream.read(&mut block)? {
            0 => bail!("the stream ended after {received} bytes"),
            count => received += count as u64,
        }
    }
    meter.finish(received);
    stream.write_all(&[1])?;
    stream.flush()?;
    Ok(())
}

/// Connects, writes `bytes` and waits for the answer. The kernel paces to `pace` bytes per second of
/// payload, unless it is 0.
pub fn send(address: SocketAddr, bytes: u64, pace: u64) -> Result<()> {
    let config = ClientConfig::builder_with_provider(Arc::new(provider()))
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyCertificate))
        .with_no_client_auth();
    let connection = ClientConnection::new(Arc::new(config), "peer".try_into()?)?;
    let socket = TcpStream::connect(address)?;
    if pace > 0 {
        limit(&socket, pace)?;
    }
    let mut stream = StreamOwned::new(connection, socket);
    // Complete the handshake first, so that it isn't measured.
    stream.flush()?;
    let block = vec![0x5a; BLOCK_BYTES];
    let meter = Meter::start();
    let mut left = bytes;
    while left > 0 {
        let count = left.min(BLOCK_BYTES as u64) as usize;
        stream.write_all(&block[..count])?;
        left -= count as u64;
    }
    stream.flush()?;
    stream.read_exact(&mut [0])?;
    meter.finish(bytes);
    Ok(())
}

/// Sets the kernel's pacing rate (SO_MAX_PACING_RATE, socket(7)).
fn limit(socket: &TcpStream, bytes_per_second: u64) -> Result<()> {
    // SAFETY: the kernel reads the eight bytes of `bytes_per_second` and keeps no reference.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_MAX_PACING_RATE,
            (&raw const bytes_per_second).cast(),
            size_of::<u64>() as libc::socklen_t,
        )
    };
    if result != 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    Ok(())
}
