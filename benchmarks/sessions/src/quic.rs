//! QUIC: quinn on one thread, one stream in one direction.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use quinn::congestion::BbrConfig;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{ClientConfig, Endpoint, MtuDiscoveryConfig, ServerConfig, TransportConfig, VarInt};

use crate::{AnyCertificate, BLOCK_BYTES, Meter, certificate, provider};

/// Large enough that flow control doesn't limit the transfer.
const WINDOW_BYTES: u32 = 64 << 20;
/// Bytes of the IPv4 and UDP headers.
const HEADER_BYTES: u16 = 28;

fn transport(mtu: u16, with_bbr: bool) -> Arc<TransportConfig> {
    let mut config = TransportConfig::default();
    if with_bbr {
        config.congestion_controller_factory(Arc::new(BbrConfig::default()));
    }
    let mut discovery = MtuDiscoveryConfig::default();
    discovery.upper_bound(mtu - HEADER_BYTES);
    config
        .receive_window(VarInt::from_u32(WINDOW_BYTES))
        .stream_receive_window(VarInt::from_u32(WINDOW_BYTES))
        .send_window(u64::from(WINDOW_BYTES))
        .initial_mtu(mtu - HEADER_BYTES)
        .mtu_discovery_config(Some(discovery));
    Arc::new(config)
}

/// Runs a future on this thread.
pub fn run(future: impl Future<Output = Result<()>>) -> Result<()> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(future)
}

/// Listens at an address.
pub fn server(address: SocketAddr, mtu: u16) -> Result<Endpoint> {
    let (chain, key) = certificate()?;
    let tls = rustls::ServerConfig::builder_with_provider(Arc::new(provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_no_client_auth()
        .with_single_cert(vec![chain], key.into())?;
    let mut config = ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(tls)?));
    config.transport_config(transport(mtu, false));
    Ok(Endpoint::server(config, address)?)
}

/// Returns an endpoint that connects to addresses of this one's family, with BBR or with CUBIC.
pub fn client(address: SocketAddr, mtu: u16, with_bbr: bool) -> Result<Endpoint> {
    let tls = rustls::ClientConfig::builder_with_provider(Arc::new(provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyCertificate))
        .with_no_client_auth();
    let mut config = ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls)?));
    config.transport_config(transport(mtu, with_bbr));
    let mut endpoint = Endpoint::client((address.ip_any(), 0).into())?;
    endpoint.set_default_client_config(config);
    Ok(endpoint)
}

/// Accepts one connection and reads `bytes` from its stream.
pub fn receive(address: SocketAddr, bytes: u64, mtu: u16) -> Result<()> {
    run(async move {
        let endpoint = server(address, mtu)?;
        println!("{}", endpoint.local_addr()?);
        let connection = endpoint.accept().await.context("no connection")?.await?;
        let mut stream = connection.accept_uni().await?;
        let mut received = 0;
        let mut meter = None;
        while received < bytes {
            let Some(chunk) = stream.read_chunk(BLOCK_BYTES, false).await? else {
                bail!("the stream ended after {received} bytes");
            };
            meter.get_or_insert_with(Meter::start);
            received += chunk.bytes.len() as u64;
        }
        if let Some(meter) = meter {
            meter.finish(received);
        }
        connection.close(0_u32.into(), b"done");
        endpoint.wait_idle().await;
        Ok(())
    })
}

/// Connects, writes `bytes` and waits until the peer has closed.
pub fn send(address: SocketAddr, bytes: u64, mtu: u16) -> Result<()> {
    run(async move {
        let endpoint = client(address, mtu, false)?;
        let connection = endpoint.connect(address, "peer")?.await?;
        let mut stream = connection.open_uni().await?;
        let block = vec![0x5a; BLOCK_BYTES];
        let meter = Meter::start();
        let mut left = bytes;
        while left > 0 {
            let count = left.min(BLOCK_BYTES as u64) as usize;
            stream.write_all(&block[..count]).await?;
            left -= count as u64;
        }
        stream.finish()?;
        connection.closed().await;
        meter.finish(bytes);
        Ok(())
    })
}

trait AnyOf {
    fn ip_any(&self) -> std::net::IpAddr;
}

impl AnyOf for SocketAddr {
    /// Returns the unspecified address of the same family.
    fn ip_any(&self) -> std::net::IpAddr {
        match self {
            Self::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
            Self::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
        }
    }
}
