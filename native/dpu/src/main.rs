//! An emulated accelerator card, for trying and testing what uses one. It seals, and it misbehaves
//! on request. It protects nothing: its keys lie in the memory of an ordinary process.

mod faults;
mod identity;
mod queue;

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

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
use sealane_proto::aead::{AeadKey, KEY_BYTES, Secret};
use zerocopy::IntoBytes;

use crate::faults::{Chance, Faults};
use crate::identity::Identity;
use crate::queue::CardQueue;

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
    fn limits(self) -> (&'static str, u16, u16) {
        match self {
            Self::Bf3Doca => ("bf3-doca", 512, 128),
            Self::Bf3Dpdk => ("bf3-dpdk", 128, 64),
            Self::Tiny => ("tiny", 4, 1),
        }
    }
}

/// An emulated accelerator card for Sealane. For development only: it protects nothing.
#[derive(Debug, Parser)]
#[command(name = "sealane-dpu", version)]
struct Arguments {
    /// Unix socket (SEQPACKET) to listen on; one that is there is replaced.
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    /// Limits to have.
    #[arg(long, value_enum, default_value = "bf3-dpdk")]
    profile: Profile,
    /// Hold this many keys, instead of the profile's number.
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

/// Number of a daemon's connection.
type Daemon = u64;

enum Role {
    /// Nothing was asked yet.
    New,
    /// A daemon's requests, and its keys by slot.
    Device { daemon: Daemon, keys: HashMap<u16, AeadKey> },
    /// A queue's doorbell.
    Queue { daemon: Daemon, queue: Box<CardQueue> },
}

struct Card {
    /// Name of the profile, jobs of a queue, keys.
    limits: (&'static str, u16, u16),
    identity: Option<Identity>,
    faults: Faults,
    ledger: Option<File>,
    daemons: Daemon,
    peers: Vec<(OwnedFd, Role)>,
}

fn run(arguments: &Arguments) -> io::Result<Never> {
    let path = &arguments.socket;
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let flags = SocketFlags::CLOEXEC;
    let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    bind(&listener, &SocketAddrUnix::new(path)?)?;
    listen(&listener, 64)?;
    let ledger = match &arguments.ledger {
        Some(path) => Some(OpenOptions::new().append(true).create(true).open(path)?),
        None => None,
    };
    let identity = match (&arguments.key, &arguments.certificates) {
        (Some(key), Some(certificates)) => Some(Identity::read(key, certificates)?),
        _ => None,
    };
    let (profile, depth, keys) = arguments.profile.limits();
    let keys = arguments.keys.unwrap_or(keys);
    let mut card = Card {
        limits: (profile, depth, keys),
        identity,
        faults: Faults::new(&arguments.faults, arguments.seed),
        ledger,
        daemons: 0,
        peers: Vec::new(),
    };
    let mut out = io::stdout();
    writeln!(out, "ready: {profile}, {depth} jobs a queue, {keys} keys, seed {}", arguments.seed)?;
    out.flush()?;
    loop {
        let ready = card.wait(&listener)?;
        // The peers first: their places change when one is added or dropped.
        let heard = ready.iter().skip(1).enumerate().filter(|(_, is_ready)| **is_ready);
        let gone: Vec<usize> =
            heard.map(|(index, _)| index).filter(|index| card.hear(*index).is_err()).collect();
        card.work()?;
        card.drop_peers(&gone);
        if ready[0] {
            let socket = accept_with(&listener, SocketFlags::CLOEXEC)?;
            card.peers.push((socket, Role::New));
        }
    }
}

impl Card {
    /// Drops peers that are gone, and the queues of daemons that are.
    fn drop_peers(&mut self, gone: &[usize]) {
        let mut places = 0..;
        self.peers.retain(|_| places.next().is_some_and(|place| !gone.contains(&place)));
        let is_device = |(_, role): &(OwnedFd, Role)| match role {
            Role::Device { daemon, .. } => Some(*daemon),
            _ => None,
        };
        let daemons: Vec<Daemon> = self.peers.iter().filter_map(is_device).collect();
        self.peers.retain(|(_, role)| match role {
            Role::Queue { daemon, .. } => daemons.contains(daemon),
            _ => true,
        });
    }

    fn wait(&self, listener: &OwnedFd) -> io::Result<Vec<bool>> {
        let times = self.peers.iter().filter_map(|(_, role)| match role {
            Role::Queue { queue, .. } => queue.next_time(),
            _ => None,
        });
        let left = times.min().map(|time| time.saturating_duration_since(Instant::now()));
        let timeout = left.and_then(|left| Timespec::try_from(left).ok());
        let mut polled = vec![PollFd::new(listener, PollFlags::IN)];
        polled.extend(self.peers.iter().map(|(socket, _)| PollFd::new(socket, PollFlags::IN)));
        match poll(&mut polled, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(polled.iter().map(|fd| !fd.revents().is_empty()).collect())
    }

    /// Takes a message of a peer. After an error it is dropped.
    fn hear(&mut self, index: usize) -> io::Result<()> {
        let mut message = vec![0; 256];
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
        if matches!(self.peers[index].1, Role::Queue { .. }) {
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
            SendFlags::NOSIGNAL,
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
        let (profile, depth, key_slots) = self.limits;
        let refused = (Answer::Refused, Vec::new());
        let loaded: usize = self
            .peers
            .iter()
            .map(|(_, role)| if let Role::Device { keys, .. } = role { keys.len() } else { 0 })
            .sum();
        match (operation, &mut self.peers[index].1) {
            (Some(Operation::Hello), role @ Role::New) => {
                self.daemons += 1;
                *role = Role::Device { daemon: self.daemons, keys: HashMap::new() };
                let mut welcome = Welcome {
                    version: VERSION.into(),
                    depth: depth.into(),
                    key_slots: key_slots.into(),
                    aad_bytes_max: 64.into(),
                    has_protected_bus: 0.into(),
                    profile: [0; 20],
                };
                welcome.profile[..profile.len()].copy_from_slice(profile.as_bytes());
                (Answer::Done, welcome.as_bytes().to_vec())
            }
            (Some(Operation::Evidence), Role::Device { .. }) => {
                let statement = self.identity.as_ref().zip(payload.try_into().ok());
                let evidence = statement.and_then(|(own, nonce)| own.evidence(nonce, profile));
                evidence.map_or(refused, |evidence| (Answer::Done, evidence))
            }
            (Some(Operation::Load), Role::Device { keys, .. }) => {
                let Ok(mut key) = <[u8; KEY_BYTES]>::try_from(payload) else { return refused };
                let free = (0..key_slots).find(|slot| !keys.contains_key(slot));
                let Some(slot) = free.filter(|_| loaded < usize::from(key_slots)) else {
                    return (Answer::Full, Vec::new());
                };
                keys.insert(slot, AeadKey::new(&Secret::take(&mut key)));
                (Answer::Done, slot.to_le_bytes().to_vec())
            }
            (Some(Operation::Unload), Role::Device { keys, .. }) => {
                let Ok(slot) = payload.try_into() else { return refused };
                keys.remove(&u16::from_le_bytes(slot));
                (Answer::Done, Vec::new())
            }
            (Some(Operation::Open), Role::Device { daemon, .. }) => {
                let daemon = *daemon;
                let asked = payload.try_into().map(u16::from_le_bytes).unwrap_or_default();
                let Ok([arena, submissions, completions, bell, doorbell]) =
                    <[OwnedFd; QUEUE_DESCRIPTORS]>::try_from(descriptors)
                else {
                    return refused;
                };
                let memory = [arena, submissions, completions, bell];
                let queue = Some(memory).filter(|_| asked <= depth);
                let Some(queue) = queue.and_then(|memory| CardQueue::open(asked, memory)) else {
                    return refused;
                };
                self.peers.push((doorbell, Role::Queue { daemon, queue: Box::new(queue) }));
                (Answer::Done, Vec::new())
            }
            _ => refused,
        }
    }

    fn work(&mut self) -> io::Result<()> {
        let Self { faults, ledger, peers, .. } = self;
        let (mut queues, others): (Vec<_>, Vec<_>) = peers
            .iter_mut()
            .map(|(_, role)| role)
            .partition(|role| matches!(role, Role::Queue { .. }));
        for role in &mut queues {
            let Role::Queue { daemon, queue } = role else { continue };
            let keys = others.iter().find_map(|other| match other {
                Role::Device { daemon: known, keys } if known == daemon => Some(keys),
                _ => None,
            });
            queue.work(keys, faults, ledger)?;
        }
        Ok(())
    }
}
