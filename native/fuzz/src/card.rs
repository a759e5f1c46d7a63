//! A card's completion ring and slots, which may hold anything at any time.

use std::collections::BTreeMap;
use std::io::{IoSliceMut, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, OnceLock};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, accept, bind, listen, recvmsg, send, socket_with,
};
use sealane_engine::accelerator::card::Card;
use sealane_engine::accelerator::wire::{
    Answer, Operation, QUEUE_DESCRIPTORS, VERSION, data_offset, entry_offset, tag_offset,
};
use sealane_engine::accelerator::{Cookie, Device as _, Done, KeySlot, Queue, SealJob};
use sealane_engine::shared_memory::{PeerAccess, SharedMemory};
use sealane_proto::aead::TAG_BYTES;
use sealane_proto::sector::DATA_BYTES;

use crate::script::Script;

const DEPTH: u16 = 8;
const COMPLETION_BYTES: usize = 16;

/// What a queue hands to its card.
type Handed = [OwnedFd; QUEUE_DESCRIPTORS];

/// A card that agrees to everything, and where its queues' descriptors arrive.
struct World {
    card: Card,
    handed: Mutex<Receiver<Handed>>,
}

impl World {
    fn start() -> Self {
        let path = std::env::temp_dir().join(format!("sealane-fuzz-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let address = SocketAddrUnix::new(&path).expect("a short path");
        let kind = SocketType::SEQPACKET;
        let listener =
            socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).expect("a socket");
        bind(&listener, &address).expect("a free path");
        listen(&listener, 1).expect("a socket that listens");
        let (sender, handed) = channel();
        std::thread::spawn(move || serve(&accept(&listener).expect("the engine"), &sender));
        let card = Card::connect(&path).expect("a card that agrees");
        let _ = std::fs::remove_file(&path);
        Self { card, handed: Mutex::new(handed) }
    }

    fn queue(&self) -> (Box<dyn Queue>, Handed) {
        let handed = self.handed.lock().expect("one thread");
        let queue = self.card.queue().expect("a queue");
        (queue, handed.recv().expect("descriptors"))
    }
}

/// Answers each request, and passes on the descriptors that come with one.
fn serve(socket: &OwnedFd, handed: &Sender<Handed>) {
    let mut message = [0; 256];
    loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(QUEUE_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(&mut message)];
        let got = recvmsg(socket, &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC);
        if !got.is_ok_and(|got| got.bytes > 0) {
            return;
        }
        let descriptors = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(rights) => Some(rights),
            _ => None,
        });
        let descriptors: Vec<OwnedFd> = descriptors.flatten().collect();
        let mut answer = (Answer::Done as u32).to_le_bytes().to_vec();
        if message[..4] == (Operation::Hello as u32).to_le_bytes() {
            answer.write_all(&VERSION.to_le_bytes()).expect("a vector grows");
            // Depth, places for keys, additional data, no protected bus.
            for number in [DEPTH, 1, 64, 0] {
                answer.write_all(&number.to_le_bytes()).expect("a vector grows");
            }
            answer.write_all(&[b'f'; 20]).expect("a vector grows");
        }
        if let Ok(five) = Handed::try_from(descriptors) {
            handed.send(five).expect("the engine");
        }
        send(socket, &answer, SendFlags::NOSIGNAL).expect("the engine");
    }
}

static WORLD: OnceLock<World> = OnceLock::new();

/// Regardless of what a card writes into its rings and slots, each job ends once at most, with what
/// its slot holds when it is taken, or the queue is broken.
pub fn card_ring(data: &[u8]) {
    let (mut queue, handed) = WORLD.get_or_init(World::start).queue();
    let [arena, _, completions, _, socket] = handed;
    let attach = |file| SharedMemory::attach(file, PeerAccess::Writes).expect("a mapping");
    let (arena, completions) = (attach(arena), attach(completions));
    let mut socket = Some(socket);
    let mut script = Script::new(data);
    let mut in_flight: BTreeMap<Cookie, u16> = BTreeMap::new();
    let (mut greatest, mut read) = (None, 0);
    while !script.is_empty() {
        match script.byte() % 8 {
            0 => {
                let plain = [script.byte(); DATA_BYTES];
                let (nonce, aad) = ([1; 12], [2; 33]);
                let job = SealJob { key: KeySlot(0), nonce, aad: &aad, plain: &plain };
                assert_eq!(queue.has_room(), in_flight.len() < usize::from(DEPTH));
                let submitted = queue.submit(&job);
                assert_eq!(submitted.is_some(), in_flight.len() < usize::from(DEPTH));
                let Some(cookie) = submitted else { continue };
                assert!(greatest.is_none_or(|last| last < cookie), "a name is used once");
                greatest = Some(cookie);
                let slot = (cookie % u64::from(DEPTH)) as u16;
                assert!(!in_flight.values().any(|used| *used == slot), "a slot has one job");
                in_flight.insert(cookie, slot);
                let mut handed = [0; DATA_BYTES];
                arena.copy_out(data_offset(slot), &mut handed);
                assert_eq!(handed, plain);
            }
            1 => {
                let words = completions.len() as u64 / 8;
                let offset = u64::from(script.half()) % words * 8;
                completions.copy_in(offset, &script.word().to_le_bytes());
            }
            2 => {
                // As it should be, but perhaps of a job that ended already, or never was.
                let which = usize::from(script.byte());
                let known = in_flight.keys().nth(which % (in_flight.len() + 1)).copied();
                let cookie = known.unwrap_or_else(|| script.word());
                let written = completions_written(&completions);
                let entry = [cookie.to_le_bytes(), u64::from(script.byte()).to_le_bytes()].concat();
                completions.copy_in(entry_offset(written, DEPTH, COMPLETION_BYTES), &entry);
                completions.copy_in(0, &written.wrapping_add(1).to_le_bytes());
            }
            3 => {
                let at = usize::from(script.half()) % arena.len();
                let length = usize::from(script.byte()).min(arena.len() - at);
                arena.copy_in(at as u64, script.take(length));
            }
            4 => queue.ring(),
            5 => drop(socket.take()),
            6 => queue.hear(),
            _ => {
                let mut done = Vec::new();
                let written = completions_written(&completions);
                let polled = queue.poll(&mut done);
                assert!(done.len() <= in_flight.len());
                read += done.len() as u64;
                assert!(polled.is_err() || read == written, "all that was announced was read");
                for Done { cookie, .. } in done {
                    let slot = in_flight.remove(&cookie).expect("a job in flight, once");
                    let (mut expected, mut tag) = ([0; DATA_BYTES], [0; TAG_BYTES]);
                    arena.copy_out(data_offset(slot), &mut expected);
                    arena.copy_out(tag_offset(slot), &mut tag);
                    let mut taken = [0; DATA_BYTES];
                    assert_eq!(queue.take(cookie, &mut taken), tag);
                    assert_eq!(taken, expected);
                }
                if polled.is_err() {
                    return;
                }
            }
        }
    }
}

fn completions_written(completions: &SharedMemory) -> u64 {
    let mut word = [0; 8];
    completions.copy_out(0, &mut word);
    u64::from_le_bytes(word)
}
