//! An accelerator card, for those who have none: emulated, or a device that a driver knows. The
//! emulated one seals, and misbehaves on request. It protects nothing: its keys lie in the memory of
//! an ordinary process.

mod driver;
mod emulated;
mod engine;
mod faults;
mod identity;
mod rings;

use std::fs::OpenOptions;
use std::io::{self, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, recvmsg,
    sendmsg, socket_with,
};
use sealane_engine::accelerator::wire::{
    Answer, MESSAGE_BYTES_MAX, Operation, QUEUE_DESCRIPTORS, VERSION, Welcome,
};
use sealane_proto::aead::{KEY_BYTES, Secret};
use zerocopy::IntoBytes;
use zeroize::Zeroizing;

use crate::driver::Driver;
use crate::emulated::Emulated;
use crate::engine::{Daemon, Engine, Limits, Owners, QueueNumber};
use crate::faults::{Chance, Faults};
use crate::identity::Identity;
use crate::rings::Rings;

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Profile {
    /// 512 jobs a queue, 128 keys.
    Bf3Doca,
    /// 128 jobs a queue, 64 keys.
    Bf3Dpdk,
    /// 4 jobs a queue, one key.
    Tiny,
}

impl Profile {
    fn limits(self) -> Limits {
        let (product, depth, keys) = match self {
            Self::Bf3Doca => ("bf3-doca", 512, 128),
            Self::Bf3Dpdk => ("bf3-dpdk", 128, 64),
            Self::Tiny => ("tiny", 4, 1),
        };
        Limits { product: product.into(), depth, keys, aad_bytes_max: 64 }
    }
}

/// An accelerator card for Sealane: an emulated one, or the device of a driver. The emulated card is
/// for development only: it protects nothing.
#[derive(Debug, Parser)]
#[command(name = "sealane-dpu", version)]
struct Arguments {
    /// Unix socket (SEQPACKET) to listen on; one that is there is replaced.
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    /// Drive a device: a shared object, as docs/operate/accelerators.md describes.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["profile", "faults", "seed"])]
    driver: Option<PathBuf>,
    /// Argument for the driver; may be given several times.
    #[arg(long, value_name = "ARGUMENT", requires = "driver", allow_hyphen_values = true)]
    driver_argument: Vec<String>,
    /// Limits to have.
    #[arg(long, value_enum, default_value = "bf3-dpdk")]
    profile: Profile,
    /// Hold this many keys at most, instead of as many as there is room for.
    #[arg(long, value_name = "NUMBER")]
    keys: Option<u16>,
    /// Do a share of the jobs wrong, such as `lost=0.01`; may be given several times.
    #[arg(long = "fault", value_name = "NAME=PROBABILITY")]
    faults: Vec<Chance>,
    /// Seed of the faults' draws.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// PKCS #8 (DER) of the P-384 key that signs evidence; without it the card gives none.
    #[arg(long, value_name = "FILE", requires = "certificates")]
    key: Option<PathBuf>,
    /// Certificate of that key and those above it, PEM, leaf first.
    #[arg(long, value_name = "FILE", requires = "key")]
    certificates: Option<PathBuf>,
    /// Append the nonce of each seal to this file, 12 bytes each.
    #[arg(long, value_name = "FILE")]
    ledger: Option<PathBuf>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments) {
        Ok(never) => match never {},
        Err(error) => {
            eprintln!("sealane-dpu: {}: {error}", arguments.socket.display());
            ExitCode::FAILURE
        }
    }
}

enum Never {}

/// Connections and queues at a time; more wait.
const PEERS_MAX: usize = 4096;
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

enum Role {
    /// Nothing was asked yet.
    New,
    /// A daemon's requests.
    Device(Daemon),
    /// A queue's doorbell.
    Queue(Daemon, QueueNumber),
}

struct Card {
    engine: Box<dyn Engine>,
    key_places: u16,
    identity: Option<Identity>,
    /// Daemons and queues so far.
    numbers: u64,
    owners: Owners,
    peers: Vec<(OwnedFd, Role)>,
}

fn run(arguments: &Arguments) -> io::Result<Never> {
    let ledger = match &arguments.ledger {
        Some(path) => Some(OpenOptions::new().append(true).create(true).open(path)?),
        None => None,
    };
    let identity = match (&arguments.key, &arguments.certificates) {
        (Some(key), Some(certificates)) => Some(Identity::read(key, certificates)?),
        _ => None,
    };
    let engine: Box<dyn Engine> = if let Some(path) = &arguments.driver {
        Box::new(Driver::start(path, &arguments.driver_argument, ledger)?)
    } else {
        let faults = Faults::new(&arguments.faults, arguments.seed);
        Box::new(Emulated::new(arguments.profile.limits(), faults, ledger))
    };
    let Limits { product, depth, keys, .. } = engine.limits().clone();
    let keys = arguments.keys.unwrap_or(keys).min(keys);
    let mut card = Card {
        engine,
        key_places: keys,
        identity,
        numbers: 0,
        owners: Owners::new(),
        peers: Vec::new(),
    };
    // Only now: a card that can't start takes nobody's socket.
    let path = &arguments.socket;
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let flags = SocketFlags::CLOEXEC;
    let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    bind(&listener, &SocketAddrUnix::new(path)?)?;
    listen(&listener, 64)?;
    let mut out = io::stdout();
    writeln!(out, "ready: {product}, {depth} jobs a queue, {keys} keys, seed {}", arguments.seed)?;
    out.flush()?;
    loop {
        let ready = card.wait(&listener)?;
        // The peers first: their places change when one is added or dropped.
        let heard = ready.iter().skip(1).enumerate().filter(|(_, is_ready)| **is_ready);
        let gone: Vec<usize> =
            heard.map(|(index, _)| index).filter(|index| card.hear(*index).is_err()).collect();
        card.engine.work(&card.owners)?;
        card.drop_peers(&gone);
        if ready[0] {
            match accept_with(&listener, SocketFlags::CLOEXEC) {
                Ok(socket) => card.peers.push((socket, Role::New)),
                // Out of descriptors, or it is gone. Not at once again.
                Err(_) => std::thread::sleep(ACCEPT_PAUSE),
            }
        }
    }
}

impl Card {
    /// Drops peers that are gone, and the queues and keys of daemons that are.
    fn drop_peers(&mut self, gone: &[usize]) {
        let mut places = 0..;
        let is_gone =
            |_: &mut (OwnedFd, Role)| places.next().is_some_and(|place| gone.contains(&place));
        let mut left: Vec<Role> =
            self.peers.extract_if(.., is_gone).map(|(_, role)| role).collect();
        let daemons: Vec<Daemon> = left
            .iter()
            .filter_map(|role| if let Role::Device(daemon) = role { Some(*daemon) } else { None })
            .collect();
        let orphans = self.peers.extract_if(
            ..,
            |(_, role)| matches!(role, Role::Queue(daemon, _) if daemons.contains(daemon)),
        );
        left.extend(orphans.map(|(_, role)| role));
        for role in left {
            if let Role::Queue(_, number) = role {
                self.engine.close(number);
            }
        }
        for (place, _) in self.owners.extract_if(|_, daemon| daemons.contains(daemon)) {
            self.engine.unload(place);
        }
    }

    fn wait(&self, listener: &OwnedFd) -> io::Result<Vec<bool>> {
        let timeout = self.engine.wait().and_then(|left| Timespec::try_from(left).ok());
        let accepts = self.peers.len() < PEERS_MAX;
        let wanted = if accepts { PollFlags::IN } else { PollFlags::empty() };
        let mut polled = vec![PollFd::new(listener, wanted)];
        polled.extend(self.peers.iter().map(|(socket, _)| PollFd::new(socket, PollFlags::IN)));
        match poll(&mut polled, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(polled.iter().map(|fd| !fd.revents().is_empty()).collect())
    }

    /// Takes a message of a peer. After an error it is dropped.
    fn hear(&mut self, index: usize) -> io::Result<()> {
        // It may hold a key.
        let mut message = Zeroizing::new(vec![0; 256]);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(QUEUE_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let (socket, _) = &self.peers[index];
        let got = recvmsg(
            socket.as_fd(),
            &mut [IoSliceMut::new(&mut message)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        )?;
        let descriptors: Vec<OwnedFd> = control
            .drain()
            .filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(rights) => Some(rights),
                _ => None,
            })
            .flatten()
            .collect();
        if got.bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        message.truncate(got.bytes);
        if matches!(self.peers[index].1, Role::Queue(..)) {
            // A doorbell.
            return Ok(());
        }
        let (answer, payload) = match message.split_first_chunk() {
            Some((number, payload)) => {
                self.answer(index, Operation::of(u32::from_le_bytes(*number)), payload, descriptors)
            }
            None => (Answer::Refused, Vec::new()),
        };
        let mut reply = (answer as u32).to_le_bytes().to_vec();
        reply.extend_from_slice(&payload);
        assert!(reply.len() <= MESSAGE_BYTES_MAX, "answers are short");
        sendmsg(
            &self.peers[index].0,
            &[IoSlice::new(&reply)],
            &mut SendAncillaryBuffer::default(),
            // A daemon that doesn't read its answers is dropped: it would hold up the others.
            SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
        )?;
        Ok(())
    }

    fn answer(
        &mut self,
        index: usize,
        operation: Option<Operation>,
        payload: &[u8],
        descriptors: Vec<OwnedFd>,
    ) -> (Answer, Vec<u8>) {
        let Limits { product, depth, aad_bytes_max, .. } = self.engine.limits().clone();
        let refused = (Answer::Refused, Vec::new());
        match (operation, &mut self.peers[index].1) {
            (Some(Operation::Hello), role @ Role::New) => {
                self.numbers += 1;
                *role = Role::Device(self.numbers);
                let mut welcome = Welcome {
                    version: VERSION.into(),
                    depth: depth.into(),
                    key_slots: self.key_places.into(),
                    aad_bytes_max: aad_bytes_max.into(),
                    has_protected_bus: 0.into(),
                    profile: [0; 20],
                };
                welcome.profile[..product.len()].copy_from_slice(product.as_bytes());
                (Answer::Done, welcome.as_bytes().to_vec())
            }
            (Some(Operation::Evidence), Role::Device(_)) => {
                let statement = self.identity.as_ref().zip(payload.try_into().ok());
                let evidence = statement.and_then(|(own, nonce)| own.evidence(nonce, &product));
                evidence.map_or(refused, |evidence| (Answer::Done, evidence))
            }
            (Some(Operation::Load), Role::Device(daemon)) => {
                let mut key = [0; KEY_BYTES];
                if payload.len() != key.len() {
                    return refused;
                }
                key.copy_from_slice(payload);
                let secret = Secret::take(&mut key);
                let free = (0..self.key_places).find(|place| !self.owners.contains_key(place));
                let Some(place) = free.filter(|place| self.engine.load(*place, &secret)) else {
                    return (Answer::Full, Vec::new());
                };
                self.owners.insert(place, *daemon);
                (Answer::Done, place.to_le_bytes().to_vec())
            }
            (Some(Operation::Unload), Role::Device(daemon)) => {
                let Ok(place) = payload.try_into().map(u16::from_le_bytes) else { return refused };
                if self.owners.get(&place) == Some(daemon) {
                    self.owners.remove(&place);
                    self.engine.unload(place);
                }
                (Answer::Done, Vec::new())
            }
            (Some(Operation::Open), Role::Device(daemon)) => {
                let daemon = *daemon;
                let asked = payload.try_into().map(u16::from_le_bytes).unwrap_or_default();
                let Ok([arena, submissions, completions, bell, doorbell]) =
                    <[OwnedFd; QUEUE_DESCRIPTORS]>::try_from(descriptors)
                else {
                    return refused;
                };
                let memory = [arena, submissions, completions, bell];
                let rings = Some(memory).filter(|_| asked <= depth);
                let Some(rings) = rings.and_then(|memory| Rings::open(asked, memory)) else {
                    return refused;
                };
                self.numbers += 1;
                if !self.engine.open(self.numbers, daemon, rings) {
                    return (Answer::Full, Vec::new());
                }
                self.peers.push((doorbell, Role::Queue(daemon, self.numbers)));
                (Answer::Done, Vec::new())
            }
            _ => refused,
        }
    }
}
