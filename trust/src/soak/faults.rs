//! Faults of the network, by `tc netem` on the interface of one side. Each side has its own
//! sequence, so both directions are affected, at times at once.

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::figures::{Line, Log};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fault {
    pub name: &'static str,
    /// The arguments of `netem`. The queue is long enough that waiting packets are not dropped.
    pub netem: &'static str,
    pub lasts: Duration,
}

const fn fault(name: &'static str, netem: &'static str, seconds: u64) -> Fault {
    Fault { name, netem, lasts: Duration::from_secs(seconds) }
}

pub(super) const NONE: Fault = fault("none", "limit 20000", 15);

/// All faults. A link goes down by losing every packet: an interface that is down would break
/// soft-RoCE's connection manager permanently (`lab/README.md`). Retransmission repairs the shorter
/// outage; the longer ends connections.
pub(super) const ALL: &[Fault] = &[
    NONE,
    fault("loss 0.1 %", "limit 20000 loss 0.1%", 15),
    fault("loss 0.5 %", "limit 20000 loss 0.5%", 15),
    fault("loss 2 %", "limit 20000 loss 2%", 15),
    // tc-netem(8): a burst begins at 0.5 % of the packets, and ends at 40 %.
    fault("loss in bursts", "limit 20000 loss gemodel 0.5% 40%", 15),
    fault("delay 2 ms", "limit 20000 delay 2ms", 15),
    fault("delay 10 ms, jitter 5 ms", "limit 20000 delay 10ms 5ms", 15),
    // tc-netem(8): reordering needs a delay.
    fault("reordered 1 %", "limit 20000 delay 2ms reorder 1%", 15),
    fault("doubled 1 %", "limit 20000 duplicate 1%", 15),
    fault("corrupted 0.1 %", "limit 20000 corrupt 0.1%", 15),
    fault("outage 3 s", "limit 20000 loss 100%", 3),
    fault("outage 30 s", "limit 20000 loss 100%", 30),
];

/// Returns all faults endlessly, each time in an order drawn from this seed.
pub(super) fn schedule(seed: u64) -> impl Iterator<Item = Fault> {
    let mut order = fastrand::Rng::with_seed(seed);
    std::iter::repeat_with(move || {
        let mut all = ALL.to_vec();
        order.shuffle(&mut all);
        all
    })
    .flatten()
}

pub(super) fn apply(interface: &str, fault: Fault) -> Result<(), String> {
    let mut command = Command::new("tc");
    // `replace` also adds a discipline where there is none (`tc(8)`).
    command.args(["qdisc", "replace", "dev", interface, "root", "netem"]).args(fault.netem.split(' '));
    let output = command.output().map_err(|error| format!("tc: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    output.status.success().then_some(()).ok_or_else(|| format!("{command:?}: {}", said.trim()))
}

pub(super) fn take_turns(
    interface: &str,
    seed: u64,
    side: &str,
    log: &Log,
    over: &AtomicBool,
) -> Result<(), String> {
    for fault in schedule(seed) {
        apply(interface, fault)?;
        log.write(&Line::Fault { at: log.now(), side: side.into(), what: fault.name.into() });
        pause(fault.lasts, over);
        if over.load(Ordering::Relaxed) {
            break;
        }
    }
    log.write(&Line::Fault { at: log.now(), side: side.into(), what: NONE.name.into() });
    // The last checks are made without faults.
    apply(interface, NONE)
}

pub(super) fn pause(time: Duration, over: &AtomicBool) {
    let begun = Instant::now();
    while begun.elapsed() < time && !over.load(Ordering::Relaxed) {
        thread::sleep(Duration::from_millis(100));
    }
}
