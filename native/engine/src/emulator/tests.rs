use std::net::UdpSocket;
use std::time::Duration;

use sealane_proto::link::{Loss, PARTS};

use super::*;
use crate::udp::{HEADER_BYTES, Udp};

const CLEAN: LinkConfig = LinkConfig::clean(1_000_000_000, 2_000_000, 16 << 20);

fn config(link: LinkConfig) -> EmulatorConfig {
    EmulatorConfig {
        forward: vec![link],
        backward: vec![link],
        seed: 7,
        schedule: Vec::new(),
        access: None,
        strips_ce: [false; 2],
        corruption_passes_checksum: false,
    }
}

fn relay(config: EmulatorConfig, to: &UdpSocket) -> (Emulator, SocketAddr) {
    let emulator = Emulator::relay(config, to.local_addr().unwrap()).unwrap();
    let address = emulator.address().unwrap();
    (emulator, address)
}

fn socket() -> UdpSocket {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    socket
}

#[test]
fn relays_both_ways_after_the_delay() {
    let (client, server) = (socket(), socket());
    let (mut emulator, address) = relay(config(CLEAN), &server);
    let start = now();
    client.send_to(b"ping", address).unwrap();
    let mut bytes = [0; 64];
    let (length, from) = server.recv_from(&mut bytes).unwrap();
    assert_eq!(&bytes[..length], b"ping");
    assert!(now() - start >= 2_000_000);
    server.send_to(b"pong", from).unwrap();
    let (length, from) = client.recv_from(&mut bytes).unwrap();
    assert_eq!((&bytes[..length], from), (&b"pong"[..], address));
    assert!(now() - start >= 4_000_000);
    emulator.stop();
    let report = emulator.report();
    assert_eq!(report.forward.paths[0].offered_bytes, 4 + u64::from(HEADER_BYTES));
    assert_eq!((report.forward.sent_packets, report.backward.sent_packets), (1, 1));
    assert_eq!(report.forward.slips.iter().map(|(_, count)| count).sum::<u64>(), 1);
}

#[test]
fn every_client_has_its_own_way_back() {
    let (first, second, server) = (socket(), socket(), socket());
    let (emulator, address) = relay(config(CLEAN), &server);
    let mut bytes = [0; 64];
    for client in [&first, &second] {
        client.send_to(b"?", address).unwrap();
        let (_, from) = server.recv_from(&mut bytes).unwrap();
        let port = client.local_addr().unwrap().port();
        server.send_to(&port.to_be_bytes(), from).unwrap();
    }
    for client in [&second, &first] {
        let (length, _) = client.recv_from(&mut bytes).unwrap();
        assert_eq!(&bytes[..length], client.local_addr().unwrap().port().to_be_bytes());
    }
    assert_eq!(emulator.report().medium.foreign_packets, 0);
}

#[test]
fn strangers_at_the_far_side_are_not_relayed() {
    let (client, server, stranger) = (socket(), socket(), socket());
    let (emulator, address) = relay(config(CLEAN), &server);
    client.send_to(b"first", address).unwrap();
    let mut bytes = [0; 64];
    let (_, far) = server.recv_from(&mut bytes).unwrap();
    stranger.send_to(b"strange", far).unwrap();
    server.send_to(b"answer", far).unwrap();
    let (length, _) = client.recv_from(&mut bytes).unwrap();
    assert_eq!(&bytes[..length], b"answer");
    assert_eq!(emulator.report().medium.foreign_packets, 1);
}

#[test]
fn clients_beyond_the_bound_are_foreign() {
    let server = socket();
    let (emulator, address) = relay(config(CLEAN), &server);
    let clients: Vec<UdpSocket> = (0..=FLOWS_MAX).map(|_| socket()).collect();
    let mut bytes = [0; 64];
    for client in &clients[..FLOWS_MAX] {
        client.send_to(b"x", address).unwrap();
        server.recv_from(&mut bytes).unwrap();
    }
    clients[FLOWS_MAX].send_to(b"x", address).unwrap();
    clients[0].send_to(b"y", address).unwrap();
    assert_eq!(server.recv_from(&mut bytes).unwrap().0, 1);
    assert_eq!(bytes[0], b'y');
    assert_eq!(emulator.report().medium.foreign_packets, 1);
}

#[test]
fn a_path_is_down_as_scheduled_until_the_schedule_starts_again() {
    let (client, server) = (socket(), socket());
    let hour = 3_600_000_000_000;
    let down = Spell { path: 0, start_nanos: 0, end_nanos: hour, more_nanos: None };
    let (emulator, address) =
        relay(EmulatorConfig { schedule: vec![down], ..config(CLEAN) }, &server);
    client.send_to(b"lost", address).unwrap();
    while emulator.report().forward.paths[0].down_packets == 0 {
        std::thread::yield_now();
    }
    assert_eq!(emulator.report().forward.sent_packets, 0);
    emulator.start_schedule();
    client.send_to(b"lost", address).unwrap();
    while emulator.report().forward.paths[0].down_packets < 2 {
        std::thread::yield_now();
    }
}

#[test]
fn corruption_changes_one_bit_of_the_payload() {
    let (client, server) = (socket(), socket());
    let link = LinkConfig { corrupt_parts_per_billion: PARTS, ..CLEAN };
    let (_emulator, address) = relay(config(link), &server);
    client.send_to(&[0; 40], address).unwrap();
    let mut bytes = [0; 64];
    let (length, _) = server.recv_from(&mut bytes).unwrap();
    assert_eq!(bytes[..length].iter().map(|byte| byte.count_ones()).sum::<u32>(), 1);
}

#[test]
fn what_cannot_be_emulated_is_refused() {
    let to = "127.0.0.1:9".parse().unwrap();
    let refusal = |config| Emulator::relay(config, to).map(drop).unwrap_err().to_string();
    let none = EmulatorConfig { forward: Vec::new(), backward: Vec::new(), ..config(CLEAN) };
    assert!(refusal(none).starts_with("0 paths forward and 0 back"));
    let uneven = EmulatorConfig { backward: vec![CLEAN; 2], ..config(CLEAN) };
    assert!(refusal(uneven).starts_with("1 paths forward and 2 back"));
    for (path, end_nanos) in [(1, 2), (0, 1)] {
        let schedule = vec![Spell { path, start_nanos: 1, end_nanos, more_nanos: None }];
        assert!(
            refusal(EmulatorConfig { schedule, ..config(CLEAN) }).starts_with("schedule: path")
        );
    }
    let certain = LinkConfig { loss: Loss::Independent(PARTS + 1), ..CLEAN };
    assert!(refusal(config(certain)).contains("parts per billion"));
}

/// A list of packets handed to the kernel in one call must be lost packet by packet.
#[test]
fn segmentation_lists_are_lost_packet_by_packet() {
    const LISTS: u32 = 40;
    const SEGMENTS: u32 = 40;
    let server = socket();
    let sender = Udp::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let link = LinkConfig { loss: Loss::Independent(PARTS / 10), ..CLEAN };
    let (mut emulator, address) = relay(config(link), &server);
    let mut seen = Vec::new();
    for list in 0..LISTS {
        let contents: Vec<u8> = (0..SEGMENTS)
            .flat_map(|segment| {
                let mut packet = vec![0; 1000];
                packet[..4].copy_from_slice(&(list * SEGMENTS + segment).to_le_bytes());
                packet
            })
            .collect();
        sender.send(address, &contents, 1000, None).unwrap();
        let settled = loop {
            let path = emulator.report().forward.paths[0];
            if path.delivered_packets + path.lost_packets == u64::from((list + 1) * SEGMENTS) {
                break path.delivered_packets;
            }
        };
        let mut bytes = [0; 2000];
        while (seen.len() as u64) < settled {
            assert_eq!(server.recv_from(&mut bytes).unwrap().0, 1000);
            seen.push(u32::from_le_bytes(bytes[..4].try_into().unwrap()));
        }
    }
    emulator.stop();
    let link = emulator.report().forward.paths[0];
    assert_eq!(link.offered_packets, u64::from(LISTS * SEGMENTS));
    assert_eq!(link.delivered_packets, seen.len() as u64);
    let missing: Vec<u32> = (0..LISTS * SEGMENTS).filter(|n| !seen.contains(n)).collect();
    // Seeded: 10 % of 1600, within four standard deviations, and never a whole list.
    assert!((112..=208).contains(&missing.len()), "{} lost", missing.len());
    let mut longest = 0;
    let mut run = 0;
    for number in 0..LISTS * SEGMENTS {
        run = if missing.contains(&number) { run + 1 } else { 0 };
        longest = longest.max(run);
    }
    assert!(longest <= 6, "a run of {longest} losses");
}
