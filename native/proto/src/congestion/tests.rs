//! The rules of the controllers, each by what it does to the window.

use proptest::prelude::*;

use super::*;

const MICROSECOND: Nanos = 1_000;
/// 100 Gbit/s; round trips of Uno's evaluation.
const DOMAIN: Domain = Domain {
    line_bytes_per_second: 12_500_000_000,
    near_rtt: 14_030,
    far_rtt: 1_792_040,
    packet_bytes: 4096,
};
const NEAR: Nanos = DOMAIN.near_rtt;
const FAR: Nanos = DOMAIN.far_rtt;
const FAR_PRODUCT: f64 = 22_400_500.0;
const NEAR_PRODUCT: f64 = 175_375.0;

fn setup(base_rtt: Nanos) -> Setup {
    Setup {
        domain: DOMAIN,
        rate_bytes_per_second: u64::MAX,
        base_rtt,
        timeout: base_rtt + base_rtt / 3,
        start: Start::Unknown,
    }
}

/// A flow with one packet acknowledged at a time.
struct Driven {
    flow: Box<dyn Controller>,
    base_rtt: Nanos,
    now: Nanos,
    queue: Nanos,
    is_limited: bool,
    /// It sends as much as arrives, instead of its window in each round trip.
    is_clocked: bool,
    /// When it sent last.
    sent_at: Nanos,
}

impl Driven {
    fn new(algorithm: Algorithm, base_rtt: Nanos) -> Self {
        let flow = create(algorithm, &setup(base_rtt), 0);
        Self { flow, base_rtt, now: 0, queue: 0, is_limited: true, is_clocked: false, sent_at: 0 }
    }

    fn uno(rules: Rules, base_rtt: Nanos) -> Self {
        Self::new(Algorithm::Uno(rules), base_rtt)
    }

    fn window(&self) -> f64 {
        self.flow.allowance().window_bytes as f64
    }

    /// Sends a window, so that epochs count, and waits for the first answer.
    fn begin(mut self) -> Self {
        self.flow.sent(self.flow.allowance().window_bytes + 1, self.now);
        self.now += self.base_rtt;
        self.sent_at = self.now;
        self
    }

    /// One report of `bytes` sent a round trip ago, `marked` of them with a mark. What has been sent
    /// since the last one is the window's share of that time, or no more than what arrived.
    fn report(&mut self, bytes: u64, marked_bytes: u64) {
        let share = (self.now - self.sent_at) as f64 / self.base_rtt as f64;
        let sent = if self.is_clocked { bytes } else { whole(self.window() * share) };
        self.flow.sent(sent, self.now);
        self.sent_at = self.now;
        let rtt = self.base_rtt + self.queue;
        let report = Report {
            bytes,
            marked_bytes,
            lost_packets: 0,
            sent_at: self.now.saturating_sub(rtt),
            rtt,
            rtt_least: self.base_rtt,
            is_limited: self.is_limited,
        };
        self.flow.reported(&report, self.now);
    }

    /// Reports spread over a time, one each `gap`, with this share of marks in tenths; returns the
    /// factor by which the window changed.
    fn run(&mut self, time: Nanos, gap: Nanos, marked_tenths: u64) -> f64 {
        let before = self.window();
        let end = self.now + time;
        while self.now < end {
            self.now += gap;
            let bytes = whole((self.window() * gap as f64 / self.base_rtt as f64).max(10.0));
            self.report(bytes, bytes * marked_tenths / 10);
        }
        self.window() / before
    }
}

/// Share of the window that an epoch with all bytes marked takes from flows with this product.
fn decrease_of(product: f64) -> f64 {
    let threshold = NEAR_PRODUCT / 7.0;
    4.0 * threshold / (product + threshold)
}

#[test]
fn a_released_flow_starts_with_a_whole_product_and_ours_with_little() {
    let released = Driven::uno(Rules::RELEASED, FAR);
    assert!((released.window() / FAR_PRODUCT - 1.0).abs() < 1e-6);
    let ours = Driven::uno(Rules::DEFAULT, FAR);
    assert!((ours.window() / (0.02 * FAR_PRODUCT) - 1.0).abs() < 1e-6);
    let near = Driven::uno(Rules::DEFAULT, NEAR);
    assert!((near.window() / NEAR_PRODUCT - 1.0).abs() < 1e-4, "{}", near.window());
}

#[test]
fn a_small_start_doubles_until_the_first_mark_or_loss() {
    let mut flow = Driven::uno(Rules::DEFAULT, FAR);
    let doubled = flow.run(FAR, FAR / 16, 0);
    assert!((1.8..2.9).contains(&doubled), "{doubled}");
    flow.report(4096, 4096);
    let after = flow.run(FAR / 2, FAR / 16, 0);
    assert!((0.9..1.05).contains(&after), "still doubling after a mark: {after}");
    let mut flow = Driven::uno(Rules::DEFAULT, FAR);
    flow.flow.reported(&Report { lost_packets: 20, ..Report::default() }, 0);
    let after = flow.run(FAR / 2, FAR / 16, 0);
    assert!(after < 1.05, "still doubling after a loss: {after}");
}

#[test]
fn the_window_grows_by_a_thousandth_of_the_product_in_a_round_trip() {
    for (base_rtt, product) in [(NEAR, NEAR_PRODUCT), (FAR, FAR_PRODUCT)] {
        let rules = Rules { small_start: false, ..Rules::RELEASED };
        let mut flow = Driven::uno(rules, base_rtt).begin();
        flow.run(2 * base_rtt, base_rtt / 16, 10);
        let (before, at) = (flow.window(), flow.now);
        flow.run(10 * base_rtt, base_rtt / 16, 0);
        let round_trips = (flow.now - at) as f64 / base_rtt as f64;
        let grown = (flow.window() - before) / product / round_trips;
        assert!((grown / 0.001 - 1.0).abs() < 0.02, "{grown} of the product at {base_rtt} ns");
    }
}

#[test]
fn epochs_of_near_and_far_flows_last_equally_long() {
    // One fully marked epoch takes its whole share, and further epochs as much again.
    let epochs = |base_rtt: Nanos, product: f64| {
        let rules = Rules { quick_adapt: false, gradient: false, ..Rules::RELEASED };
        let mut flow = Driven::uno(rules, base_rtt).begin();
        flow.queue = base_rtt / 10;
        flow.run(20 * NEAR, NEAR / 20, 10);
        let before = flow.window();
        flow.run(40 * NEAR, NEAR / 20, 10);
        (flow.window() / before).ln() / (1.0 - decrease_of(product)).ln()
    };
    let far = epochs(FAR, FAR_PRODUCT);
    // The near flow soon has the least window, so its share of a few epochs is counted.
    assert!((33.0..41.0).contains(&far), "{far} epochs in 40 near round trips");
    let rules = Rules { quick_adapt: false, gradient: false, ..Rules::RELEASED };
    let mut near = Driven::uno(rules, NEAR).begin();
    near.run(NEAR, NEAR / 20, 0);
    near.queue = NEAR / 10;
    let factor = near.run(3 * NEAR, NEAR / 20, 10);
    let least = (1.0 - decrease_of(NEAR_PRODUCT)).powi(4);
    assert!((least..0.8).contains(&factor), "{factor} in three near round trips");
}

/// The window's change in an epoch with this share of marks after one with that share.
fn after_two_epochs(rules: Rules, first_tenths: u64, second_tenths: u64, queue: Nanos) -> f64 {
    let mut flow = Driven::uno(Rules { quick_adapt: false, ..rules }, FAR).begin();
    flow.queue = queue;
    flow.now += queue;
    let length = flow.queue / 128 + NEAR + 1;
    let bytes = 100_000;
    let epoch = |flow: &mut Driven, tenths| {
        flow.now += length;
        flow.report(bytes, bytes * tenths / 10);
    };
    // The window must not be at its limit, or an increase would not show.
    (0..200).for_each(|_| epoch(&mut flow, 10));
    (0..40).for_each(|_| epoch(&mut flow, 0));
    epoch(&mut flow, first_tenths);
    let before = flow.window();
    epoch(&mut flow, second_tenths);
    flow.window() / before
}

#[test]
fn a_falling_share_of_marks_means_a_draining_queue() {
    let queue = FAR / 10;
    let rules = Rules::RELEASED;
    assert!(after_two_epochs(rules, 2, 8, queue) < 1.0, "more marks: decrease");
    assert!(after_two_epochs(rules, 5, 1, queue) > 1.0, "fewer marks: increase");
    assert!(after_two_epochs(rules, 0, 1, queue) < 1.0, "the first marks: decrease");
    assert!(after_two_epochs(rules, 5, 0, queue) > 1.0, "no marks: increase");
    let plain = Rules { gradient: false, ..rules };
    assert!(after_two_epochs(plain, 5, 1, queue) < 1.0, "without the rule: decrease");
}

#[test]
fn a_full_phantom_queue_decreases_even_if_it_drains() {
    let mut flow = Driven::uno(Rules { quick_adapt: false, ..Rules::RELEASED }, FAR).begin();
    flow.queue = FAR / 10;
    flow.run(FAR, NEAR, 10);
    let before = flow.window();
    for _ in 0..2 {
        flow.now += 2 * NEAR;
        flow.report(100_000, 98_000);
    }
    let factor = flow.window() / before;
    assert!(factor < 1.0, "{factor}: the share falls, from all to 98 in a hundred");
}

#[test]
fn a_decrease_without_a_real_queue_is_a_third() {
    let share = |queue| 1.0 - after_two_epochs(Rules::RELEASED, 2, 8, queue);
    let (real, phantom_only) = (share(FAR / 10), share(FAR / 50));
    assert!((phantom_only / real / 0.35 - 1.0).abs() < 0.05, "{phantom_only} {real}");
    let rules = Rules { discount: false, ..Rules::RELEASED };
    let without = 1.0 - after_two_epochs(rules, 2, 8, FAR / 50);
    assert!((without / real - 1.0).abs() < 0.05, "{without} {real}");
}

#[test]
fn the_newest_epoch_has_two_thirds_of_the_weight() {
    let rules = Rules { gradient: false, ..Rules::RELEASED };
    let decrease = 1.0 - after_two_epochs(rules, 10, 10, FAR / 10);
    // Two marked epochs after many without a mark.
    let average = 1.0 - 0.35 * 0.35;
    let found = decrease / decrease_of(FAR_PRODUCT);
    assert!((found / average - 1.0).abs() < 0.02, "{found} of a decrease, not {average}");
}

#[test]
fn marked_bytes_add_nothing() {
    let mut flow = Driven::uno(Rules::RELEASED, FAR).begin();
    flow.run(20 * NEAR, NEAR / 20, 10);
    for _ in 0..40 {
        let before = flow.window();
        flow.now += NEAR / 20;
        flow.report(10_000, 10_000);
        assert!(flow.window() <= before, "{} after {before}", flow.window());
    }
}

#[test]
fn after_a_collapse_marks_count_again_once_a_window_has_been_sent() {
    let mut flow = Driven::uno(Rules::RELEASED, FAR).begin();
    flow.run(3 * FAR, FAR / 16, 0);
    let whole_window = flow.window();
    while flow.window() > whole_window / 2.0 {
        flow.now += FAR / 16;
        flow.report(whole(whole_window / 8.0 / 16.0), 0);
    }
    let before = flow.window();
    for _ in 0..40 {
        flow.now += NEAR / 20;
        flow.report(4096, 4096);
    }
    assert!(flow.window() >= before, "{} after {before}", flow.window());
}

#[test]
fn quick_adapt_takes_the_window_to_what_a_round_trip_brought() {
    let collapse = |rules: Rules| {
        let mut flow = Driven::uno(rules, FAR).begin();
        flow.report(4096, 4096);
        flow.run(3 * FAR, FAR / 16, 0);
        // The path now carries an eighth, and each packet that arrives lets another one leave.
        flow.is_clocked = true;
        let eighth = flow.window() / 8.0;
        let end = flow.now + 7 * FAR / 2;
        while flow.now < end {
            flow.now += FAR / 16;
            flow.report(whole(eighth / 16.0), 0);
        }
        flow.window() / eighth
    };
    for rules in [Rules::RELEASED, Rules::DEFAULT] {
        let adapted = collapse(rules);
        assert!((0.8..1.5).contains(&adapted), "{adapted} of what the path carries, {rules:?}");
        assert!(collapse(Rules { quick_adapt: false, ..rules }) > 7.0, "{rules:?}");
    }
}

/// A near flow to whose path an eighth is left, and what Quick Adapt has made of its window.
fn adapted(rules: Rules) -> (Driven, f64) {
    let mut flow = Driven::uno(rules, NEAR).begin();
    flow.report(4096, 4096);
    flow.run(3 * NEAR, NEAR / 16, 0);
    flow.is_clocked = true;
    let (whole_window, end) = (flow.window(), flow.now + 4 * NEAR);
    while flow.now < end {
        flow.now += NEAR / 16;
        flow.report(whole(whole_window / 8.0 / 16.0), 0);
    }
    assert!(flow.window() < 0.3 * whole_window, "{} of {whole_window}", flow.window());
    flow.is_clocked = false;
    let window = flow.window();
    (flow, window)
}

#[test]
fn after_a_collapse_a_full_phantom_queue_leaves_most_of_the_window_for_some_time() {
    let (mut flow, window) = adapted(Rules::DEFAULT);
    // What it was when the window was adapted; it may have grown a little since.
    let kept = flow.run(30 * NEAR, NEAR / 8, 10);
    assert!((0.7..0.85).contains(&kept), "{kept} of {window}");
    // Once the marks have fallen, a full queue is another one.
    flow.run(10 * NEAR, NEAR / 8, 2);
    assert!(flow.run(30 * NEAR, NEAR / 8, 10) < 0.3);
    let (mut queued, _) = adapted(Rules::DEFAULT);
    queued.queue = NEAR / 10;
    assert!(queued.run(30 * NEAR, NEAR / 8, 10) < 0.3, "a real queue");
    let (mut late, _) = adapted(Rules::DEFAULT);
    assert!(late.run(9 * FAR, NEAR / 8, 10) < 0.3, "for good");
    let (mut unguarded, _) = adapted(Rules { guarded: false, ..Rules::DEFAULT });
    assert!(unguarded.run(30 * NEAR, NEAR / 8, 10) < 0.3, "without the rule");
}

#[test]
fn a_host_that_is_late_for_a_round_trip_is_no_collapse() {
    let late = |rules| {
        let mut flow = Driven::uno(rules, FAR).begin();
        flow.report(4096, 4096);
        flow.run(2 * FAR, FAR / 16, 0);
        let before = flow.window();
        for _ in 0..2 {
            flow.now += FAR + FAR / 10;
            flow.report(4096, 0);
        }
        let late = flow.window() / before;
        flow.now += FAR / 10;
        flow.report(whole(2.0 * before), 0);
        flow.run(2 * FAR, FAR / 16, 0);
        late.min(flow.window() / before)
    };
    let ours = late(Rules::DEFAULT);
    assert!(ours > 0.95, "{ours} of the window");
    let released = late(Rules::RELEASED);
    assert!(released < 0.6, "{released} of the window");
}

#[test]
fn quick_adapt_leaves_a_window_alone_of_which_more_than_half_arrives() {
    let mut flow = Driven::uno(Rules::RELEASED, FAR).begin();
    flow.run(3 * FAR, FAR / 16, 0);
    let before = flow.window();
    let end = flow.now + 3 * FAR;
    while flow.now < end {
        flow.now += FAR / 16;
        flow.report(whole(before * 0.55 / 16.0), 0);
    }
    assert!(flow.window() >= before, "{} of {before}", flow.window());
}

#[test]
fn a_flow_that_something_else_limits_neither_grows_nor_adapts() {
    let mut flow = Driven::uno(Rules::DEFAULT, FAR).begin();
    flow.report(4096, 4096);
    flow.run(2 * FAR, FAR / 16, 0);
    flow.is_limited = false;
    let before = flow.window();
    let end = flow.now + 5 * FAR;
    while flow.now < end {
        flow.now += FAR / 16;
        flow.report(whole(before / 100.0), 0);
    }
    assert!((flow.window() / before - 1.0).abs() < 1e-9, "{} of {before}", flow.window());
    let mut unguarded = Driven::uno(Rules { guarded: false, ..Rules::DEFAULT }, FAR).begin();
    unguarded.report(4096, 4096);
    unguarded.is_limited = false;
    let before = unguarded.window();
    unguarded.run(5 * FAR, FAR / 16, 0);
    assert!(unguarded.window() > before);
}

#[test]
fn a_far_round_trip_without_marks_makes_a_flow_grow_faster_and_a_mark_undoes_it() {
    let rules = Rules { small_start: false, ..Rules::DEFAULT };
    let recovering = |rules| {
        let mut flow = Driven::uno(rules, FAR).begin();
        flow.queue = FAR / 10;
        flow.run(2 * FAR, NEAR, 10);
        flow.queue = 0;
        flow.run(2 * FAR, FAR / 16, 0);
        let grown = flow.run(4 * FAR, FAR / 16, 0);
        (grown, flow)
    };
    let (slow, _) = recovering(Rules { fast_increase: false, ..rules });
    assert!(slow < 1.03, "{slow} in four round trips without the rule");
    let (fast, mut flow) = recovering(rules);
    assert!((1.05..1.1).contains(&fast), "{fast}: four round trips of a 64th each");
    let before = flow.window();
    flow.report(4096, 4096);
    let undone = before / flow.window();
    assert!((1.05..1.08).contains(&undone), "{undone}: two of the last");
    let (_, mut longer) = recovering(rules);
    let faster = longer.run(8 * FAR, FAR / 16, 0);
    assert!(faster > 1.4, "{faster}: two 64ths, then ever more");
}

#[test]
fn a_loss_after_doubling_takes_a_quarter_of_the_window_once() {
    let lost = Report { lost_packets: 1, ..Report::default() };
    let mut flow = Driven::uno(Rules::DEFAULT, FAR).begin();
    flow.run(3 * FAR, FAR / 16, 0);
    flow.report(4096, 4096);
    let before = flow.window();
    flow.flow.reported(&lost, flow.now);
    assert!((flow.window() / before - 0.75).abs() < 0.01);
    flow.flow.reported(&lost, flow.now);
    assert!((flow.window() / before - 0.75).abs() < 0.01, "once");
    let mut late = Driven::uno(Rules::DEFAULT, FAR).begin();
    late.run(3 * FAR, FAR / 16, 0);
    late.report(4096, 4096);
    let before = late.window();
    late.flow.reported(&lost, late.now + 3 * FAR);
    assert!((late.window() / before - 1.0).abs() < 0.01, "a loss much later is no overshoot");
}

#[test]
fn reports_that_span_several_epochs_count_each() {
    let decrease = |gap| {
        let rules = Rules { gradient: false, quick_adapt: false, ..Rules::DEFAULT };
        let mut flow = Driven::uno(rules, FAR).begin();
        flow.queue = FAR / 10;
        flow.run(FAR, NEAR, 10);
        flow.run(FAR, gap, 10).ln()
    };
    let (dense, sparse) = (decrease(NEAR), decrease(8 * NEAR));
    assert!((sparse / dense - 1.0).abs() < 0.15, "{sparse} and {dense}");
}

#[test]
fn a_pause_is_not_an_epoch_after_the_other() {
    let mut flow = Driven::uno(Rules::DEFAULT, FAR).begin();
    flow.run(10 * FAR, FAR / 16, 0);
    flow.now += 1000 * FAR;
    flow.flow.sent(4096, flow.now);
    flow.now += FAR;
    let before = flow.window();
    flow.report(4096, 4096);
    let kept = flow.window() / before;
    assert!(kept > 1.0 - decrease_of(FAR_PRODUCT), "{kept} after one mark");
}

#[test]
fn a_buffer_that_overflows_is_a_queue_and_marks_alone_are_none() {
    let lost = |lost_packets| Report { lost_packets, ..Report::default() };
    let mut doubling = Driven::uno(Rules::DEFAULT, FAR);
    // Too early for a doubling that the loss could undo.
    doubling.run(FAR / 4, FAR / 16, 0);
    assert!(!doubling.flow.finds_queue());
    let packets = whole(doubling.window() / 4096.0);
    doubling.flow.reported(&lost(packets / 4), doubling.now);
    assert!(doubling.flow.finds_queue());
    doubling.report(4096, 0);
    assert!(!doubling.flow.finds_queue());
    let mut marked = Driven::uno(Rules::DEFAULT, FAR).begin();
    marked.run(3 * FAR, FAR / 16, 0);
    marked.report(4096, 4096);
    assert!(!marked.flow.finds_queue(), "it may be a phantom queue");
    marked.flow.reported(&lost(1), marked.now);
    assert!(marked.flow.finds_queue(), "the last doubling was too much");
    marked.flow.reported(&lost(1), marked.now);
    assert!(!marked.flow.finds_queue(), "once");
}

#[test]
fn a_delay_that_gemini_yields_to_is_a_queue() {
    let finds = |queue, tenths| {
        let mut flow = Driven::new(Algorithm::Gemini(GeminiRules::RELEASED), FAR).begin();
        flow.run(3 * FAR, FAR / 16, 0);
        flow.queue = queue;
        flow.run(4 * FAR, FAR / 16, tenths);
        flow.flow.finds_queue()
    };
    assert!(finds(200 * MICROSECOND, 0));
    assert!(!finds(50 * MICROSECOND, 10));
    let mut jittery = Driven::new(Algorithm::Gemini(GeminiRules::NO_MARKS), FAR).begin();
    for report in 0..200 {
        jittery.queue = if report % 4 == 0 { 0 } else { FAR };
        jittery.run(FAR / 16, FAR / 16, 0);
        assert!(!jittery.flow.finds_queue(), "one long round trip is no queue: {report}");
    }
    let mut dctcp = Driven::new(Algorithm::Dctcp, FAR).begin();
    dctcp.run(3 * FAR, FAR / 16, 10);
    assert!(!dctcp.flow.finds_queue(), "what a mark means, the session knows");
}

#[test]
fn losses_of_a_lossy_path_do_not_end_the_doubling() {
    let mut flow = Driven::uno(Rules::DEFAULT, FAR);
    for _ in 0..32 {
        let before = flow.window();
        flow.run(FAR / 16, FAR / 16, 0);
        // Five in a hundred.
        let lost_packets = whole(before / 16.0 / 4096.0 / 20.0);
        flow.flow.reported(&Report { lost_packets, ..Report::default() }, flow.now);
        assert!(!flow.flow.finds_queue());
    }
    let grown = flow.window() / (0.02 * FAR_PRODUCT);
    assert!(grown > 3.0, "{grown} times the first window after two round trips");
}

#[test]
fn a_flow_that_is_limited_by_turns_does_not_look_like_a_collapse() {
    let mut flow = Driven::uno(Rules { small_start: false, ..Rules::DEFAULT }, FAR).begin();
    flow.run(3 * FAR, FAR / 16, 0);
    let before = flow.window();
    for step in 0..320 {
        flow.now += FAR / 16;
        // A third of the window, half of the time held back by something else.
        flow.is_limited = step % 8 < 4;
        flow.report(whole(before / 48.0), 0);
    }
    assert!(flow.window() >= before, "{} of {before}", flow.window());
}

#[test]
fn after_silence_the_window_doubles_back_to_half_of_what_it_was() {
    let mut flow = Driven::uno(Rules { small_start: false, ..Rules::DEFAULT }, FAR).begin();
    flow.run(3 * FAR, FAR / 16, 0);
    let before = flow.window();
    flow.flow.timed_out(flow.now);
    flow.flow.timed_out(flow.now);
    // What was lost in the silence is reported with the first packet after it.
    flow.now += FAR;
    let sent_at = flow.now - FAR;
    let first = Report { bytes: 4096, lost_packets: 500, sent_at, ..Report::default() };
    flow.flow.reported(&first, flow.now);
    flow.run(11 * FAR, FAR / 16, 0);
    let back = flow.window() / before;
    assert!((0.45..0.85).contains(&back), "{back} of the window before");
}

#[test]
fn silence_cuts_the_window_to_what_arrived() {
    let mut flow = Driven::uno(Rules::DEFAULT, FAR).begin();
    flow.run(5 * FAR, FAR / 16, 0);
    flow.flow.timed_out(flow.now);
    assert!(flow.window() <= 0.96 * FAR_PRODUCT);
    flow.flow.timed_out(flow.now);
    assert!((flow.window() - 4096.0).abs() < 1.0, "nothing arrived in between: one packet");
    let mut released = Driven::uno(Rules::RELEASED, FAR);
    released.flow.timed_out(0);
    assert!(released.window() > 0.9 * FAR_PRODUCT);
}

#[test]
fn a_limit_below_the_line_caps_the_window_but_not_the_gains() {
    let limited = Setup { rate_bytes_per_second: 1_250_000_000, ..setup(FAR) };
    let flow = Uno::new(&limited, Rules::RELEASED, 0);
    let allowance = flow.allowance();
    assert!((allowance.window_bytes as f64 / (FAR_PRODUCT / 10.0) - 1.0).abs() < 1e-6);
    assert_eq!(allowance.rate_bytes_per_second, 1_250_000_000);
}

#[test]
fn a_longer_base_round_trip_does_not_collapse_the_window() {
    let mut flow = Driven::uno(Rules::DEFAULT, FAR).begin();
    flow.run(10 * FAR, FAR / 16, 0);
    let before = flow.window();
    flow.base_rtt = 2 * FAR;
    flow.run(20 * FAR, FAR / 16, 0);
    assert!(flow.window() > 1.5 * before, "{} of {before}", flow.window());
}

#[test]
fn each_rule_can_be_left_out_by_its_name() {
    for rule in [
        "gradient",
        "discount",
        "quick_adapt",
        "equal_epochs",
        "shared_threshold",
        "small_start",
        "fast_increase",
        "guarded",
        "restart",
    ] {
        let without = Rules::DEFAULT.without(rule).expect(rule);
        assert_ne!(without, Rules::DEFAULT, "{rule}");
        assert_eq!(without.without(rule), Some(without), "{rule}");
    }
    assert_eq!(Rules::DEFAULT.without("pacing"), None);
}

#[test]
fn dctcp_halves_if_all_is_marked_and_hardly_yields_to_few_marks() {
    let mut flow = Driven::new(Algorithm::Dctcp, FAR);
    flow.run(5 * FAR, FAR / 16, 0);
    let all = flow.run(FAR, FAR / 16, 10);
    assert!((0.6..0.7).contains(&all), "{all}: five clean round trips after an average of one");
    for _ in 0..100 {
        flow.run(FAR, FAR / 16, 0);
    }
    let few = flow.run(FAR, FAR / 16, 1);
    assert!(few > 0.97, "{few}");
    flow.flow.reported(&Report { lost_packets: 1, ..Report::default() }, flow.now);
    let before = flow.window();
    flow.flow.reported(&Report { lost_packets: 1, ..Report::default() }, flow.now);
    assert!((flow.window() - before).abs() < 1.0, "one cut in a round trip");
}

#[test]
fn gemini_yields_to_marks_near_and_to_delay_far() {
    let changed = |base_rtt: Nanos, queue, tenths| {
        let mut flow = Driven::new(Algorithm::Gemini(GeminiRules::RELEASED), base_rtt).begin();
        flow.run(3 * base_rtt, base_rtt / 16, 0);
        flow.queue = queue;
        flow.run(4 * base_rtt, base_rtt / 16, tenths)
    };
    assert!(changed(NEAR, 0, 5) < 0.8);
    assert!(changed(FAR, 200 * MICROSECOND, 0) < 0.85);
    assert!(changed(FAR, 50 * MICROSECOND, 0) >= 1.0, "below the threshold");
    assert!(changed(NEAR, 50 * MICROSECOND, 0) >= 1.0, "near flows don't look at delay");
}

#[test]
fn without_marks_delay_slows_near_flows_too_and_loss_halves() {
    let rtt = 5_000_000;
    let mut flow = Driven::new(Algorithm::Gemini(GeminiRules::NO_MARKS), rtt).begin();
    flow.run(12 * rtt, rtt / 16, 0);
    let before = flow.window();
    flow.flow.reported(&Report { lost_packets: 3, ..Report::default() }, flow.now);
    assert!((flow.window() / before - 0.5).abs() < 1e-6);
    flow.queue = rtt / 4;
    assert!(flow.run(3 * rtt, rtt / 16, 0) < 0.85);
}

proptest! {
    /// Whatever a peer reports, the window stays between a packet and the product.
    #[test]
    fn no_report_takes_the_window_out_of_its_bounds(
        index in 0..ALGORITHMS.len(),
        base_rtt in 50_000_u64..1_000_000_000,
        reports in proptest::collection::vec(
            (any::<u64>(), any::<u64>(), 0_u64..1000, any::<u64>(), any::<u64>(), any::<u64>(), any::<bool>()),
            1..60,
        ),
        steps in proptest::collection::vec(0_u64..2_000_000_000, 60),
    ) {
        let mut flow = create(ALGORITHMS[index].1, &setup(base_rtt), 0);
        let mut now = 0;
        for ((bytes, marked_bytes, lost_packets, sent_at, rtt, rtt_least, is_limited), step)
            in reports.into_iter().zip(steps)
        {
            now += step;
            flow.sent(bytes >> 20, now);
            let report = Report {
                bytes: bytes >> 16,
                marked_bytes: marked_bytes >> 16,
                lost_packets,
                sent_at,
                rtt,
                rtt_least: rtt_least >> 30,
                is_limited,
            };
            flow.reported(&report, now);
            if lost_packets == 7 {
                flow.timed_out(now);
            }
            let allowance = flow.allowance();
            prop_assert!(allowance.window_bytes >= DOMAIN.packet_bytes);
            prop_assert!(allowance.rate_bytes_per_second >= 1);
            prop_assert!(allowance.rate_bytes_per_second <= DOMAIN.line_bytes_per_second);
        }
    }
}

fn assert_near(found: f64, expected: f64) {
    assert!((found / expected - 1.0).abs() < 1e-3, "{found} instead of {expected}");
}

/// Every controller of a product's session that starts small.
const STARTING_SMALL: [Algorithm; 3] =
    [Algorithm::Uno(Rules::DEFAULT), Algorithm::Gemini(GeminiRules::DEFAULT), Algorithm::UNMARKED];

fn started(algorithm: Algorithm, window_bytes: u64, age: Nanos) -> Driven {
    let setup = Setup { start: Start::Remembered { window_bytes, age }, ..setup(FAR) };
    Driven { flow: create(algorithm, &setup, 0), ..Driven::new(algorithm, FAR) }
}

#[test]
fn a_window_that_is_known_is_used_and_not_doubled() {
    for algorithm in STARTING_SMALL {
        let mut known = started(algorithm, 10_000_000, 0).begin();
        assert_near(known.window(), 10_000_000.0);
        assert!(known.run(2 * FAR, FAR / 16, 0) < 1.1, "{algorithm:?}");
    }
    assert_near(started(Algorithm::Dctcp, 10_000_000, 0).window(), 10_000_000.0);
}

#[test]
fn a_window_of_long_ago_is_halved_each_ten_seconds_and_doubles_back() {
    let second = 1_000_000_000;
    for algorithm in STARTING_SMALL {
        let mut known = started(algorithm, 10_000_000, 20 * second).begin();
        assert_near(known.window(), 2_500_000.0);
        assert!(known.run(FAR, FAR / 16, 0) > 1.9, "{algorithm:?}");
        known.run(4 * FAR, FAR / 16, 0);
        assert!(known.window() < 12_000_000.0, "{algorithm:?}: {}", known.window());
        let unknown = Driven::new(algorithm, FAR).window();
        assert_near(started(algorithm, 10_000_000, 600 * second).window(), unknown);
    }
}

/// The window, in bytes, with which a near flow begins a message after marks have taken most of it;
/// `queue`: what the last report of the one before says of the queue.
fn resumed_window(rules: Rules, queue: Nanos, is_limited: bool) -> f64 {
    let mut flow = Driven::uno(rules, NEAR).begin();
    flow.queue = NEAR;
    flow.run(100 * NEAR, NEAR / 8, 10);
    assert!(flow.window() < 0.2 * NEAR_PRODUCT, "{}", flow.window());
    (flow.queue, flow.is_limited) = (queue, is_limited);
    flow.report(4096, 0);
    flow.flow.resumed();
    flow.window()
}

#[test]
fn a_message_after_a_rest_begins_as_that_of_a_new_session_unless_there_is_a_queue() {
    let begun = |queue| resumed_window(Rules::DEFAULT, queue, false) / NEAR_PRODUCT;
    for queue in [0, NEAR / 4] {
        assert_near(begun(queue), 1.0);
    }
    assert!(begun(NEAR / 3) < 0.2, "a queue");
    assert!(resumed_window(Rules::DEFAULT, 0, true) < 0.2 * NEAR_PRODUCT, "units waited");
    let without = Rules::DEFAULT.without("restart").unwrap();
    assert!(resumed_window(without, 0, false) < 0.2 * NEAR_PRODUCT, "without the rule");
    let mut wide = Driven::uno(Rules { small_start: false, ..Rules::DEFAULT }, FAR).begin();
    wide.is_limited = false;
    wide.report(4096, 0);
    wide.flow.resumed();
    assert!((wide.window() / FAR_PRODUCT - 1.0).abs() < 1e-3, "a larger window stays");
}

#[test]
fn a_long_pause_shrinks_the_window_as_its_age_would() {
    let second = 1_000_000_000;
    let mut flow = started(Algorithm::Uno(Rules::DEFAULT), 10_000_000, 0).begin();
    let before = flow.window();
    flow.now += 20 * second;
    flow.flow.sent(4096, flow.now);
    assert_near(flow.window() / before, 0.25);
    flow.now += FAR;
    assert!(flow.run(FAR, FAR / 16, 0) > 1.9);
    let mut short = started(Algorithm::Uno(Rules::DEFAULT), 10_000_000, 0).begin();
    short.now += second / 2;
    short.flow.sent(4096, short.now);
    assert_near(short.window(), before);
}
