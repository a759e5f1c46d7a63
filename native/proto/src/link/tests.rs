use super::*;

const CONFIG: LinkConfig = LinkConfig::clean(200_000_000, 12_500_000, 1 << 20);

/// All delivered packets, in order.
fn drain<T: Clone>(link: &mut Link<T>) -> Vec<Delivery<T>> {
    std::iter::from_fn(|| link.take(Nanos::MAX)).collect()
}

fn arrivals(link: &mut Link<u64>) -> Vec<Nanos> {
    drain(link).iter().map(|delivery| delivery.at).collect()
}

/// The packets that are delivered, of `count` sent a second apart.
fn survivors(config: LinkConfig, seed: u64, count: u64) -> Vec<u64> {
    let mut link = Link::new(config, seed);
    for number in 0..count {
        link.offer(number, 100, false, number * NANOS_PER_SECOND);
    }
    let out: Vec<u64> = drain(&mut link).into_iter().map(|delivery| delivery.packet).collect();
    let counters = link.counters();
    assert_eq!(counters.delivered_packets, out.len() as u64);
    assert_eq!(counters.lost_packets, count - out.len() as u64);
    out
}

#[test]
fn a_packet_takes_its_serialisation_and_the_delay() {
    let mut link = Link::new(CONFIG, 1);
    link.offer(0, 1500, false, 1000);
    link.offer(1, 1500, false, 1000);
    assert_eq!(link.next_at(), Some(1000 + 60_000 + 12_500_000));
    assert_eq!(link.take(1000 + 60_000 + 12_499_999), None);
    assert_eq!(link.take(1000 + 60_000 + 12_500_000).map(|delivery| delivery.packet), Some(0));
    link.offer(2, 1500, false, 90_000_000);
    assert_eq!(arrivals(&mut link), [1000 + 120_000 + 12_500_000, 90_060_000 + 12_500_000]);
}

#[test]
fn rounding_never_changes_the_rate() {
    // 8 bits at 3 Gbit/s take 2⅔ ns.
    let mut link = Link::new(LinkConfig { rate_bits_per_second: 3_000_000_000, ..CONFIG }, 1);
    for number in 0..6 {
        link.offer(number, 1, false, 0);
    }
    let ends: Vec<Nanos> = arrivals(&mut link).iter().map(|at| at - 12_500_000).collect();
    assert_eq!(ends, [2, 5, 8, 10, 13, 16]);
}

#[test]
fn a_full_buffer_refuses_and_drains() {
    let mut link = Link::new(LinkConfig { buffer_bytes: 3000, ..CONFIG }, 1);
    assert_eq!(link.offer(0, 1500, false, 0), Fate::Accepted);
    assert_eq!(link.offer(1, 1500, false, 0), Fate::Accepted);
    assert_eq!(link.offer(2, 1500, false, 0), Fate::Overflowed);
    assert_eq!(link.offer(3, 1500, false, 60_000), Fate::Accepted);
    assert_eq!(drain(&mut link).len(), 3);
    assert_eq!(link.counters().overflowed_packets, 1);
    assert_eq!(link.counters().delivered_bytes, 4500);
    assert_eq!(link.counters().queued_bytes_max, 3000);
}

#[test]
fn loss_is_seeded_and_close_to_its_probability() {
    let config = LinkConfig { loss: Loss::Independent(10_000_000), ..CONFIG };
    let kept = survivors(config, 1, 100_000);
    assert_eq!(kept, survivors(config, 1, 100_000));
    assert_ne!(kept, survivors(config, 2, 100_000));
    // 1000 of 100,000, within five standard deviations.
    assert!((98_843..=99_157).contains(&kept.len()), "{}", kept.len());
}

#[test]
fn certain_loss_loses_all_and_none_loses_none() {
    let lossy = |parts| LinkConfig { loss: Loss::Independent(parts), ..CONFIG };
    assert!(survivors(lossy(PARTS), 1, 1000).is_empty());
    assert_eq!(survivors(lossy(0), 1, 1000).len(), 1000);
}

#[test]
fn timed_bursts_have_their_length_whatever_the_pace_of_packets() {
    let bursts = TimedBursts { good_nanos: 99_000_000, bad_nanos: 1_000_000 };
    let config = LinkConfig { loss: Loss::Timed(bursts), ..CONFIG };
    for pace in [50_000, 200_000, 1_000_000] {
        let mut link = Link::new(config, 3);
        let count = 400_000;
        let mut kept = Vec::new();
        for number in 0..count {
            link.offer(number, 100, false, number * pace);
            while let Some(delivery) = link.take(number * pace) {
                kept.push(delivery.packet);
            }
        }
        let sent = kept.last().unwrap() + 1;
        let lost = sent - kept.len() as u64;
        let share = lost as f64 / sent as f64;
        assert!((0.0085..0.0115).contains(&share), "{pace}: {share}");
        let runs = kept.windows(2).filter(|pair| pair[1] - pair[0] > 1).count();
        let mean = lost as f64 / runs as f64;
        // What is left of an exponential time when the first packet meets it, in packets.
        let expected = 1.0 / (1.0 - (-(pace as f64) / 1e6).exp());
        assert!((mean / expected - 1.0).abs() < 0.1, "{pace}: {mean} of {expected}");
    }
}

#[test]
fn a_timed_burst_is_drawn_anew_after_a_long_pause() {
    let bursts = TimedBursts { good_nanos: 2_000, bad_nanos: 1_000 };
    let config = LinkConfig { loss: Loss::Timed(bursts), ..CONFIG };
    let mut link = Link::new(config, 3);
    // Stepping through all states of ten hours would take minutes.
    for second in 0..36_000_u64 {
        link.offer(second, 100, false, second * NANOS_PER_SECOND);
        while link.take(second * NANOS_PER_SECOND).is_some() {}
    }
    let counters = link.counters();
    let share = counters.lost_packets as f64 / 36_000.0;
    assert!((0.31..0.35).contains(&share), "{share}");
}

#[test]
fn bursts_have_the_length_and_the_rate_of_gilbert_and_elliott() {
    // p/(p+r) = 1/51 of the packets, in bursts of 1/r = 8.
    let p = PARTS / 400;
    let model = GilbertElliott { p, r: PARTS / 8, loss_bad: PARTS, loss_good: 0 };
    let config = LinkConfig { loss: Loss::GilbertElliott(model), ..CONFIG };
    let kept = survivors(config, 3, 200_000);
    let lost = 200_000 - kept.len();
    let bursts = kept.windows(2).filter(|pair| pair[1] - pair[0] > 1).count();
    let mean = lost as f64 / bursts as f64;
    assert!((3300..4550).contains(&lost), "{lost}");
    assert!((7.0..9.0).contains(&mean), "{mean}");
}

#[test]
fn both_states_of_the_model_have_their_own_loss() {
    let always_bad = GilbertElliott { p: PARTS, r: 0, loss_bad: PARTS / 2, loss_good: PARTS };
    let config = LinkConfig { loss: Loss::GilbertElliott(always_bad), ..CONFIG };
    let kept = survivors(config, 4, 10_000).len();
    assert!((4750..5250).contains(&kept), "{kept}");
    let always_good = GilbertElliott { p: 0, r: 0, loss_bad: 0, loss_good: PARTS };
    let config = LinkConfig { loss: Loss::GilbertElliott(always_good), ..CONFIG };
    assert!(survivors(config, 4, 100).is_empty());
}

#[test]
fn jitter_spreads_arrivals_and_keeps_their_order() {
    let mut link = Link::new(LinkConfig { jitter_nanos: 1_000_000, ..CONFIG }, 5);
    for number in 0..1000 {
        link.offer(number, 1500, false, number * 100_000);
    }
    let out = drain(&mut link);
    assert!(out.windows(2).all(|pair| pair[0].at <= pair[1].at));
    assert!(out.iter().enumerate().all(|(index, delivery)| delivery.packet == index as u64));
    let added: Vec<u64> =
        out.iter().map(|d| d.at - d.packet * 100_000 - 60_000 - 12_500_000).collect();
    assert!(added.iter().all(|added| *added <= 1_000_000));
    assert!(added.iter().any(|added| *added > 900_000));
}

#[test]
fn reordered_packets_are_overtaken_by_up_to_the_bound() {
    let config = LinkConfig {
        reorder_parts_per_billion: PARTS / 10,
        reorder_nanos_max: 1_000_000,
        ..CONFIG
    };
    let mut link = Link::new(config, 6);
    for number in 0..1000 {
        link.offer(number, 1500, false, number * 100_000);
    }
    let out = drain(&mut link);
    let late = |d: &Delivery<u64>| d.at - d.packet * 100_000 - 60_000 - 12_500_000;
    assert!(out.iter().all(|delivery| late(delivery) <= 1_000_000));
    let overtaken = out.windows(2).filter(|pair| pair[0].packet > pair[1].packet).count();
    assert!((40..=130).contains(&overtaken), "{overtaken}");
    let reordered = link.counters().reordered_packets;
    assert!((60..=150).contains(&reordered), "{reordered}");
}

#[test]
fn copies_share_their_number_and_only_the_original_is_corrupted() {
    let config = LinkConfig {
        duplicate_parts_per_billion: PARTS,
        corrupt_parts_per_billion: PARTS,
        ..CONFIG
    };
    let mut link = Link::new(config, 7);
    link.offer(0, 1500, false, 0);
    let out = drain(&mut link);
    assert_eq!(out.iter().map(|d| (d.number, d.is_duplicated)).collect::<Vec<_>>(), [(0, true); 2]);
    assert_eq!(out.iter().filter(|d| d.corruption.is_some()).count(), 1);
    assert!(out[1].at - out[0].at <= CONFIG.delay_nanos);
    let counters = link.counters();
    assert_eq!((counters.delivered_packets, counters.duplicated_packets), (1, 1));
    assert_eq!(counters.corrupted_packets, 1);
}

#[test]
fn a_link_that_is_down_swallows_what_is_offered_and_nothing_else() {
    let mut link = Link::new(CONFIG, 1);
    link.set_outages(&[(500, 600), (100, 200)]);
    let mut fate = |now| link.offer(now, 100, false, now);
    assert_eq!(fate(99), Fate::Accepted);
    assert_eq!(fate(100), Fate::Down);
    assert_eq!(fate(199), Fate::Down);
    assert_eq!(fate(200), Fate::Accepted);
    assert_eq!(fate(550), Fate::Down);
    assert_eq!(fate(600), Fate::Accepted);
    assert_eq!(drain(&mut link).len(), 3);
    assert_eq!(link.counters().down_packets, 3);
}

#[test]
fn packets_behind_a_detour_overtake_those_on_it() {
    let passed = |detours: &[(Nanos, Nanos, Nanos)]| {
        let mut link = Link::new(CONFIG, 1);
        link.set_detours(detours);
        for number in 0..6 {
            // They leave the buffer 4 microseconds later.
            let fate = link.offer(number, 100, false, number * 10_000);
            assert_eq!(fate, Fate::Accepted);
        }
        let deliveries = drain(&mut link);
        deliveries.iter().map(|delivery| (delivery.packet, delivery.at)).collect::<Vec<_>>()
    };
    let usual = passed(&[]);
    let found = passed(&[(1_000_000, 2_000_000, 7), (20_000, 40_000, 1_000_000)]);
    let later = [2, 3].map(|index| (usual[index].0, usual[index].1 + 1_000_000));
    assert_eq!(found, [&usual[..2], &usual[4..], &later].concat());
}

#[test]
fn one_fate_does_not_move_the_others() {
    let corrupted = |config| {
        let mut link = Link::new(config, 8);
        for number in 0..1000 {
            link.offer(number, 100, false, number * NANOS_PER_SECOND);
        }
        let out = drain(&mut link);
        out.into_iter().filter_map(|d| d.corruption.map(|_| d.packet)).collect::<Vec<u64>>()
    };
    let alone = LinkConfig { corrupt_parts_per_billion: PARTS / 10, ..CONFIG };
    let with_jitter = LinkConfig { jitter_nanos: 7, ..alone };
    let with_loss = LinkConfig { loss: Loss::Independent(PARTS / 10), ..alone };
    assert_eq!(corrupted(alone), corrupted(with_jitter));
    let all = corrupted(alone);
    assert!(corrupted(with_loss).iter().all(|packet| all.contains(packet)));
}

const RED: Thresholds =
    Thresholds { low_bytes: 15_000, high_bytes: 30_000, probability_max_parts: PARTS / 2 };

#[test]
fn early_detection_marks_what_can_be_marked_and_drops_the_rest() {
    let marked = |is_ecn_capable| {
        let mut link = Link::new(LinkConfig { red: Some(RED), ..CONFIG }, 9);
        for number in 0..100_u64 {
            link.offer(number, 1500, is_ecn_capable, 0);
        }
        let out = drain(&mut link);
        (out.iter().filter(|d| d.is_marked).map(|d| d.packet).collect::<Vec<_>>(), link.counters())
    };
    let (capable, counters) = marked(true);
    // When packet i is dequeued, 99 - i packets wait behind it: marking is certain from 20,
    // impossible below 11.
    assert!((0..=79).all(|packet| capable.contains(&packet)), "{capable:?}");
    assert!(capable.iter().all(|packet| *packet < 89), "{capable:?}");
    assert_eq!(counters.marked_packets, capable.len() as u64);
    assert_eq!(counters.dropped_early_packets, 0);
    let (none, counters) = marked(false);
    assert!(none.is_empty());
    assert!(counters.dropped_early_packets >= 60, "{}", counters.dropped_early_packets);
    assert_eq!(counters.overflowed_packets, 0);
}

#[test]
fn the_phantom_queue_fills_where_the_real_one_is_empty() {
    let thresholds = Thresholds { low_bytes: 2000, high_bytes: 4000, probability_max_parts: PARTS };
    let phantom = Phantom { drain_parts_per_billion: 952_000_000, cap_bytes: 100_000, thresholds };
    let mut link = Link::new(LinkConfig { phantom: Some(phantom), ..CONFIG }, 10);
    // Exactly the wire's rate: 1500 bytes every 60 µs, of which the phantom queue drains 1428.
    for number in 0..100_u64 {
        link.offer(number, 1500, true, number * 60_000);
        assert!(link.queued_bytes(number * 60_000 + 59_999) <= 1);
    }
    let marked: Vec<u64> =
        drain(&mut link).iter().filter(|d| d.is_marked).map(|d| d.packet).collect();
    // When packet i is dequeued, the phantom queue holds 72 (i + 1) + 1500 or 72 (i + 1) bytes,
    // depending on whether the next packet arrived at the same instant; the dequeue is settled
    // before that arrival.
    assert!(marked.iter().all(|packet| *packet > 26), "{marked:?}");
    assert!((55..100).all(|packet| marked.contains(&packet)), "{marked:?}");
    assert_eq!(link.counters().marked_packets, marked.len() as u64);
}

#[test]
fn the_phantom_queue_agrees_with_an_integrator_in_small_steps() {
    // Marking that is certain from one level on reveals that level; the reference integrates in
    // floating point.
    let level = 30_000;
    let thresholds =
        Thresholds { low_bytes: level, high_bytes: level, probability_max_parts: PARTS };
    let phantom = Phantom { drain_parts_per_billion: 909_000_000, cap_bytes: 60_000, thresholds };
    let config = LinkConfig { phantom: Some(phantom), delay_nanos: 0, ..CONFIG };
    let mut link = Link::new(config, 11);
    let mut dice = Dice::new(12, 0);
    let mut now = 0;
    let mut offers = Vec::new();
    for number in 0..5000_u64 {
        now += dice.up_to(110_000);
        link.offer(number, 1500, true, now);
        offers.push(now);
    }
    let mut reference = 0.0_f64;
    let mut at = 0;
    let mut next = offers.iter().copied().peekable();
    let mut disagreements = 0;
    for delivery in drain(&mut link) {
        while let Some(offer) = next.next_if(|offer| *offer < delivery.at) {
            let drained = (offer - at) as f64 * 0.2 * 0.909 / 8.0;
            reference = ((reference - drained).max(0.0) + 1500.0).min(60_000.0);
            at = offer;
        }
        let drained = (delivery.at - at) as f64 * 0.2 * 0.909 / 8.0;
        let now = (reference - drained).max(0.0);
        let is_near = (now - level as f64).abs() < 1.0;
        disagreements += u32::from(!is_near && delivery.is_marked != (now >= level as f64));
    }
    assert_eq!(disagreements, 0);
    assert!((100..4900).contains(&link.counters().marked_packets));
}

#[test]
fn times_that_run_backwards_are_taken_as_the_last_one() {
    let mut link = Link::new(CONFIG, 1);
    link.offer(0, 1500, false, 5_000_000);
    link.offer(1, 1500, false, 4_000_000);
    assert_eq!(arrivals(&mut link), [5_060_000 + 12_500_000, 5_120_000 + 12_500_000]);
}

#[test]
fn the_memory_of_the_model_is_bounded() {
    let config = LinkConfig { buffer_bytes: u64::MAX, ..CONFIG };
    let mut link = Link::new(config, 1);
    let accepted = (0..=HELD_PACKETS_MAX).filter(|_| link.offer((), 1, false, 0) == Fate::Accepted);
    assert_eq!(accepted.count(), HELD_PACKETS_MAX);
    assert_eq!(link.counters().crowded_packets, 1);
}

#[test]
fn impossible_links_are_refused() {
    assert_eq!(CONFIG.validate(), Ok(()));
    let many = PARTS + 1;
    let model = GilbertElliott { p: 0, r: many, loss_bad: 0, loss_good: 0 };
    let ceiling = Thresholds { probability_max_parts: many, ..RED };
    let phantom = |thresholds, drain_parts_per_billion| {
        Some(Phantom { drain_parts_per_billion, cap_bytes: 1, thresholds })
    };
    for config in [
        LinkConfig { loss: Loss::Independent(many), ..CONFIG },
        LinkConfig { loss: Loss::GilbertElliott(model), ..CONFIG },
        LinkConfig { reorder_parts_per_billion: many, ..CONFIG },
        LinkConfig { duplicate_parts_per_billion: many, ..CONFIG },
        LinkConfig { corrupt_parts_per_billion: many, ..CONFIG },
        LinkConfig { red: Some(ceiling), ..CONFIG },
        LinkConfig { phantom: phantom(RED, many), ..CONFIG },
        LinkConfig { phantom: phantom(ceiling, PARTS), ..CONFIG },
    ] {
        assert_eq!(config.validate(), Err(LinkError::Probability(many)));
    }
    let inverted = Thresholds { low_bytes: 2, high_bytes: 1, probability_max_parts: 1 };
    let config = LinkConfig { red: Some(inverted), ..CONFIG };
    assert_eq!(config.validate(), Err(LinkError::Thresholds { low_bytes: 2, high_bytes: 1 }));
}
