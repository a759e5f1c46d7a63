//! Bulk transfer over TLS 1.3 on TCP and over QUIC, to compare sealed sessions with: one direction, one
//! stream. `sealane-benchmark-sessions (tls|quic) (receive|send) ADDRESS BYTES [MTU [PACE]]`; with `messages`
//! as the protocol, it sends messages over QUIC one after the other, and BYTES is 0; with `flows`, at
//! given times, and BYTES is the number of connections. PACE is in bytes per second, for TLS only.
//!
//! `sealane-benchmark-sessions session NAME=VALUE,...` moves messages between two ends of a session
//! in one process ([`session::Shape`]).
//!
//! The receiver listens and prints its address. At the end, each end prints a line of JSON: bytes, seconds
//! and processor seconds of its process since the first payload byte.

mod flows;
mod messages;
mod quic;
mod session;
mod tls;

use std::time::Instant;

use anyhow::{Context, Result, bail};
use rustix::time::{ClockId, clock_gettime};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};

/// Bytes per call.
pub const BLOCK_BYTES: usize = 1 << 20;

fn processor_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Time since the first payload byte.
pub struct Meter {
    started: Instant,
    processor: f64,
}

impl Meter {
    /// Starts counting.
    pub fn start() -> Self {
        Self { started: Instant::now(), processor: processor_seconds() }
    }

    /// Seconds and processor seconds until now.
    pub fn figures(&self) -> (f64, f64) {
        (self.started.elapsed().as_secs_f64(), processor_seconds() - self.processor)
    }

    /// Prints the figures.
    pub fn finish(&self, bytes: u64) {
        let (seconds, processor) = self.figures();
        println!(r#"{{"bytes": {bytes}, "seconds": {seconds}, "processor_seconds": {processor}}}"#);
    }
}

/// Returns a certificate. Nobody verifies it: the handshake isn't measured.
pub fn certificate() -> Result<(CertificateDer<'static>, PrivatePkcs8KeyDer<'static>)> {
    let made = rcgen::generate_simple_self_signed(vec!["peer".into()])?;
    Ok((made.cert.der().clone(), PrivatePkcs8KeyDer::from(made.signing_key.serialize_der())))
}

/// Returns a provider with AES-256-GCM only, as sessions use.
pub fn provider() -> rustls::crypto::CryptoProvider {
    use rustls::crypto::aws_lc_rs::{cipher_suite, default_provider};
    rustls::crypto::CryptoProvider {
        cipher_suites: vec![
            cipher_suite::TLS13_AES_256_GCM_SHA384,
            // QUIC protects its Initial packets with it (RFC 9001 §5.2).
            cipher_suite::TLS13_AES_128_GCM_SHA256,
        ],
        ..default_provider()
    }
}

/// Accepts every certificate.
#[derive(Debug)]
pub struct AnyCertificate;

impl rustls::client::danger::ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &rustls::pki_types::ServerName<'_>,
        _: &[u8],
        _: rustls::pki_types::UnixTime,
    ) -> Result<rustls::client::danger::ServerCertVerified, rustls::Error> {
        Ok(rustls::client::danger::ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
        provider().signature_verification_algorithms.supported_schemes()
    }
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [protocol, shape] = arguments.as_slice()
        && protocol == "session"
    {
        return session::run(shape);
    }
    let [protocol, role, address, bytes, rest @ ..] = arguments.as_slice() else {
        bail!("(tls|quic|messages|messages-bbr|flows) (receive|send) ADDRESS BYTES [MTU [PACE]]");
    };
    let address = address.parse().context("ADDRESS")?;
    let bytes = bytes.parse().context("BYTES")?;
    let mtu = rest.first().map_or(Ok(1500), |mtu| mtu.parse()).context("MTU")?;
    let pace = rest.get(1).map_or(Ok(0), |pace| pace.parse()).context("PACE")?;
    match (protocol.as_str(), role.as_str()) {
        ("tls", "receive") => tls::receive(address, bytes),
        ("tls", "send") => tls::send(address, bytes, pace),
        ("quic", "receive") => quic::receive(address, bytes, mtu),
        ("quic", "send") => quic::send(address, bytes, mtu),
        // Each job has its own message length.
        ("messages", "receive") => messages::receive(address, mtu),
        ("messages", "send") => messages::send(address, mtu, false),
        ("messages-bbr", "send") => messages::send(address, mtu, true),
        ("flows", "send") => flows::send(address, usize::try_from(bytes)?, mtu),
        _ => bail!("unknown: {protocol} {role}"),
    }
}
