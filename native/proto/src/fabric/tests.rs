//! Routes, hashing, classes and capacity of the fabric.

use std::collections::BTreeSet;

use super::*;

const LINE: u64 = 100_000_000_000;

fn sites() -> Sites {
    let near = LinkConfig::clean(LINE, 1_000, 1_000_000);
    Sites {
        near,
        host: LinkConfig { buffer_bytes: 1 << 30, ..near },
        border: near,
        wan: LinkConfig { delay_nanos: 886_500, ..near },
        wan_links: 8,
    }
}

fn packet(to: u16, entropy: u32, class: Class) -> Packet<u32> {
    let wire_bytes = if class == Class::Data { 4160 } else { 64 };
    Packet {
        to: NodeId(to),
        flow: 7,
        entropy,
        class,
        wire_bytes,
        is_ecn_capable: true,
        is_marked: false,
        corruption: None,
        body: entropy,
    }
}

fn arrivals(fabric: &mut Fabric<u32>) -> Vec<(Nanos, u32)> {
    let mut found = Vec::new();
    while let Some(at) = fabric.next_at() {
        found.extend(fabric.take(at).map(|(at, packet)| (at, packet.body)));
    }
    found
}

#[test]
fn a_packet_takes_as_long_as_its_hops() {
    // The round trips of Uno's evaluation: 14.03 and 1792.04 µs.
    for (to, is_far, round_trip) in [(255, true, 1_792_040), (127, false, 14_030)] {
        let mut fabric = Fabric::new(sites().build(), 1);
        assert!(fabric.offer(NodeId(0), packet(to, 1, Class::Data), 0));
        let there = arrivals(&mut fabric)[0].0;
        fabric.offer(NodeId(to), packet(0, 1, Class::Control), there);
        let back = arrivals(&mut fabric)[0].0;
        assert!(back.abs_diff(round_trip) < 10, "{back} ns");
        let modelled = sites().one_way(4160, is_far);
        assert!(there.abs_diff(modelled) < 10, "{there} ns, modelled {modelled}");
    }
}

#[test]
fn every_host_reaches_every_other() {
    let topology = sites().build();
    for from in (0..256).step_by(17) {
        for to in (0..256).filter(|to| *to != from) {
            assert!(!topology.choices(NodeId(from), NodeId(to)).is_empty(), "{from} to {to}");
        }
    }
    assert!(topology.choices(NodeId(0), NodeId(0)).is_empty());
}

#[test]
fn entropy_spreads_packets_over_all_links_between_the_sites() {
    let topology = sites().build();
    let wan = topology.ports().len() as u32 - 16;
    let mut fabric = Fabric::new(topology, 3);
    for entropy in 0..400 {
        fabric.offer(NodeId(0), packet(200, entropy, Class::Data), u64::from(entropy) * 1000);
    }
    assert_eq!(arrivals(&mut fabric).len(), 400);
    let carried: Vec<u64> =
        (0..8).map(|link| fabric.counters(PortId(wan + link)).delivered_packets).collect();
    assert_eq!(carried.iter().sum::<u64>(), 400);
    assert!(carried.iter().all(|packets| (25..90).contains(packets)), "{carried:?}");
    let back = (8..16).map(|link| fabric.counters(PortId(wan + link)).offered_packets);
    assert_eq!(back.sum::<u64>(), 0);
}

#[test]
fn equal_flows_and_entropies_take_one_way_and_other_seeds_another() {
    let ways: BTreeSet<Vec<u64>> = (0..10)
        .map(|seed| {
            let topology = sites().build();
            let wan = topology.ports().len() as u32 - 16;
            let mut fabric = Fabric::new(topology, seed);
            for at in 0..20 {
                fabric.offer(NodeId(0), packet(200, 5, Class::Data), at * 10_000);
            }
            arrivals(&mut fabric);
            let count = |link| fabric.counters(PortId(wan + link)).delivered_packets;
            let carried: Vec<u64> = (0..8).map(count).collect();
            assert!(carried.contains(&20), "{carried:?}");
            carried
        })
        .collect();
    assert!(ways.len() > 2, "{ways:?}");
}

#[test]
fn control_packets_leave_first_and_take_their_time_from_data() {
    let lone = |with_control: bool| {
        let mut fabric = Fabric::new(sites().build(), 1);
        for number in 0..100 {
            fabric.offer(NodeId(0), packet(1, number, Class::Data), 0);
        }
        if with_control {
            (100..150).for_each(|number| {
                fabric.offer(NodeId(0), packet(1, number, Class::Control), 0);
            });
        }
        for number in 200..300 {
            fabric.offer(NodeId(0), packet(1, number, Class::Data), 0);
        }
        arrivals(&mut fabric)
    };
    let (without, with) = (lone(false), lone(true));
    let control = with.iter().filter(|(_, number)| (100..150).contains(number));
    let first_data = without[1].0;
    let last_control = control.map(|(at, _)| *at).max().unwrap();
    assert!(last_control < first_data + 2_000, "{last_control} ns");
    let later = with.last().unwrap().0 - without.last().unwrap().0;
    let occupied = 50 * 64 * 8 * 1_000_000_000 / LINE;
    assert!(later.abs_diff(occupied) < 20, "{later} ns instead of {occupied}");
}

#[test]
fn a_port_in_an_outage_loses_both_classes() {
    let topology = sites().build();
    let wan = topology.ports().len() as u32 - 16;
    let mut fabric = Fabric::new(topology, 1);
    (0..8).for_each(|link| fabric.set_outages(PortId(wan + link), &[(0, 2_000_000)]));
    for (entropy, class) in [(1, Class::Data), (2, Class::Control)] {
        fabric.offer(NodeId(0), packet(200, entropy, class), 0);
        fabric.offer(NodeId(0), packet(200, entropy + 10, class), 3_000_000);
        fabric.offer(NodeId(200), packet(0, entropy + 20, class), 0);
    }
    let mut found: Vec<u32> = arrivals(&mut fabric).into_iter().map(|(_, body)| body).collect();
    found.sort_unstable();
    assert_eq!(found, [11, 12, 21, 22]);
}
