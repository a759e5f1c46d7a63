//! Daemons that do to a card what they like: it serves the others.

mod running;

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;

use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, recv, send, sendmsg, socket_with, socketpair,
};
use sealane_engine::accelerator::probe;
use sealane_engine::accelerator::wire::{
    Completion, Operation, QUEUE_DESCRIPTORS, Submission, VERSION, arena_bytes, ring_bytes,
};
use sealane_engine::shared_memory::{PeerAccess, SharedMemory};

use running::Running;

const DEPTH: u16 = 4;

/// A daemon that has said hello.
fn daemon(card: &Running) -> OwnedFd {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    connect(&socket, &SocketAddrUnix::new(card.directory.join("card")).unwrap()).unwrap();
    ask(&socket, Operation::Hello, &VERSION.to_le_bytes());
    assert_eq!(answer(&socket), 0);
    socket
}

fn ask(socket: &OwnedFd, operation: Operation, payload: &[u8]) {
    let request = [&(operation as u32).to_le_bytes()[..], payload].concat();
    send(socket, &request, SendFlags::NOSIGNAL).unwrap();
}

/// The status of an answer.
fn answer(socket: &OwnedFd) -> u32 {
    let mut bytes = [0; 256];
    recv(socket, &mut bytes[..], RecvFlags::empty()).unwrap();
    u32::from_le_bytes(*bytes.first_chunk().unwrap())
}

/// Opens a queue with this bell; its submissions and its doorbell.
fn queue(socket: &OwnedFd, bell: &OwnedFd) -> (SharedMemory, OwnedFd) {
    let create = |bytes, access| SharedMemory::create("hostile", bytes, access).unwrap();
    let arena = create(arena_bytes(DEPTH), PeerAccess::Writes);
    let submissions = create(ring_bytes(DEPTH, size_of::<Submission>()), PeerAccess::Reads);
    let completions = create(ring_bytes(DEPTH, size_of::<Completion>()), PeerAccess::Writes);
    let kind = SocketType::SEQPACKET;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(QUEUE_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors =
        [arena.file(), submissions.file(), completions.file(), bell.as_fd(), theirs.as_fd()];
    control.push(SendAncillaryMessage::ScmRights(&descriptors));
    let request = [&(Operation::Open as u32).to_le_bytes()[..], &DEPTH.to_le_bytes()].concat();
    sendmsg(socket, &[IoSlice::new(&request)], &mut control, SendFlags::empty()).unwrap();
    assert_eq!(answer(socket), 0);
    (submissions, ours)
}

fn ring(doorbell: &OwnedFd) {
    send(doorbell, &[1], SendFlags::NOSIGNAL).unwrap();
}

#[test]
fn more_submissions_than_there_is_room_for_hold_up_nobody() {
    for number in [1 << 63, u64::from(DEPTH) + 1, u64::MAX] {
        let card = Running::start(&[]);
        let socket = daemon(&card);
        let bell = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let (submissions, doorbell) = queue(&socket, &bell);
        submissions.word(0).store(number, Ordering::Release);
        ring(&doorbell);
        probe(&card.connect()).unwrap();
        assert!(rustix::io::read(&bell, &mut [0; 8]).is_err(), "none of them was done");
    }
}

#[test]
fn a_bell_that_is_full_and_blocks_holds_up_nobody() {
    let card = Running::start(&[]);
    let socket = daemon(&card);
    let bell = eventfd(0, EventfdFlags::empty()).unwrap();
    let (submissions, doorbell) = queue(&socket, &bell);
    rustix::io::write(&bell, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    // A gateway that makes it block again after this does hold the others up: see rings.rs.
    submissions.word(0).store(1, Ordering::Release);
    ring(&doorbell);
    probe(&card.connect()).unwrap();
}

#[test]
fn a_daemon_that_reads_no_answers_holds_up_nobody() {
    let card = Running::start(&[]);
    let socket = daemon(&card);
    for _ in 0..5000 {
        let request = (Operation::Evidence as u32).to_le_bytes();
        if send(&socket, &request, SendFlags::NOSIGNAL | SendFlags::DONTWAIT).is_err() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
    probe(&card.connect()).unwrap();
}

#[test]
fn a_card_that_can_not_start_takes_nobodys_socket() {
    let card = Running::start(&[]);
    let ended = std::process::Command::new(env!("CARGO_BIN_EXE_sealane-dpu"))
        .arg("--socket")
        .arg(card.directory.join("card"))
        .args(["--driver", "/nowhere.so"])
        .output()
        .unwrap();
    assert!(!ended.status.success());
    let line = String::from_utf8(ended.stderr).unwrap();
    assert!(line.contains("/nowhere.so") && line.contains("No such file"), "{line}");
    probe(&card.connect()).unwrap();
}
